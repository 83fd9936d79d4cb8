"""Every kind of model: masked forwards against the plain one with other weights, and bits against the frozen one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pdlib
from pdlib.testing import assert_bit_equal
from tests.rewrite.models import MODELS
from tests.rewrite.oracle import C, assert_oracle, factors_of, shared_masks, target_of

each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def rank_promotion():
    """Haiku's own modules promote ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@each_model
def test_masks_that_all_positions_share_equal_other_weights_in_values_and_gradients(name):
    net, inputs, tolerance = MODELS[name]
    target, batch = target_of(net, inputs)
    plan = target.plan(batch)
    sites = plan.sites("*")
    assert not plan.refused
    assert_oracle(plan, target, batch, sites, tolerance)


def assert_frozen(name, *, compiled):
    """With masks of one, and where nothing is routed, the output is that of the plain forward to the bit."""
    net, inputs, _ = MODELS[name]
    target, batch = target_of(net, inputs)
    plan = target.plan(batch)
    sites = plan.sites("*")
    factors = factors_of(sites)
    one, zero = jnp.float32(1), jnp.float32(0)
    cases = ((jnp.ones(C), one, None), (jnp.ones(C), one, jnp.array(True)), (jnp.zeros(C), zero, jnp.array(False)))
    with jax.disable_jit(not compiled):
        frozen = jax.jit(target.apply)(target.params, *batch)
        for g, delta, route in cases:
            masks = shared_masks(sites, g, delta, route)
            assert_bit_equal(jax.jit(plan.masked)(target.params, factors, masks, batch), frozen)


@each_model
def test_masks_of_one_and_unrouted_positions_are_the_frozen_forward_to_the_bit(name):
    """One operation at a time: what XLA fuses around a product may round otherwise, on some machines in some models."""
    assert_frozen(name, compiled=False)


@pytest.mark.parametrize("name", ["mlp", "attention", "layer_stack", "conv1d", "tied_unembedding"])
def test_compiled_masks_of_one_and_unrouted_positions_are_the_frozen_forward_to_the_bit(name):
    assert_frozen(name, compiled=True)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"one_in_and_one_out"}))
def test_nearly_every_compiled_model_is_the_frozen_one_to_the_bit(name):
    """The one left out multiplies by a weight of 1 × 1, which XLA fuses with its bias in the frozen program alone."""
    assert_frozen(name, compiled=True)


def test_a_zero_keeps_its_sign():
    table = jnp.array([[-0.0, 0.0], [1.0, -0.0]])
    plan = pdlib.Target(lambda p, ids, x: (p["m"]["table"][ids], x @ p["m"]["one"]), _signs(table)).plan(_ids())
    factors = factors_of(plan.sites("*"))
    masks = {name: {"mask": jnp.ones(C), "delta": jnp.ones(1)} for name in factors}
    out = jax.jit(plan.masked)(_signs(table), factors, masks, _ids())
    assert_bit_equal(out, (table[_ids()[0]], jnp.array([[-0.0, 0.0], [0.0, -0.0]])))


def _signs(table):
    return {"m": {"table": table, "one": jnp.array([[-1.0, 1.0]])}}


def _ids():
    return jnp.array([0, 1, 1]), jnp.array([[0.0], [-0.0]])


def test_there_are_at_least_forty_models():
    assert len(MODELS) >= 40
