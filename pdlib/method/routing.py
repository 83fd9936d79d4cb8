"""Where a forward is decomposed and where it runs frozen, position by position; knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from pdlib.errors import ContractError
from pdlib.items.state import named_key

Positions = tuple[int, ...]
# (key, positions of each live site) → where each runs decomposed, `[*positions, 1]`; a site left out does everywhere
Router = Callable[[Any, Mapping[str, Positions]], dict[str, Bool[Array, "*positions 1"]]]


def everywhere(_: Any, __: Mapping[str, Positions]) -> dict[str, Bool[Array, "*positions 1"]]:
    """Every live site at every position."""
    return {}


def uniform_k_subset(key: Any, live: Mapping[str, Positions]) -> dict[str, Bool[Array, "*positions 1"]]:
    """At each position k of the n live sites, k ~ U{1 … n}, and those k a random subset.

    Raises:
        ContractError: live sites differ in their positions, so that no position has a subset of them.
    """
    if len(set(live.values())) > 1:
        shapes = ", ".join(f"{site}: {shape}" for site, shape in live.items())
        raise ContractError(f"subsets of sites need sites with the same positions, these differ: {shapes}; route all")
    names, (positions, *_) = sorted(live), live.values()
    key_count, key_order = jax.random.split(key)
    count = jax.random.randint(key_count, (*positions, 1), 1, len(names) + 1)
    draws = jax.random.uniform(key_order, (*positions, len(names)))
    rank = jnp.argsort(jnp.argsort(draws, axis=-1), axis=-1)
    return {site: (rank < count)[..., index : index + 1] for index, site in enumerate(names)}


def bernoulli(probability: float) -> Router:
    """Each live site at each position with this probability, on its own."""

    def route(key: Any, live: Mapping[str, Positions]) -> dict[str, Bool[Array, "*positions 1"]]:
        return {
            site: jax.random.bernoulli(named_key(key, site), probability, (*positions, 1))
            for site, positions in live.items()
        }

    return route
