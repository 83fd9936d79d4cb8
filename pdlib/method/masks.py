"""Where the masks of components come from; knows no model."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from pdlib.rewrite.masks import SiteMask


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
