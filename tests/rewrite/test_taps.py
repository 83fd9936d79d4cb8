"""Masks at each position against forwards by hand, and activations on the way of the clean one."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from pdlib.testing import assert_bit_equal
from tests.rewrite.models import MODELS, B, D, T, activations, tokens, weight
from tests.rewrite.oracle import C, factors_of, target_of


def random_masks(site, name):
    keys = jax.random.split(jax.random.key(5), 3)
    shape = site.positions[name]
    return {
        "mask": jax.random.uniform(keys[0], (*shape, C)),
        "delta": jax.random.uniform(keys[1], (*shape, 1)),
        "route": jax.random.bernoulli(keys[2], 0.5, (*shape, 1)),
    }


def by_hand(x, W, factors, mask):
    """`((x V) ⊙ m) U + δ · x (W − V U)` where routed, `x W` elsewhere; as METHOD has it, in float64."""
    x, W, V, U = (np.asarray(a, np.float64) for a in (x, W, *factors))
    m, d = np.asarray(mask["mask"], np.float64), np.asarray(mask["delta"], np.float64)
    return np.where(mask["route"], ((x @ V) * m) @ U + d * (x @ (W - V @ U)), x @ W)


def _windows(x, kernel):
    """Patches of a convolution `SAME` along time, `[B, T, kernel · D]`."""
    left = (kernel - 1) // 2
    padded = np.pad(np.asarray(x), ((0, 0), (left, kernel - 1 - left), (0, 0)))
    return np.concatenate([padded[:, k : k + x.shape[1]] for k in range(kernel)], axis=-1)


def test_each_position_has_its_mask_and_route_in_a_linear():
    x = activations()
    target, batch = target_of(lambda x: hk.Linear(7, with_bias=False)(x), (x,))
    check(target, batch, "linear/w", x, lambda p: p["linear"]["w"], lambda y: y)


def test_each_position_has_its_mask_where_the_weight_stands_on_the_left():
    x = activations()
    target, batch = target_of(MODELS["parameter_on_the_left"].net, (x,))
    check(target, batch, "~/w", x, lambda p: p["~"]["w"].T, lambda y: y.swapaxes(1, 2))


def test_each_position_has_its_mask_in_heads():
    x = activations()
    target, batch = target_of(lambda x: jnp.einsum("dhk,btd->bhtk", weight("wq", D, 2, 3), x), (x,))
    check(target, batch, "~/wq", x, lambda p: p["~"]["wq"].reshape(D, 6), lambda y: heads_first(y))


def heads_first(y):
    return y.reshape(B, T, 2, 3).transpose(0, 2, 1, 3)


def test_each_position_has_its_mask_in_a_convolution_channels_last_and_first():
    x = activations()
    target, batch = target_of(lambda x: hk.Conv1D(4, 3, with_bias=False)(x), (x,))
    check(target, batch, "conv1_d/w", _windows(x, 3), lambda p: p["conv1_d"]["w"].reshape(3 * D, 4), lambda y: y)
    net = lambda x: hk.Conv1D(4, 3, with_bias=False, data_format="NCW")(jnp.swapaxes(x, 1, 2))  # noqa: E731
    target, batch = target_of(net, (x,))
    matrix = lambda p: p["conv1_d"]["w"].reshape(3 * D, 4)  # noqa: E731
    check(target, batch, "conv1_d/w", _windows(x, 3), matrix, lambda y: y.swapaxes(1, 2))


def test_each_position_has_its_mask_in_a_lookup():
    ids = tokens()
    target, batch = target_of(lambda ids: hk.Embed(11, D)(ids), (ids,))
    check(
        target, batch, "embed/embeddings", np.eye(11)[np.asarray(ids)], lambda p: p["embed"]["embeddings"], lambda y: y
    )


def check(target, batch, name, x, matrix, out):
    plan = target.plan(batch)
    site = plan.sites(name)[name]
    factors = factors_of({name: site})
    mask = random_masks(site, name)
    found, _ = jax.jit(plan.masked)(target.params, factors, {name: mask}, batch)
    wanted = out(by_hand(x, matrix(target.params), factors[name], mask))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_each_layer_of_a_stack_has_its_masks_and_taps():
    x = activations()
    target, batch = target_of(lambda x: hk.layer_stack(3)(lambda h: jnp.tanh(hk.Linear(D)(h)))(x), (x,))
    plan = target.plan(batch)
    ((name, site),) = plan.sites("*").items()
    assert site.positions == {name: (3, B, T)}
    factors, mask = factors_of({name: site}), random_masks(site, name)
    found, _ = jax.jit(plan.masked)(target.params, factors, {name: mask}, batch)
    layer = target.params[name.rpartition("/")[0]]
    h, clean = np.asarray(x), np.asarray(x)
    _, taps = jax.jit(lambda p, b: plan.clean(p, b, taps="*"))(target.params, batch)
    assert taps[name].input.shape == taps[name].output.shape == (3, B, T, D)
    for index in range(3):
        W, b = layer["w"][index], np.asarray(layer["b"][index])
        one = {part: value[index] for part, value in mask.items()}
        h = np.tanh(by_hand(h, W, [part[index] for part in factors[name]], one) + b[None, None])
        np.testing.assert_allclose(taps[name].input[index], clean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(taps[name].output[index], clean @ W, rtol=1e-4, atol=1e-5)
        clean = np.tanh(clean @ np.asarray(W) + b[None, None])
    np.testing.assert_allclose(found, h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("bfloat16", "layer_stack_nested"))])
def test_taps_leave_the_output_alone_and_have_the_axes_of_masks_and_factors(name):
    net, inputs, _ = MODELS[name]
    with jax.numpy_rank_promotion("allow"):
        target, batch = target_of(net, inputs)
        plan = target.plan(batch)
        _, taps = jax.eval_shape(lambda p, b: plan.clean(p, b, taps="*"), target.params, batch)
    uses = [use for site in plan.sites("*").values() for use in site.uses]
    assert set(taps) == {use.name for use in uses}
    for site in plan.sites("*").values():
        for use in site.uses:
            d_in, d_out = (site.d_out, site.d_in) if use.transposed else (site.d_in, site.d_out)
            assert taps[use.name].output.shape == (*site.positions[use.name], d_out)
            if use.kind == "dot":
                assert taps[use.name].input.shape == (*site.positions[use.name], d_in)


def test_a_dot_s_tap_meets_its_matrix_in_the_same_order():
    """`input @ matrix` is `output` for every dot, in whatever order the model keeps its axes."""
    names = ["heads_of_three_axes", "heads_in_another_order", "experts", "contracted_over_two_axes", "tied_autoencoder"]
    for name in [*names, "parameter_on_the_left", "reshaped_to_heads", "flattened_inputs"]:
        net, inputs, _ = MODELS[name]
        target, batch = target_of(net, inputs)
        plan = target.plan(batch)
        (_, taps), matrices = plan.clean(target.params, batch, taps="*"), plan.matrices(target.params)
        for key, site in plan.sites("*").items():
            for use in site.uses:
                W = jnp.swapaxes(matrices[key], -1, -2) if use.transposed else matrices[key]
                x = taps[use.name].input
                wanted = jnp.einsum("e...d,edf->e...f", x, W) if site.batch else x @ W
                np.testing.assert_allclose(taps[use.name].output, wanted, rtol=1e-4, atol=1e-4)


def test_named_activations_are_tapped_in_loops_and_beside_uses():
    def net(x):
        x = checkpoint_name(jnp.tanh(x), "entry")
        x = hk.layer_stack(3)(lambda h: checkpoint_name(jax.nn.relu(hk.Linear(D)(h)), "stream"))(x)
        return hk.remat(lambda x: checkpoint_name(hk.Linear(2, name="head")(x), "entry"))(x)

    target, batch = target_of(net, (activations(),))
    plan = target.plan(batch)
    out, taps = jax.jit(lambda p, b: plan.clean(p, b, taps=["entry*", "stream", "head"]))(target.params, batch)
    assert set(taps) == {"entry@0", "entry@1", "stream", "head/w"}
    assert taps["stream"].input is None
    assert taps["stream"].output.shape == (3, B, T, D)
    np.testing.assert_allclose(taps["entry@0"].output, jnp.tanh(activations()), rtol=1e-6)
    np.testing.assert_array_equal(taps["entry@1"].output, out[0])
    np.testing.assert_array_equal(taps["head/w"].input, taps["stream"].output[-1])
    assert_bit_equal(out, jax.jit(target.apply)(target.params, *batch))


def test_branches_that_are_not_taken_report_zeros():
    net, inputs, _ = MODELS["cond"]
    target, batch = target_of(net, inputs)
    plan = target.plan(batch)
    _, taps = plan.clean(target.params, batch, taps="*")
    taken, other = ("a/w", "b/w") if float(jnp.sum(inputs[0])) > 0 else ("b/w", "a/w")
    np.testing.assert_array_equal(taps[taken].input, inputs[0])
    np.testing.assert_array_equal(taps[other].input, jnp.zeros_like(inputs[0]))


def test_a_matrix_goes_back_to_its_parameter():
    for name in ("heads_in_another_order", "experts_with_the_last_axis", "layer_stack_nested", "conv2d_dilated"):
        net, inputs, _ = MODELS[name]
        with jax.numpy_rank_promotion("allow"):
            target, batch = target_of(net, inputs)
            plan = target.plan(batch)
        for key, matrix in plan.matrices(target.params).items():
            module, _, parameter = key.rpartition("/")
            site = plan.sites(key)[key]
            assert matrix.shape == (*site.lead, *site.batch, site.d_in, site.d_out)
            assert_bit_equal(site.parameter(matrix), target.params[module][parameter])
