"""A tiny target of two sites, for the tests of the training step, and its draws as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import pdlib
from pdlib.items.state import Decomposition, Site, TrainState, init_decomposition, named_key
from pdlib.method import losses, schedule
from pdlib.method.importance import ImportanceFn, layerwise_mlp
from pdlib.method.model import Model, decompose
from pdlib.method.objective import Term
from pdlib.method.optimizers import Optimizers, adamw
from pdlib.method.step import init_adversaries, init_state

KEY = jax.random.key(7)
SITES = {"one": "linear1/w", "two": "linear2/w"}
SHAPES = {"one": Site(4, 3, 5), "two": Site(3, 4, 4)}
COUNTS = {name: site.C for name, site in SHAPES.items()}
NAMES = list(SITES)
OPTIMIZERS = Optimizers(adamw(schedule.constant(1e-2), max_norm=0.5), adamw(schedule.constant(1e-2), weight_decay=0.1))


def apply(params: Any, x: Any) -> Any:
    """`ReLU(x W1 W2 + b)`."""

    def net(x: Any) -> Any:
        hidden = hk.Linear(3, with_bias=False, name="linear1")(x)
        out = hk.Linear(4, with_bias=False, name="linear2")(hidden)
        bias = hk.get_parameter("b", (4,), init=jnp.zeros)
        return jax.nn.relu(out + bias.reshape((1,) * (x.ndim - 1) + (4,)))

    return hk.without_apply_rng(hk.transform(net)).apply(params, x)


def params_of(seed: int = 0) -> Any:
    """Random parameters of the target, most outputs of which are positive."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32),
        {
            "linear1": {"w": random.normal(size=(4, 3)) * 0.6},
            "linear2": {"w": random.normal(size=(3, 4)) * 0.6},
            "~": {"b": random.uniform(0.2, 0.8, 4)},
        },
    )


PARAMS = params_of()


def model_of(positions: Sequence[int] = (6,), dtype: Any = jnp.float32) -> Model:
    """The target, for batches of these positions, with a mean squared error."""
    batch = jax.ShapeDtypeStruct((*positions, 4), dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    return decompose(pdlib.Target(apply, params).plan(batch), SITES, losses.mean_squared_error)


def sampler(positions: Sequence[int] = (6,), dtype: Any = jnp.float32) -> Any:
    """`key → batch`, uniform in [−1, 1]."""
    return lambda key: jax.random.uniform(key, (*positions, 4), jnp.float32, -1, 1).astype(dtype)


def product_of(importance: ImportanceFn | None = None) -> Decomposition:
    """A product some of whose logits lie below 0, in (0, 1] and above 1, with no bias of 0."""
    importance = layerwise_mlp([3]) if importance is None else importance
    product = init_decomposition(jax.random.key(1), SHAPES, importance.init)
    leaves, structure = jax.tree.flatten(product.ci_fn)
    random = np.random.default_rng(2)
    moved = [leaf + jnp.asarray(random.normal(0.2, 0.4, leaf.shape), jnp.float32) for leaf in leaves]
    return product._replace(ci_fn=jax.tree.unflatten(structure, moved))


def state_of(
    terms: Mapping[str, Term],
    *,
    product: Decomposition | None = None,
    optimizers: Optimizers = OPTIMIZERS,
    positions: tuple[int, ...] = (6,),
) -> TrainState:
    """The state before step 0."""
    adversaries = init_adversaries(terms, KEY, dict.fromkeys(NAMES, positions), COUNTS)
    return init_state(product_of() if product is None else product, optimizers, adversaries)


def copied(state: Any) -> Any:
    """The same values in buffers of their own, by way of the host, as a checkpoint would give them."""
    return jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)


def key_of_data(step: int) -> Any:
    """What a step draws its batch from."""
    return jax.random.fold_in(named_key(KEY, "data"), step)


def key_of_forward(term: str, step: int, live: Sequence[str]) -> Any:
    """What a forward of a term draws from: `route`, `fraction`, `source/<site>` and `attack` are folded into it."""
    return named_key(jax.random.fold_in(named_key(KEY, term), step), "+".join(live))


def equal(one: Any, other: Any) -> None:
    """Assert that two trees are the same to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def once(step: Any, state: TrainState) -> Any:
    """One step, compiled without optimization, since its compilation is what takes time."""
    return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})(state, PARAMS)
