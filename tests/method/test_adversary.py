"""Adversaries on losses whose worst case is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdlib.errors import ContractError
from pdlib.method import schedule
from pdlib.method.adversary import Fresh, Persistent, Scope, attack, spread
from tests import oracle_training as oracle

KEY = jax.random.key(0)
SLOPES = {"one": jnp.array([1.0, -2.0, 0.5, -0.1]), "two": jnp.array([-1.0, 3.0, 1.0])}
COUNTS = {"one": 3, "two": 2}
PLACE = {"one": (6, 2), "two": (6, 2)}


def linear(drawn):
    """The mean over elements and positions of `slopes · (s, δ)`."""
    total = jnp.float32(0)
    for site, slopes in SLOPES.items():
        source, delta = (jnp.broadcast_to(x, (6, 2, x.shape[-1])) for x in drawn[site])
        both = jnp.concatenate([source, delta], axis=-1)
        total = total + jnp.mean(jnp.sum(both * slopes.reshape(1, 1, -1), axis=-1))
    return total


@pytest.mark.parametrize(
    ("scope", "positions", "shape"),
    [
        (Scope("c"), (6,), (1,)),
        (Scope("bc"), (6,), (6,)),
        (Scope("nsc", 3), (6,), (3,)),
        (Scope("c"), (6, 2), (1, 1)),
        (Scope("bc"), (6, 2), (6, 1)),
        (Scope("sc"), (6, 2), (1, 2)),
        (Scope("bsc"), (6, 2), (6, 2)),
        (Scope("nsc", 3), (6, 2), (3, 2)),
        (Scope("bc"), (6, 2, 5), (6, 1, 1)),
        (Scope("sc"), (6, 2, 5), (1, 2, 5)),
    ],
)
def test_a_scope_says_who_shares_a_source(scope, positions, shape):
    assert scope.shape(positions) == shape
    state = Persistent(scope, schedule.constant(0.1)).init(KEY, {"a": positions}, {"a": 4})
    assert state["sources"]["a"].shape == (*shape, 5)


@pytest.mark.parametrize(
    ("scope", "positions", "message"),
    [
        (Scope("sc"), (6,), "scope 'sc' needs activations with positions, these have (6,); use bc"),
        (Scope("bsc"), (6,), "scope 'bsc' needs activations with positions, these have (6,); use bc"),
        (Scope("nsc", 4), (6, 2), "4 sources do not divide a batch of 6; change one of them"),
    ],
)
def test_a_scope_that_does_not_fit_is_refused(scope, positions, message):
    with pytest.raises(ContractError) as caught:
        scope.shape(positions)
    assert str(caught.value) == message


def test_every_third_element_shares_a_source():
    sources = jnp.arange(3 * 2 * 4, dtype=jnp.float32).reshape(3, 2, 4)
    drawn = spread({"a": sources}, Scope("nsc", 3), {"a": (6, 2)})["a"]
    for b in range(6):
        np.testing.assert_array_equal(drawn.source[b], sources[b % 3, :, :3])
        np.testing.assert_array_equal(drawn.delta[b], sources[b % 3, :, 3:])


@pytest.mark.parametrize("scope", [Scope("c"), Scope("bc"), Scope("sc"), Scope("bsc"), Scope("nsc", 2)], ids=str)
def test_a_fresh_adversary_finds_the_corner_of_a_linear_loss(scope):
    found = attack(linear, Fresh(scope, 12, 0.1), KEY, PLACE, COUNTS)
    for site, slopes in SLOPES.items():
        corner = np.broadcast_to(slopes > 0, (*found[site].source.shape[:-1], slopes.size))
        np.testing.assert_array_equal(np.concatenate(found[site], axis=-1), corner.astype(np.float32))


def test_a_fresh_adversary_of_no_steps_is_uniform_and_one_step_moves_it_by_the_rate():
    first, second = (attack(linear, Fresh(Scope("bsc"), n, 0.125), KEY, PLACE, COUNTS)["one"] for n in (0, 1))
    values = np.concatenate(first, axis=-1)
    assert 0 <= values.min() < 0.2 < 0.8 < values.max() < 1
    want = np.clip(values + 0.125 * np.sign(SLOPES["one"]), 0, 1)
    np.testing.assert_allclose(np.concatenate(second, axis=-1), want, rtol=1e-6)


def test_a_fresh_adversary_hands_no_gradient_on():
    def value(scale):
        found = attack(lambda drawn: scale * linear(drawn), Fresh(Scope("c"), 2, 0.1), KEY, PLACE, COUNTS)
        return linear(found)

    assert float(jax.grad(value)(jnp.float32(1))) == 0.0


@pytest.mark.parametrize(("ascent", "sigmoid"), [("adam", False), ("sign", False), ("adam", True), ("sign", True)])
def test_a_persistent_adversary_finds_the_corner_and_stays_in_the_cube(ascent, sigmoid):
    how = Persistent(Scope("bc"), schedule.constant(0.5 if sigmoid else 0.07), 0, ascent, sigmoid)
    state = how.init(KEY, PLACE, COUNTS)
    gradient_of = jax.grad(lambda leaves: linear(how.drawn(leaves, PLACE)))
    for _ in range(40):
        state = how.climb(state, gradient_of(how.leaves(state)), 0)
        drawn = how.drawn(how.leaves(state), PLACE)
        assert all(float(x.min()) >= 0 and float(x.max()) <= 1 for one in drawn.values() for x in one)
    for site, slopes in SLOPES.items():
        both = np.concatenate(drawn[site], axis=-1)
        np.testing.assert_allclose(both, np.broadcast_to(slopes > 0, both.shape), atol=0.01 if sigmoid else 0)
    if sigmoid:
        assert float(jnp.abs(state["sources"]["one"]).max()) > 3


@pytest.mark.parametrize("sigmoid", [False, True])
def test_ascents_agree_with_numpy(sigmoid):
    how = Persistent(Scope("nsc", 2), schedule.warm_up(0.1, 100, fraction=0.1), 0, "adam", sigmoid)
    want_how = oracle.Adversary("nsc", 0.05, 0, 2, sigmoid=sigmoid)
    random = np.random.default_rng(0)
    state = how.init(KEY, PLACE, COUNTS)
    want = jax.tree.map(np.float64, state)
    for count in range(1, 6):
        gradient = {site: random.normal(size=x.shape) * 10.0**-count for site, x in want["sources"].items()}
        state = how.climb(state, {site: jnp.float32(x) for site, x in gradient.items()}, 5)
        want = oracle.ascend(want, gradient, want_how)
        assert float(state["count"]) == count
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state, want)


def test_the_first_ascent_moves_each_source_by_the_rate_whatever_the_gradient():
    how = Persistent(Scope("c"), schedule.constant(0.01))
    start = how.init(KEY, PLACE, COUNTS) | {"sources": {s: jnp.full((1, 1, n + 1), 0.5) for s, n in COUNTS.items()}}
    for scale in (1e-4, 1e4):
        moved = how.climb(start, {s: scale * x.reshape(1, 1, -1) for s, x in SLOPES.items()}, 0)["sources"]
        for site, slopes in SLOPES.items():
            np.testing.assert_allclose(moved[site][0, 0] - 0.5, 0.01 * np.sign(slopes), rtol=2e-2)


@pytest.mark.parametrize("scope", [Scope("c"), Scope("bc"), Scope("sc"), Scope("nsc", 2)], ids=str)
def test_the_gradient_of_a_shared_source_is_the_sum_of_the_parts_of_a_mean(scope):
    how = Persistent(scope, schedule.constant(0.1))
    own = Persistent(Scope("bsc"), schedule.constant(0.1))
    weights = jax.random.uniform(jax.random.key(1), (6, 2, 1))

    def loss(drawn):
        return jnp.mean(jnp.sum(weights * jnp.sin(drawn["one"].source), axis=-1)) + jnp.mean(
            weights * drawn["one"].delta
        )

    leaves = how.init(KEY, PLACE, COUNTS)["sources"]
    found = jax.grad(lambda x: loss(how.drawn(x, PLACE)))(leaves)["one"]
    each = {s: jnp.concatenate([jnp.broadcast_to(x, (6, 2, x.shape[-1])) for x in one], axis=-1)
            for s, one in how.drawn(leaves, PLACE).items()}  # fmt: skip
    apart = np.asarray(jax.grad(lambda x: loss(own.drawn(x, PLACE)))(each)["one"])
    if scope.kind == "nsc":
        apart = apart.reshape(3, 2, *apart.shape[1:]).sum(axis=0)
    else:
        axes = tuple(axis for axis in (0, 1) if found.shape[axis] == 1)
        apart = apart.sum(axis=axes, keepdims=True)
    np.testing.assert_allclose(found, apart, rtol=1e-5)


def test_a_batch_twice_as_large_has_the_same_gradient_of_a_shared_source():
    values = jax.random.normal(jax.random.key(2), (6, 4))
    leaf = {"a": jnp.full((1, 4), 0.3)}

    def gradient(batch):
        def loss(leaves):
            one = spread(leaves, Scope("c"), {"a": batch.shape[:1]})["a"]
            return jnp.mean(jnp.sum((batch[:, :3] * one.source) ** 2, axis=-1) + batch[:, 3] * one.delta[:, 0])

        return jax.grad(loss)(leaf)["a"]

    np.testing.assert_allclose(gradient(jnp.concatenate([values, values])), gradient(values), rtol=1e-5)
    halves = (gradient(values[:3]) + gradient(values[3:])) / 2
    np.testing.assert_allclose(gradient(values), halves, rtol=1e-5)


def test_initial_sources_depend_on_the_name_of_their_site_alone():
    how = Persistent(Scope("bc"), schedule.constant(0.1))
    whole = how.init(KEY, PLACE, COUNTS)["sources"]
    alone = how.init(KEY, PLACE, {"two": 2})["sources"]
    np.testing.assert_array_equal(whole["two"], alone["two"])
    same = how.init(KEY, {"a": (6,), "b": (6,)}, {"a": 3, "b": 3})["sources"]
    assert not np.array_equal(same["a"], same["b"])


@pytest.mark.parametrize(("sigmoid", "mean", "deviation"), [(False, 0.5, 12**-0.5), (True, 0.0, 1.0)])
def test_initial_values_are_uniform_or_with_a_sigmoid_normal(sigmoid, mean, deviation):
    how = Persistent(Scope("bc"), schedule.constant(0.1), sigmoid=sigmoid)
    values = np.asarray(how.init(KEY, {"a": (2000,)}, {"a": 9})["sources"]["a"])
    assert abs(values.mean() - mean) < 0.03
    assert abs(values.std() - deviation) < 0.03
    assert bool((values < 0).any()) == sigmoid


def test_no_two_parts_of_a_new_adversary_share_a_buffer_so_that_all_can_be_donated():
    state = Persistent(Scope("c"), schedule.constant(0.1)).init(KEY, PLACE, COUNTS)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 7


def test_signs_keep_no_moments():
    assert set(Persistent(Scope("c"), schedule.constant(0.1), ascent="sign").init(KEY, PLACE, COUNTS)) == {"sources"}
