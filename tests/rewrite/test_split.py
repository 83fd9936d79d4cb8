"""The model cut at its live sites: equal to the bit to the whole, and asking for no weight that it does not need."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import pdlib
from pdlib.errors import BatchMismatch, NoSuchSite, SiteRefused
from pdlib.testing import assert_bit_equal
from tests.rewrite.models import B, D, T, tokens
from tests.rewrite.oracle import C, factors_of

LAYERS = 4


def net(ids, lengths):
    """A language model whose attention needs the batch's lengths, a causal mask and transposed weights."""
    causal = jnp.tril(jnp.ones((T, T), bool))
    with hk.name_scope("embed"):
        table = hk.get_parameter("table", (11, D), init=hk.initializers.RandomNormal())
    x = table[ids]
    seen = causal[None] & (jnp.arange(T)[None, None] < lengths[:, None, None])
    for index in range(LAYERS):
        with hk.name_scope(f"layer_{index}"):
            q, k = hk.Linear(D, name="q")(x), hk.Linear(D, name="k")(x)
            scores = jnp.where(seen, jnp.einsum("btd,bsd->bts", q, k), -1e9)
            x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)
            w = hk.get_parameter("up", (4 * D, D), init=hk.initializers.RandomNormal(0.3))
            x = x + hk.Linear(D, name="down")(jax.nn.gelu(x @ w.T))
    return x @ table.T


@pytest.fixture(scope="module")
def planned():
    transformed = hk.without_apply_rng(hk.transform(net))
    batch = (tokens(), jnp.array([3, 5]))
    params = transformed.init(jax.random.key(0), *batch)
    return params, batch, pdlib.Target(transformed.apply, params).plan(batch)


@pytest.mark.parametrize(
    "globs", [["layer_2/*"], ["layer_3/down"], ["layer_0/q"], ["embed"], ["layer_1/k", "layer_3/q"]]
)
def test_prefix_and_suffix_are_the_masked_forward_to_the_bit(planned, globs):
    params, batch, plan = planned
    prefix, suffix = plan.split(globs)
    sites = plan.sites(globs)
    factors = factors_of(sites)
    masks = {
        use.name: {"mask": jax.random.uniform(jax.random.key(2), (B, T, C)), "delta": jnp.full((B, T, 1), 0.3)}
        for site in sites.values()
        for use in site.uses
    }

    def only(names):
        return {
            module: {name: leaf for name, leaf in leaves.items() if f"{module}/{name}" in names}
            for module, leaves in params.items()
        }

    residuals = jax.jit(prefix)(only(prefix.params), batch)
    out = jax.jit(suffix)(only(suffix.params), residuals, factors, masks)
    assert_bit_equal(out, jax.jit(plan.masked)(params, factors, masks, batch))
    assert [(x.shape, x.dtype) for x in residuals] == [(x.shape, x.dtype) for x in suffix.residuals]
    assert_bit_equal(jax.jit(suffix)(params, residuals, factors, {}), jax.jit(plan.clean)(params, batch)[0])


def test_each_part_names_the_parameters_it_needs_and_only_activations_pass(planned):
    params, _, plan = planned
    prefix, suffix = plan.split("layer_2/down")
    before = [f"layer_{i}/{name}" for i in range(2) for name in ("q/w", "q/b", "k/w", "k/b", "up", "down/w", "down/b")]
    assert set(prefix.params) == {
        *before,
        *(f"layer_2/{name}" for name in ("q/w", "q/b", "k/w", "k/b", "up")),
        "embed/table",
    }
    after = [f"layer_3/{name}" for name in ("q/w", "q/b", "k/w", "k/b", "up", "down/w", "down/b")]
    assert set(suffix.params) == {*after, "layer_2/down/w", "layer_2/down/b", "embed/table"}
    shapes = [residual.shape for residual in suffix.residuals]
    assert sorted(shapes) == sorted([(B, T, 4 * D), (B, T, D), (B, T, T)])
    assert {*prefix.params, *suffix.params} == {f"{module}/{name}" for module in params for name in params[module]}


def test_dropout_and_state_pass_through_a_split():
    def noisy(x, train):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(D, name="first")(x), train)
        return hk.Linear(2, name="last")(hk.dropout(hk.next_rng_key(), 0.5, x))

    transformed = hk.transform_with_state(noisy)
    x = jax.random.normal(jax.random.key(0), (B, D))
    params, state = transformed.init(jax.random.key(0), x, True)
    batch = (state, jax.random.key(1), x)
    plan = pdlib.Target(lambda p, s, k, x: transformed.apply(p, s, k, x, True), params).plan(batch)
    prefix, suffix = plan.split("last")
    assert set(suffix.params) == {"last/w", "last/b"}
    found = jax.jit(suffix)(params, jax.jit(prefix)(params, batch), {}, {})
    assert_bit_equal(found, jax.jit(plan.clean)(params, batch)[0])


def test_what_a_split_cannot_do_is_refused(planned):
    params, batch, plan = planned
    prefix, suffix = plan.split("layer_2/down")
    residuals = prefix(params, batch)
    with pytest.raises(NoSuchSite, match=r"\['layer_1/q/w'\] are not among the uses .* split for; split anew$"):
        suffix(params, residuals, {}, {"layer_1/q/w": {"mask": jnp.ones(C)}})
    with pytest.raises(BatchMismatch, match=r"^parameters \['layer_3/up'\] are needed and not there;"):
        suffix({**params, "layer_3": {}}, residuals, {}, {})
    with pytest.raises(BatchMismatch, match=r"make another plan$"):
        prefix(params, batch[0])
    with pytest.raises(SiteRefused, match="layer_0/q/b"):
        plan.split("layer_0/q/b")
