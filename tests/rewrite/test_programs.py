"""What the compiled programs are: the plain one where nothing is live, hand-written cost where something is."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdlib
from pdlib.rewrite.jaxpr import baked
from tests.rewrite.models import MODELS, B, D, T, activations
from tests.rewrite.oracle import C, factors_of, target_of


@pytest.mark.parametrize("name", MODELS)
def test_with_no_live_site_the_lowered_program_is_the_plain_one(name):
    net, inputs, _ = MODELS[name]
    with jax.numpy_rank_promotion("allow"):
        target, batch = target_of(net, inputs)
        plan = target.plan(batch)

        def program(function):
            def forward(params, batch):
                return function(params, batch)

            return jax.jit(forward).lower(target.params, batch).as_text()

        plain = program(lambda params, batch: target.apply(params, *batch))
        assert program(lambda params, batch: plan.masked(params, {}, {}, batch)) == plain
        assert program(lambda params, batch: plan.clean(params, batch)[0]) == plain


def block(h, layer):
    """One layer of a transformer with four linears, written with any linear."""
    q = layer("q", h)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, h), axis=-1)
    h = h + layer("o", jnp.einsum("bts,bsd->btd", scores, h))
    return h + layer("down", jax.nn.gelu(layer("up", h)))


WIDTHS = {"q": D, "o": D, "up": 4 * D, "down": D}
LAYERS = 3


def plain_layer(name, x):
    return hk.Linear(WIDTHS[name], with_bias=False, name=name)(x)


def by_hand(x, W, factors, mask):
    V, U = factors
    return ((x @ V) * (mask["mask"] - mask["delta"])) @ U + mask["delta"] * (x @ W)


def unrolled():
    """A model of three layers, its twin by hand, and masks."""

    def net(x):
        for index in range(LAYERS):
            with hk.name_scope(f"layer_{index}"):
                x = block(x, plain_layer)
        return x

    def hand(params, factors, masks, x):
        for index in range(LAYERS):

            def layer(name, x, index=index):
                full = f"layer_{index}/{name}"
                return by_hand(x, params[full]["w"], factors[f"{full}/w"], masks[f"{full}/w"])

            x = block(x, layer)
        return x

    return net, hand, ()


def stacked():
    """The same in a layer_stack."""

    def net(x):
        return hk.layer_stack(LAYERS)(lambda x: block(x, plain_layer))(x)

    def hand(params, factors, masks, x):
        def step(x, now):
            params, factors, masks = now

            def layer(name, x):
                (full,) = [one for one in params if one.endswith(f"/{name}")]
                return by_hand(x, params[full]["w"], factors[f"{full}/w"], masks[f"{full}/w"])

            return block(x, layer), None

        return jax.lax.scan(step, x, (params, factors, masks))[0]

    return net, hand, (LAYERS,)


@pytest.mark.parametrize("make", [unrolled, stacked])
def test_cost_and_memory_are_those_of_a_forward_by_hand_with_and_without_gradients(make):
    net, hand, lead = make()
    transformed = hk.without_apply_rng(hk.transform(net))
    x = activations()
    params = transformed.init(jax.random.key(0), x)
    plan = pdlib.Target(transformed.apply, params).plan(x)
    sites = plan.sites("*")
    factors = factors_of(sites)
    keys = jax.random.split(jax.random.key(5), len(sites))
    masks = {
        name: {"mask": jax.random.uniform(key, (*lead, B, T, C)), "delta": jax.random.uniform(key, (*lead, B, T, 1))}
        for name, key in zip(sites, keys, strict=True)
    }
    arguments = (params, factors, masks, x)
    np.testing.assert_allclose(plan.masked(*arguments), hand(*arguments), rtol=1e-4, atol=1e-4)

    def costs(function):
        loss = jax.grad(lambda factors, masks: jnp.sum(function(params, factors, masks, x) ** 2), (0, 1))
        programs = [jax.jit(function).lower(*arguments), jax.jit(loss).lower(factors, masks)]
        compiled = [program.compile() for program in programs]
        return [(one.cost_analysis()["flops"], one.memory_analysis().temp_size_in_bytes) for one in compiled]

    for (flops, memory), (flops_by_hand, memory_by_hand) in zip(costs(plan.masked), costs(hand), strict=True):
        assert flops == pytest.approx(flops_by_hand, rel=1e-3)
        assert memory <= 1.05 * memory_by_hand


def test_a_forward_without_a_delta_path_does_not_multiply_by_the_weight():
    transformed = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(512, with_bias=False)(x)))
    x = jnp.ones((64, 512))
    params = transformed.init(jax.random.key(0), x)
    plan = pdlib.Target(transformed.apply, params).plan(x)
    factors = factors_of(plan.sites("*"), components=4)

    def flops(mask):
        lowered = jax.jit(plan.masked).lower(params, factors, {"linear/w": mask}, x)
        return lowered.compile().cost_analysis()["flops"]

    product = 2 * 64 * 512 * 512
    assert flops({"mask": jnp.ones(4)}) < 0.1 * product
    assert product < flops({"mask": jnp.ones(4), "delta": jnp.ones(1)}) < 1.2 * product


def test_nothing_large_is_baked_into_any_program():
    def net(ids):
        embed = hk.Embed(512, 256)
        x = embed(ids)
        x = hk.layer_stack(2)(lambda h: h + hk.nets.MLP([512, 256])(h))(x)
        x = hk.remat(hk.nets.MLP([512, 256], name="again"))(x)
        x = hk.Conv1D(256, 3)(x) + jax.jit(jnp.matmul)(x, hk.get_parameter("w", (256, 256), init=jnp.ones))
        return x @ embed.embeddings.T

    transformed = hk.without_apply_rng(hk.transform(net))
    ids = jnp.zeros((2, 16), jnp.int32)
    params = transformed.init(jax.random.key(0), ids)
    plan = pdlib.Target(transformed.apply, params).plan(ids)
    sites = plan.sites("*")
    factors = factors_of(sites, components=256)
    masks = {
        use.name: {"mask": jnp.ones((*use.loops, *use.positions, 256)), "delta": jnp.float32(0.5)}
        for site in sites.values()
        for use in site.uses
    }
    prefix, suffix = plan.split("again*")

    def loss(params, factors, masks, ids):
        return jnp.sum(plan.masked(params, factors, masks, ids))

    some = {name: mask for name, mask in masks.items() if name.startswith("again")}
    residuals = jax.eval_shape(prefix, params, ids)
    programs = [
        plan.trace.closed,
        jax.make_jaxpr(plan.masked)(params, factors, masks, ids),
        jax.make_jaxpr(jax.grad(loss, (1, 2)))(params, factors, masks, ids),
        jax.make_jaxpr(lambda params, ids: plan.clean(params, ids, taps="*"))(params, ids),
        jax.make_jaxpr(prefix)(params, ids),
        jax.make_jaxpr(suffix)(params, residuals, factors, some),
    ]
    assert [baked(program) for program in programs] == [[]] * len(programs)


def test_what_is_baked_is_found_wherever_it_hides():
    W = jnp.ones((256, 256))
    x = jnp.ones((4, 256))
    hiding = [
        lambda x: x @ W,
        lambda x: x @ np.ones((256, 256), np.float32),
        lambda x: jax.jit(lambda y: y @ W)(x),
        lambda x: jax.lax.scan(lambda c, _: (c @ W, None), x, None, length=2)[0],
        lambda x: jax.checkpoint(lambda y: jnp.sin(y @ W))(x),
    ]
    for function in hiding:
        assert baked(jax.make_jaxpr(function)(x)) == [(4 * 256 * 256, (256, 256))]
