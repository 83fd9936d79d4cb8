"""Losses and schedules against float64 NumPy, and their gradients where they could break."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdlib.items.state import Factors
from pdlib.method import losses, schedule
from tests import oracle

RANDOM = np.random.default_rng(1)
UPPER = {"a": RANDOM.random((2, 3, 4)), "b": 1.3 * RANDOM.random((6, 5))}
WEIGHTS = {"a": RANDOM.standard_normal((6, 5)), "b": 100 * RANDOM.standard_normal((3, 4))}
COMPONENTS = {
    s: (RANDOM.standard_normal((W.shape[0], 7)), RANDOM.standard_normal((7, W.shape[1]))) for s, W in WEIGHTS.items()
}


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def test_relative_faithfulness_weighs_sites_alike():
    found = losses.relative_faithfulness(single(WEIGHTS), {s: Factors(*single(f)) for s, f in COMPONENTS.items()})
    np.testing.assert_allclose(found, oracle.relative_faithfulness(WEIGHTS, COMPONENTS), rtol=1e-5)


@pytest.mark.parametrize("reference", [1.0, 2.0**20])
@pytest.mark.parametrize("kind", ["power", "smooth_l0"])
def test_minimality_and_its_frequency_term_agree_with_numpy(kind, reference):
    at, steps = 3, 11
    if kind == "power":
        p = 2 + (0.4 - 2) * at / (steps - 1)
        penalty, cost = losses.power_penalty(schedule.anneal(2.0, 0.4, steps)), lambda u: (u + 1e-12) ** p
    else:
        width = 1 + (0.01 - 1) * at / (steps - 1)
        penalty, cost = losses.smooth_l0(schedule.anneal(1.0, 0.01, steps)), lambda u: u**2 / (u**2 + width**2)
    found = losses.minimality(single(UPPER), at, penalty=penalty, reference=reference)
    np.testing.assert_allclose(found, oracle.minimality(UPPER, cost, reference), rtol=1e-5)


def test_the_mean_of_minimality_is_taken_over_the_whole_batch_before_the_logarithm():
    penalty = losses.power_penalty(schedule.constant(1.0))
    whole = losses.minimality(single({"a": UPPER["a"]}), 0, penalty=penalty, reference=50.0)
    halves = [losses.minimality(single({"a": u}), 0, penalty=penalty, reference=50.0) for u in UPPER["a"]]
    np.testing.assert_allclose(whole.activity, np.mean([h.activity for h in halves]), rtol=1e-6)
    assert whole.frequency < np.mean([h.frequency for h in halves]) - 1e-3


@pytest.mark.parametrize(
    "penalty", [losses.power_penalty(schedule.constant(0.4)), losses.smooth_l0(schedule.constant(0.01))]
)
def test_gradients_of_dead_components_are_finite(penalty):
    gradient = jax.grad(lambda u: losses.minimality({"a": u}, 0, penalty=penalty, reference=9.0).frequency)
    assert np.isfinite(gradient(jnp.zeros((3, 4)))).all()


def test_divergences_of_logits_agree_with_numpy_and_survive_large_ones():
    out, clean = RANDOM.standard_normal((2, 3, 11)), RANDOM.standard_normal((2, 3, 11))
    targets = RANDOM.integers(0, 11, (2, 3))
    np.testing.assert_allclose(losses.kl_divergence(*single((out, clean))), oracle.kl_divergence(out, clean), rtol=1e-5)
    found = losses.cross_entropy(single(out), jnp.asarray(targets))
    np.testing.assert_allclose(found, oracle.cross_entropy(out, targets), rtol=1e-5)
    assert float(losses.kl_divergence(single(out), single(out))) == 0.0
    assert np.isfinite(losses.kl_divergence(single(1e4 * out), single(1e4 * clean)))


def test_reductions_are_in_float32_whatever_comes_in():
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (WEIGHTS, COMPONENTS))
    found = losses.relative_faithfulness(half[0], {s: Factors(*f) for s, f in half[1].items()})
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), half)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, oracle.relative_faithfulness(*exact), rtol=1e-5)


def test_schedules_reach_their_ends_and_stay_there():
    warm = schedule.warm_up(0.01, 1000, fraction=0.025)
    np.testing.assert_allclose([warm(t) for t in (0, 5, 25, 999)], [0, 0.002, 0.01, 0.01], rtol=1e-6)
    assert float(schedule.warm_up(0.01, 1000, fraction=0.0)(0)) == np.float32(0.01)
    fall = schedule.anneal(2.0, 0.4, 101)
    np.testing.assert_allclose([fall(t) for t in (0, 50, 100, 500)], [2, 1.2, 0.4, 0.4], rtol=1e-6)
    assert schedule.constant(3.0)(7) == 3.0
