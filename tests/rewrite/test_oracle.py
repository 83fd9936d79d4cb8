"""Every kind of model: masked forwards against the plain one with other weights, and bits against the frozen one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

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


@each_model
def test_masks_of_one_and_unrouted_positions_are_the_frozen_forward_to_the_bit(name):
    net, inputs, _ = MODELS[name]
    target, batch = target_of(net, inputs)
    plan = target.plan(batch)
    sites = plan.sites("*")
    factors = factors_of(sites)
    frozen = jax.jit(target.apply)(target.params, *batch)
    masked = jax.jit(lambda masks: plan.masked(target.params, factors, masks, batch))
    ones, zero = shared_masks(plan, sites, jnp.ones(C), jnp.float32(1)), jnp.zeros(())
    assert_bit_equal(masked(ones), frozen)
    assert_bit_equal(masked(shared_masks(plan, sites, jnp.zeros(C), zero, jnp.array(False))), frozen)
    assert_bit_equal(jax.jit(lambda: plan.masked(target.params, factors, {}, batch))(), frozen)


def test_there_are_at_least_forty_models():
    assert len(MODELS) >= 40
