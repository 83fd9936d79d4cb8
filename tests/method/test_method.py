"""The method's parts against float64 NumPy, finite differences and published fixtures."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdlib.errors import ContractError
from pdlib.items.state import Factors, Site, named_key
from pdlib.method import losses, schedule
from pdlib.method.importance import lower_squash, per_component_mlp, upper_squash
from pdlib.method.initialise import can_spread, spread_factors
from pdlib.method.masks import masked_by, uniform
from pdlib.method.step import warm_up
from pdlib.method.truth import dense_error, identity_error, permute_to_identity, recovery
from pdlib.rewrite.masks import SiteMask
from pdlib.targets import resid_mlp, tms
from pdlib.targets.target import Target
from pdlib.targets.task import one_feature_each

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


X, W, V, U = normal(3, 4, 6), normal(6, 5), normal(6, 7), normal(7, 5)
MASK, DELTA = RANDOM.random((3, 4, 7), np.float32), RANDOM.random((3, 4, 1), np.float32)


def masked(mask: SiteMask) -> jax.Array:
    """One linear site, decomposed."""
    params = {"linear": {"w": jnp.asarray(W)}}
    plan = Target(lambda params, x: x @ params["linear"]["w"], params).plan(jnp.asarray(X))
    return plan.masked(params, {"linear/w": Factors(V, U)}, {"linear/w": mask}, jnp.asarray(X))


def test_the_masked_forward_is_that_of_the_masked_components_and_the_rest():
    x, w, v, u, m, d = (np.asarray(a, np.float64) for a in (X, W, V, U, MASK, DELTA))
    want = ((x @ v) * m) @ u + d * (x @ (w - v @ u))
    got = masked(SiteMask(MASK, DELTA))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_with_all_masks_one_the_output_is_the_frozen_one_to_the_bit():
    ones = SiteMask(jnp.ones_like(MASK), jnp.ones_like(DELTA))
    got = masked(ones)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.asarray(X) @ jnp.asarray(W)))


def test_stochastic_masks_lie_between_the_importance_and_one():
    lower = jnp.asarray(RANDOM.random((5000, 3), np.float32))
    mask, delta, _ = masked_by(lower, uniform(jax.random.key(0), lower))
    source = (mask - lower) / (1 - lower)
    assert float(source.min()) >= -1e-5
    assert float(source.max()) <= 1 + 1e-5
    for drawn in (source, delta):
        assert abs(float(drawn.mean()) - 0.5) < 0.02
        assert abs(float(drawn.var()) - 1 / 12) < 0.01
    assert delta.shape == (5000, 1)


@pytest.mark.parametrize(
    ("x", "value", "up", "down"),
    [(-0.5, 0, 0, -0.01), (0.0, 0, 0, -0.01), (0.3, 0.3, 1, -1), (1.0, 1, 1, -1), (1.5, 1, 0, 0)],
)
def test_the_lower_squashing_and_its_gradient(x, value, up, down):
    """For an incoming gradient of +1 and of −1."""
    out, pull = jax.vjp(lower_squash, jnp.float32(x))
    assert float(out) == pytest.approx(value)
    assert float(pull(jnp.float32(1))[0]) == pytest.approx(up)
    assert float(pull(jnp.float32(-1))[0]) == pytest.approx(down)


@pytest.mark.parametrize(("x", "value", "slope"), [(-0.5, 0, 0), (0.25, 0.25, 1), (1.0, 1, 1), (3.0, 1.02, 0.01)])
def test_the_upper_squashing_and_its_gradient(x, value, slope):
    out, gradient = jax.value_and_grad(upper_squash)(jnp.float32(x))
    assert float(out) == pytest.approx(value)
    assert float(gradient) == pytest.approx(slope)


def test_losses_agree_with_numpy():
    weights, components = (
        {"a": jnp.asarray(W), "b": jnp.asarray(normal(4, 3))},
        {"a": Factors(V, U), "b": Factors(normal(4, 2), normal(2, 3))},
    )
    squares = sum(
        np.sum((np.float64(w) - np.float64(f.V) @ np.float64(f.U)) ** 2)
        for w, f in zip(weights.values(), components.values(), strict=True)
    )
    np.testing.assert_allclose(losses.faithfulness(weights, components), squares / (30 + 12), rtol=1e-5)
    upper = {"a": jnp.asarray(MASK), "b": jnp.asarray(RANDOM.random((9, 2), np.float32))}
    for power in (1.0, 2.0, 0.5):
        want = sum(np.sum(np.mean(np.float64(u).reshape(-1, u.shape[-1]) ** power, axis=0)) for u in upper.values())
        np.testing.assert_allclose(
            losses.minimality(upper, 0, penalty=losses.power_penalty(schedule.constant(power)), reference=1.0).activity,
            want,
            rtol=1e-5,
        )
    one, other = jnp.asarray(normal(6, 5)), jnp.asarray(normal(6, 5))
    np.testing.assert_allclose(losses.mean_squared_error(one, other), np.mean((one - other) ** 2), rtol=1e-6)


def test_schedules_reach_their_ends():
    cosine = schedule.cosine(2.0, 101, final_fraction=0.1)
    assert [float(cosine(s)) for s in (0, 50, 100, 200)] == pytest.approx([2.0, 1.1, 0.2, 0.2], rel=1e-5)
    ramp = schedule.ramp(3.0, 10, fraction=0.5)
    assert [float(ramp(s)) for s in (0, 4, 9)] == pytest.approx([0.6, 3.0, 3.0])
    assert float(schedule.ramp(3.0, 10, fraction=0.0)(0)) == 3.0


def test_the_importance_function_is_one_small_mlp_a_component():
    importance = per_component_mlp(4)
    sites = {"layers.0.mlp": Site(6, 5, 7)}
    params = importance.init(jax.random.key(0), sites)
    logits = importance.apply(params, {"layers.0.mlp": Factors(V, U)}, {"layers.0.mlp": jnp.asarray(X)})["layers.0.mlp"]
    (p,) = ({k: np.asarray(v, np.float64) for k, v in module.items()} for module in params.values())
    inner = (np.float64(X) @ np.float64(V))[..., None] * p["w_in"] + p["b_in"]
    gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / 2**0.5))
    np.testing.assert_allclose(logits, (gelu * p["w_out"]).sum(-1) + p["b_out"], rtol=1e-4, atol=1e-5)
    with pytest.raises(ContractError, match="differ only in punctuation"):
        importance.init(jax.random.key(0), {"a.b": Site(1, 1, 1), "a_b": Site(1, 1, 1)})


def test_the_spread_initialisation_is_faithful_with_unit_columns():
    factors = spread_factors(jax.random.key(0), jnp.asarray(W), 20)
    np.testing.assert_allclose(factors.V @ factors.U, W, atol=2e-5)
    np.testing.assert_allclose(jnp.linalg.norm(factors.V, axis=0), 1, rtol=1e-5)
    fewer = spread_factors(jax.random.key(0), jnp.asarray(W), 5)
    np.testing.assert_allclose(fewer.V @ fewer.U, W, atol=2e-5)
    np.testing.assert_allclose(jnp.linalg.norm(fewer.U, axis=1), 1, rtol=1e-5)
    assert [can_spread(Site(6, 5, C)) for C in (4, 5, 6)] == [False, True, True]


def test_the_faithfulness_warm_up_lowers_the_loss():
    components = {"a": Factors(jnp.asarray(V), jnp.asarray(U))}
    before = losses.faithfulness({"a": jnp.asarray(W)}, components)
    after = losses.faithfulness(
        {"a": jnp.asarray(W)}, warm_up(components, {"a": jnp.asarray(W)}, steps=200, learning_rate=0.01)
    )
    assert float(after) < 0.01 * float(before)


def test_draws_depend_on_names():
    key = jax.random.key(0)
    drawn = {name: jax.random.key_data(named_key(key, name)).tobytes() for name in ("a", "b", "ab")}
    assert len(set(drawn.values())) == 3
    assert jax.random.key_data(named_key(key, "a")).tobytes() == drawn["a"]


@pytest.mark.parametrize(
    ("ci", "error"),
    [
        (np.eye(5), 0),
        (np.eye(5)[:, [3, 1, 4, 0, 2]], 0),
        (np.zeros((5, 5)), 5),
        (np.concatenate([np.eye(5), np.zeros((5, 9))], axis=1)[:, ::-1], 0),
        (np.ones((2, 2)), 2),
        (np.eye(3) * 0.85, 3),
    ],
)
def test_the_identity_error_of_published_fixtures(ci, error):
    assert identity_error(ci.astype(np.float32)) == error


@pytest.mark.parametrize(
    ("ci", "size", "error"),
    [
        (np.eye(3), 3, 0),
        (np.ones((5, 2)), 2, 0),
        (np.concatenate([np.zeros((5, 4)), np.ones((5, 2))], axis=1), 2, 0),
        (np.ones((5, 3)), 2, 5),
        (np.zeros((5, 5)), 3, 3),
        (np.full((4, 2), 0.85), 2, 2),
        (np.concatenate([np.ones((5, 2)), np.full((5, 1), 0.05)], axis=1), 2, 0),
        (np.ones((5, 2)), 3, 1),
    ],
)
def test_the_dense_error_counts_what_is_missing_and_what_is_over(ci, size, error):
    assert dense_error(ci.astype(np.float32), size) == error


def test_columns_are_matched_to_features():
    ci = np.eye(4, dtype=np.float32)[:, [2, 0, 3, 1]]
    np.testing.assert_array_equal(permute_to_identity(ci), np.eye(4))


def test_recovery_of_a_known_decomposition():
    weight = normal(5, 2)
    exact = recovery(weight, Factors(np.eye(5, 8, dtype=np.float32), np.concatenate([weight, normal(3, 2) * 0.01])))
    assert exact.recovered == 5
    assert exact.mmcs == pytest.approx(1)
    assert exact.ml2r == pytest.approx(1)
    half = recovery(weight, Factors(np.eye(5, dtype=np.float32), weight * np.float32(0.5)))
    assert (half.recovered, half.mmcs, half.ml2r) == (0, pytest.approx(1), pytest.approx(0.5))


PRETRAINING = tms.Pretraining(attempts=1, steps=5000, batch=1024, learning_rate=5e-3, weight_decay=0.01)


def test_the_toy_model_s_forward_is_that_of_its_haiku_network():
    shape = tms.Shape(5, 2, 0.5)
    network, task = tms.network(shape), tms.task(shape, PRETRAINING)
    x = task.sample(jax.random.key(1), 64)
    params = network.init(jax.random.key(0), x)
    params = jax.tree.map(lambda p: p + 0.1, params)
    plan = Target(network.apply, params).plan(x)
    assert list(plan.sites("*")) == list(task.sites.values())
    out, taps = plan.clean(params, x, taps="*")
    np.testing.assert_allclose(out, network.apply(params, x), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(taps["linear1/w"].input, x)
    np.testing.assert_allclose(plan.masked(params, {}, {}, x), out)
    components = {s: spread_factors(jax.random.key(2), w, 6) for s, w in plan.matrices(params).items()}
    ones = {site: SiteMask(jnp.ones((64, 6)), jnp.zeros((64, 1))) for site in components}
    np.testing.assert_allclose(plan.masked(params, components, ones, x), out, atol=1e-5)
    assert float(jnp.mean(x > 0)) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("identity", [False, True])
def test_pre_training_finds_the_pentagon(identity):
    task = tms.task(tms.Shape(5, 2, 0.05, identity), PRETRAINING)
    params = task.pretrain(jax.random.key(0))
    W1 = np.asarray(params["linear1"]["w"])
    angles = np.sort(np.degrees(np.arctan2(W1[:, 1], W1[:, 0])))
    gaps = np.diff(np.append(angles, angles[0] + 360))
    assert np.all(np.abs(gaps - 72) < 3)
    out = np.diag(np.asarray(task.apply(params, one_feature_each(5))))
    assert np.all(np.abs(out - 0.75) < 0.1)
    np.testing.assert_array_equal(params["linear2"]["w"], W1.T)
    if identity:
        np.testing.assert_array_equal(params["identity"]["w"], np.eye(2))


def test_a_residual_mlp_learns_to_add_the_relu_of_each_feature():
    shape = resid_mlp.Shape(features=12, width=60, layers=2, neurons=6, probability=0.05)
    how = resid_mlp.Pretraining(attempts=2, steps=400, batch=256, learning_rate=1e-2, weight_decay=0.01)
    task = resid_mlp.task(shape, how)
    params = task.pretrain(jax.random.key(0))
    embedding = np.asarray(params["~"]["embedding"])
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1, rtol=1e-5)
    x = task.sample(jax.random.key(1), 512)
    assert float(jnp.min(x)) < -0.9
    want = np.maximum(x, 0) + np.asarray(x)
    stream = np.asarray(x) @ embedding
    for layer in range(2):
        inner = np.maximum(stream @ np.asarray(params[f"mlp_in_{layer}"]["w"]), 0)
        stream = stream + inner @ np.asarray(params[f"mlp_out_{layer}"]["w"])
    out = task.apply(params, x)
    np.testing.assert_allclose(out, stream @ embedding.T, atol=1e-5)
    assert np.mean((out - want) ** 2) < 0.5 * np.mean((np.asarray(x) @ embedding @ embedding.T - want) ** 2)
    assert task.truth == {
        "mlp_in_0": ("identity", 12),
        "mlp_in_1": ("identity", 12),
        "mlp_out_0": ("dense", 6),
        "mlp_out_1": ("dense", 6),
    }
