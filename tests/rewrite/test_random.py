"""Random networks, mixed of every way to use a weight and nested in loops, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rewrite.models import B, D, T, weight
from tests.rewrite.oracle import assert_oracle, target_of

X = jax.random.normal(jax.random.key(0), (B, T, D))
LEAVES: dict[str, Callable[[Any], Any]] = {}


def leaf(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Register a layer `[B, T, D] → [B, T, D]`; as a Haiku module, so that each has parameters of its own."""

    class Layer(hk.Module):
        def __call__(self, x: Any) -> Any:
            return function(x)

    LEAVES[function.__name__] = lambda x: Layer(name=function.__name__)(x)
    return function


@leaf
def linear(x):
    return hk.Linear(D)(x)


@leaf
def bottleneck(x):
    return hk.Linear(D)(jax.nn.gelu(hk.Linear(1)(x)))


@leaf
def stored_transposed(x):
    return x @ weight("w", D, D).T


@leaf
def on_the_left(x):
    return jnp.swapaxes(weight("w", D, D) @ jnp.swapaxes(x, 1, 2), 1, 2)


@leaf
def heads(x):
    h = jnp.einsum("btd,hdk->bhtk", x, weight("into", 2, D, 3))
    return jnp.einsum("bhtk,hkd->btd", jnp.tanh(h), weight("out", 2, 3, D))


@leaf
def fused_heads(x):
    q, v = jnp.moveaxis(jnp.einsum("btd,dchk->cbthk", x, weight("w", D, 2 * D).reshape(D, 2, 2, D // 2)), 0, 0)
    return (q * jax.nn.sigmoid(v)).reshape(B, T, D)


@leaf
def experts(x):
    h = jnp.einsum("btd,edf->ebtf", x, weight("up", 3, D, 4))
    return jnp.einsum("ebtf,efd->btd", jnp.tanh(h), weight("down", 3, 4, D))


@leaf
def convolution(x):
    return hk.Conv1D(D, 3, rate=2)(x)


@leaf
def over_time(x):
    return jnp.einsum("btd,ts->bsd", x, weight("mix", T, T))


@leaf
def lookup(x):
    return x + weight("table", D, D)[jnp.argmax(x, axis=-1)]


@leaf
def tied(x):
    w = weight("w", D, 3)
    return jnp.tanh(x @ w) @ w.T


@leaf
def recurrent(x):
    core = hk.LSTM(D)
    return hk.dynamic_unroll(core, x, core.initial_state(B), time_major=False)[0]


@leaf
def either(x):
    a, b = weight("a", D, D), weight("b", D, D)
    return jax.lax.cond(jnp.mean(x) > 0, lambda x: x @ a, lambda x: jnp.tanh(x) @ b, x)


@leaf
def per_example(x):
    return hk.vmap(hk.Linear(D), split_rng=False)(x)


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.just("stack"), st.integers(1, 3), inner),
        st.tuples(st.just("remat"), st.just(1), inner),
        st.tuples(st.just("residual"), st.just(1), inner),
        st.tuples(st.just("two"), inner, inner),
    )


NETWORKS = st.recursive(st.sampled_from(sorted(LEAVES)), nests, max_leaves=3)


def build(plan: Any) -> Callable[[Any], Any]:
    """A network from what hypothesis drew."""
    if isinstance(plan, str):
        return LEAVES[plan]
    kind, first, inner = plan
    if kind == "two":
        one, other = build(first), build(inner)
        return lambda x: other(jnp.tanh(one(x)))
    body = build(inner)
    if kind == "stack":
        return lambda x: hk.layer_stack(first)(lambda h: 0.5 * h + body(h))(x)
    if kind == "remat":
        return lambda x: hk.remat(body)(x)
    return lambda x: x + body(x)


def check(drawn: Any) -> None:
    with jax.numpy_rank_promotion("allow"):
        target, batch = target_of(build(drawn), (X,))
        plan = target.plan(batch)
        sites = plan.sites("*")
        assert not plan.refused
        assert_oracle(plan, target, batch, sites, 1e-4)


@settings(max_examples=5)
@given(NETWORKS)
def test_any_mixture_of_layers_is_decomposed_exactly(drawn):
    check(drawn)


@pytest.mark.deep
@settings(max_examples=150)
@given(NETWORKS)
def test_many_mixtures_of_layers_are_decomposed_exactly(drawn):
    check(drawn)
