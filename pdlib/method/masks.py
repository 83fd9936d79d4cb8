"""From causal importance to masks: sources, and what a source makes of an importance; knows no model.

A mask is `m = g + (1 − g)·s`, with the lower importance g and a source s, both in [0, 1]. A source of a site has one
value more than the site has components: the factor δ of what the components leave of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pdlib.rewrite.masks import SiteMask


class Drawn(NamedTuple):
    """The source of one site in one forward.

    Attributes:
        source: `[*positions, C]`, sizes of one allowed, in [0, 1].
        delta: `[*positions, 1]`, or None for a forward without a delta path.
    """

    source: Any
    delta: Any = None


Source = Callable[[Any, Float[Array, "*positions C"]], Drawn]  # (key, lower importance) → a source


def constant(value: float) -> Source:
    """The same value everywhere and no delta path: 0 masks by importance alone, 1 does not mask."""
    return lambda _, lower: Drawn(jnp.full((1,) * lower.ndim, value, lower.dtype))


def uniform(key: Any, lower: Float[Array, "*positions C"]) -> Drawn:
    """`s ~ U[0, 1]` for each component and position, `δ ~ U[0, 1]` for each position."""
    key_source, key_delta = jax.random.split(key)
    return Drawn(
        jax.random.uniform(key_source, lower.shape).astype(lower.dtype),
        jax.random.uniform(key_delta, (*lower.shape[:-1], 1)).astype(lower.dtype),
    )


def bernoulli(key: Any, lower: Float[Array, "*positions C"]) -> Drawn:
    """`s` and `δ` of 0 or 1, evenly."""
    key_source, key_delta = jax.random.split(key)
    return Drawn(
        jax.random.bernoulli(key_source, 0.5, lower.shape).astype(lower.dtype),
        jax.random.bernoulli(key_delta, 0.5, (*lower.shape[:-1], 1)).astype(lower.dtype),
    )


SOURCES: dict[str, Source] = {
    "ci_masked": constant(0.0),
    "unmasked": constant(1.0),
    "uniform": uniform,
    "bernoulli": bernoulli,
}


def masked_by(lower: Float[Array, "*positions C"], drawn: Drawn, route: Any = None) -> SiteMask:
    """`m = g + (1 − g)·s` with the source's δ, routed as told."""
    return SiteMask(lower + (1 - lower) * drawn.source, drawn.delta, route)


def either(choice: Any, first: Drawn, second: Drawn) -> Drawn:
    """The first source where `choice [*positions, 1]` is true, else the second; a missing δ is 0."""
    zero = jnp.zeros((), first.source.dtype)
    deltas = [zero if one.delta is None else one.delta for one in (first, second)]
    return Drawn(jnp.where(choice, first.source, second.source), jnp.where(choice, deltas[0], deltas[1]))
