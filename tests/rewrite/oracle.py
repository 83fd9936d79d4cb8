"""The oracle: with masks that are the same at each position, a masked forward is the plain one with other weights.

`W_eff = V diag(g) U + δ (W − V U)`, so that nothing of the rewrite is needed to say what should come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import pdlib
from pdlib.rewrite.plan import Plan
from pdlib.rewrite.sites import WeightSite

C = 6
G = jnp.linspace(0.0, 1.3, C)
DELTA = jnp.float32(0.4)


def target_of(net: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[pdlib.Target, tuple[Any, ...]]:
    """A target with random parameters, and its batch: state, key, inputs. Nothing is compiled."""
    transformed = hk.transform_with_state(net)
    with jax.numpy_rank_promotion("allow"):
        params, state = jax.eval_shape(transformed.init, jax.random.key(0), *inputs)
    random = np.random.default_rng(3)

    def weight(leaf: Any) -> Any:
        size = leaf.shape[-2] if len(leaf.shape) > 1 else 10
        return jnp.asarray(random.normal(0.1, max(size, 3) ** -0.5, leaf.shape), leaf.dtype)

    def moment(leaf: Any) -> Any:
        return jnp.asarray(np.abs(random.normal(size=leaf.shape)) + 0.1, leaf.dtype)

    batch = (jax.tree.map(moment, state), jax.random.key(4), *inputs)
    return pdlib.Target(transformed.apply, jax.tree.map(weight, params)), batch


def factors_of(sites: Mapping[str, WeightSite], *, components: int = C) -> dict[str, pdlib.Factors]:
    """Random factors of every site."""
    found: dict[str, pdlib.Factors] = {}
    for index, (name, site) in enumerate(sites.items()):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(9), index))
        front = (*site.lead, *site.batch)
        V = jax.random.normal(keys[0], (*front, site.d_in, components)) * 0.3
        U = jax.random.normal(keys[1], (*front, components, site.d_out)) * 0.3
        found[name] = pdlib.Factors(V, U)
    return found


def effective(
    params: Any, sites: Mapping[str, WeightSite], factors: Mapping[str, pdlib.Factors], g: Any, delta: Any
) -> Any:
    """The parameters with each site's `V diag(g) U + δ (W − V U)` for W."""

    def one(path: Any, leaf: Any) -> Any:
        name = "/".join(str(key.key) for key in path)
        if name not in sites:
            return leaf
        V, U = (part.astype(leaf.dtype) for part in factors[name])
        rest = sites[name].matrix(leaf) - V @ U
        lead = (1,) * (V.ndim - 1)
        return sites[name].parameter((V * g.reshape(*lead, -1)) @ U + delta * rest)

    return jax.tree_util.tree_map_with_path(one, params)


def real_sum(out: Any) -> Any:
    """A number that depends on everything in an output."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) * (1 + index)) for index, x in enumerate(leaves))


def shared_masks(sites: Mapping[str, WeightSite], g: Any, delta: Any, route: Any = None) -> dict[str, Any]:
    """One mask for every use and position."""
    names = dict.fromkeys(use.name for site in sites.values() for use in site.uses)
    return {name: {"mask": g, "delta": delta, "route": route} for name in names}


def assert_oracle(
    plan: Plan,
    target: pdlib.Target,
    batch: Any,
    sites: Mapping[str, WeightSite],
    tolerance: float,
    *,
    gradients: bool = True,
) -> None:
    """Values, and gradients by factors and masks, of the masked forward are those with effective weights."""
    factors = factors_of(sites)

    def masked(factors: Any, g: Any, delta: Any) -> Any:
        out = plan.masked(target.params, factors, shared_masks(sites, g, delta), batch)
        return real_sum(out), out

    def plain(factors: Any, g: Any, delta: Any) -> Any:
        out = target.apply(effective(target.params, sites, factors, g, delta), *batch)
        return real_sum(out), out

    if not gradients:
        assert_near(jax.jit(masked)(factors, G, DELTA)[1], jax.jit(plain)(factors, G, DELTA)[1], tolerance)
        return
    found, wanted = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(factors, G, DELTA)
        for function in (masked, plain)
    )
    assert_near(found[0][1], wanted[0][1], tolerance)
    scale = max(1.0, *(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(wanted[1])))
    assert_near(found[1], wanted[1], 20 * tolerance * scale)


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    """Equal trees of numbers, up to a tolerance both relative and absolute."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
