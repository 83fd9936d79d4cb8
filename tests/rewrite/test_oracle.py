"""Every kind of model: masked forwards against the plain one with other weights, and bits against the frozen one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pdlib
from pdlib.testing import assert_bit_equal
from tests.rewrite.models import MODELS
from tests.rewrite.oracle import C, assert_oracle, factors_of, shared_masks, target_of

# XLA fuses what stands around the product differently in these, on CPU: they are compared one operation at a time
FUSED_OTHERWISE = {"one_in_and_one_out", "batch_norm_and_dropout"}
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


@each_model
def test_masks_of_one_and_unrouted_positions_are_the_frozen_forward_to_the_bit(name):
    net, inputs, _ = MODELS[name]
    target, batch = target_of(net, inputs)
    plan = target.plan(batch)
    sites = plan.sites("*")
    compiled = (lambda function: function) if name in FUSED_OTHERWISE else jax.jit
    frozen = compiled(target.apply)(target.params, *batch)
    masked = compiled(plan.masked)
    ones, zeros = jnp.ones(C), jnp.zeros(C)
    for g, delta, route in ((ones, 1.0, True), (zeros, 0.5, False)):
        masks = shared_masks(sites, g, jnp.float32(delta), jnp.array(route))
        assert_bit_equal(masked(target.params, factors_of(sites), masks, batch), frozen)


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
