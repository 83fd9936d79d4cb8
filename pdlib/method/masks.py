"""Masks of components, and the masked forward of one linear site; knows no model."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from pdlib.items.state import Factors


class SiteMask(NamedTuple):
    """What one forward does to a site.

    Attributes:
        mask: `[..., C]`, the factor of each component at each position.
        delta: `[..., 1]`, the factor of `W − V U`.
    """

    mask: Any
    delta: Any


def masked_linear(
    x: Float[Array, "*positions d_in"], W: Float[Array, "d_in d_out"], factors: Factors, site: SiteMask
) -> Float[Array, "*positions d_out"]:
    """`((x V) ⊙ m) U + δ · x (W − V U)`, without forming `V U`: `((x V) ⊙ (m − δ)) U + δ · x W`.

    Exact at m = δ = 1, where it is `x W` to the bit.
    """
    return ((x @ factors.V) * (site.mask - site.delta)) @ factors.U + site.delta * (x @ W)


def stochastic_mask(key: Any, lower: Float[Array, "*positions C"]) -> SiteMask:
    """`m = g + (1 − g)·s` with `s ~ U[0, 1]` for each component and position, and `δ ~ U[0, 1]` for each position.

    Args:
        key: a typed PRNG key.
        lower: the lower causal importance g, in [0, 1].
    """
    key_mask, key_delta = jax.random.split(key)
    source = jax.random.uniform(key_mask, lower.shape, lower.dtype)
    delta = jax.random.uniform(key_delta, (*lower.shape[:-1], 1), lower.dtype)
    return SiteMask(lower + (1 - lower) * source, delta)
