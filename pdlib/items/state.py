"""The Python types of the two stored items, and the initialisation of the product; knows no optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Factors(NamedTuple):
    """The rank-one components of one site: component `c` is the outer product `V[:, c] ⊗ U[c, :]`.

    Attributes:
        V: `[d_in, C]`.
        U: `[C, d_out]`.
    """

    V: Any
    U: Any


class Decomposition(NamedTuple):
    """The product: all that a user of a finished decomposition needs.

    Attributes:
        components: `Factors` of each site, by site name.
        ci_fn: parameters of the causal-importance function, a Haiku mapping module → parameter → array.
    """

    components: dict[str, Factors]
    ci_fn: Any


class TrainingItem(NamedTuple):
    """The process: what only the continuation of training needs.

    Attributes:
        components_opt_state: optimizer state of `Decomposition.components`.
        ci_fn_opt_state: optimizer state of `Decomposition.ci_fn`.
        adversaries: persistent adversaries by the name of their loss term: sources and their moments.
        step: int32 scalar, the number of updates made.
    """

    components_opt_state: Any
    ci_fn_opt_state: Any
    adversaries: dict[str, Any]
    step: Any


class TrainState(NamedTuple):
    """What the step function carries: exactly the two stored items."""

    decomposition: Decomposition
    training: TrainingItem


class Site(NamedTuple):
    """The shape of one decomposed weight matrix `W[d_in, d_out]` and its number of components `C`."""

    d_in: int
    d_out: int
    C: int


def init_decomposition(
    key: jax.Array, sites: Mapping[str, Site], ci_fn_init: Callable[[jax.Array, Mapping[str, Site]], Any]
) -> Decomposition:
    """Draw a product: `V ~ N(0, 1/d_in)`, `U ~ N(0, 1/C)` (SPD, arXiv 2506.20790), and a fresh importance function.

    A site's draw depends on the key and the site's name alone: adding a site changes no other.

    Args:
        key: a typed PRNG key.
        sites: site name → shape.
        ci_fn_init: `(key, sites) → params`, e.g. `ImportanceFn.init`.
    """
    components = {name: _init_factors(named_key(key, f"components/{name}"), site) for name, site in sites.items()}
    return Decomposition(components, ci_fn_init(named_key(key, "ci_fn"), sites))


def named_key(key: jax.Array, name: str) -> jax.Array:
    """Fold a name into a key, so that what is drawn depends on names and never on their order."""
    from blake3 import blake3

    return jax.random.fold_in(key, int.from_bytes(blake3(name.encode()).digest(4), "little"))


def _init_factors(key: jax.Array, site: Site) -> Factors:
    key_v, key_u = jax.random.split(key)
    V = jax.random.normal(key_v, (site.d_in, site.C), jnp.float32) * site.d_in**-0.5
    U = jax.random.normal(key_u, (site.C, site.d_out), jnp.float32) * site.C**-0.5
    return Factors(V, U)
