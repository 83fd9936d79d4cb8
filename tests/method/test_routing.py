"""Where forwards run decomposed: the distributions that routers draw from, and the sources of masks."""

from __future__ import annotations

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pdlib.errors import ContractError
from pdlib.method import masks, reconstruction, routing

SITES = ("b", "a", "d", "c")
POSITIONS = (3000, 4)
RARE = 1e-4  # keys are fixed: a test that passes once always does


def routes_of(router, sites=SITES, positions=POSITIONS, seed=0):
    drawn = router(jax.random.key(seed), dict.fromkeys(sites, positions))
    assert {name: (x.shape, x.dtype) for name, x in drawn.items()} == {
        name: ((*positions, 1), jnp.dtype(bool)) for name in sites
    }
    return np.stack([np.asarray(drawn[name]).ravel() for name in sites], axis=-1)


def test_everywhere_routes_no_site_away():
    assert routing.everywhere(jax.random.key(0), dict.fromkeys(SITES, POSITIONS)) == {}


def test_the_size_of_a_subset_is_uniform_from_one_to_all():
    sizes = np.bincount(routes_of(routing.uniform_k_subset).sum(axis=-1), minlength=5)
    assert sizes[0] == 0
    assert stats.chisquare(sizes[1:]).pvalue > RARE


@pytest.mark.parametrize("k", [1, 2, 3])
def test_subsets_of_one_size_are_equally_likely(k):
    routes = routes_of(routing.uniform_k_subset)
    found = routes[routes.sum(axis=-1) == k]
    counts = [np.all(found == np.isin(np.arange(4), chosen), axis=-1).sum() for chosen in combinations(range(4), k)]
    assert sum(counts) == len(found)
    assert stats.chisquare(counts).pvalue > RARE


def test_positions_have_subsets_of_their_own():
    routes = routes_of(routing.uniform_k_subset).reshape(*POSITIONS, 4)
    same = np.all(routes[:, :1] == routes[:, 1:], axis=-1).mean()
    alike = sum(
        (0.25 / len(list(combinations(range(4), k)))) ** 2 * len(list(combinations(range(4), k))) for k in (1, 2, 3, 4)
    )
    assert same == pytest.approx(alike, abs=0.02)


def test_a_single_site_is_always_in_its_subset():
    assert routes_of(routing.uniform_k_subset, ("a",)).all()


def test_subsets_do_not_depend_on_the_order_of_the_sites():
    one, other = (
        routing.uniform_k_subset(jax.random.key(3), dict.fromkeys(sites, (5, 2))) for sites in (SITES, SITES[::-1])
    )
    for site in SITES:
        np.testing.assert_array_equal(one[site], other[site])


def test_subsets_are_refused_for_sites_whose_positions_differ():
    with pytest.raises(ContractError) as caught:
        routing.uniform_k_subset(jax.random.key(0), {"a": (4, 3), "b": (4,)})
    assert str(caught.value) == (
        "subsets of sites need sites with the same positions, these differ: a: (4, 3), b: (4,); route all"
    )


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_bernoulli_routes_each_site_on_its_own(probability):
    routes = routes_of(routing.bernoulli(probability))
    for column in routes.T:
        assert stats.binomtest(int(column.sum()), len(column), probability).pvalue > RARE
    if 0 < probability < 1:
        assert np.abs(np.corrcoef(routes.T) - np.eye(4)).max() < 0.04


def test_bernoulli_of_a_site_depends_on_its_name_alone():
    router, key = routing.bernoulli(0.5), jax.random.key(1)
    alone, among = router(key, {"a": (50,)}), router(key, {"b": (50,), "a": (50,), "c": (7, 2)})
    np.testing.assert_array_equal(alone["a"], among["a"])
    assert not np.array_equal(among["a"], among["b"])


def test_uniform_sources_and_deltas_are_uniform_and_independent():
    drawn = masks.uniform(jax.random.key(0), jnp.zeros((4000, 3)))
    assert (drawn.source.shape, drawn.delta.shape) == ((4000, 3), (4000, 1))
    values = np.concatenate([drawn.source, drawn.delta], axis=-1)
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > RARE
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.06


def test_bernoulli_sources_and_deltas_are_fair_coins():
    drawn = masks.bernoulli(jax.random.key(0), jnp.zeros((4000, 3)))
    values = np.concatenate([drawn.source, drawn.delta], axis=-1)
    assert set(np.unique(values)) == {0.0, 1.0}
    for column in values.T:
        assert stats.binomtest(int(column.sum()), len(column), 0.5).pvalue > RARE
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.06


@pytest.mark.parametrize(("name", "value"), [("ci_masked", 0.0), ("unmasked", 1.0)])
def test_constant_sources_have_no_delta_path(name, value):
    lower = jnp.array([[0.0, 0.25, 1.0]])
    drawn = masks.SOURCES[name](jax.random.key(0), lower)
    mask = masks.masked_by(lower, drawn)
    assert (mask.delta, mask.route) == (None, None)
    np.testing.assert_allclose(mask.mask, np.where(value, 1.0, lower))


def test_a_mask_lies_between_the_importance_and_one():
    lower, source = jnp.array([[0.0, 0.25, 1.0]]), jnp.array([[0.5, 0.5, 0.5]])
    route = jnp.array([[True]])
    mask = masks.masked_by(lower, masks.Drawn(source, jnp.array([[0.1]])), route)
    np.testing.assert_allclose(mask.mask, [[0.5, 0.625, 1.0]])
    np.testing.assert_allclose(mask.delta, 0.1)
    assert mask.route is route


def test_either_takes_a_missing_delta_for_zero():
    one = masks.Drawn(jnp.full((2, 3), 0.2), jnp.full((2, 1), 0.7))
    found = masks.either(jnp.array([[True], [False]]), one, masks.Drawn(jnp.ones((1, 1))))
    np.testing.assert_allclose(found.source, [[0.2] * 3, [1.0] * 3])
    np.testing.assert_allclose(found.delta, [[0.7], [0.0]])


def test_plans_cover_every_site():
    assert reconstruction.all_sites(SITES) == (SITES,)
    assert reconstruction.layerwise(SITES) == (("b",), ("a",), ("d",), ("c",))
    assert reconstruction.groups(3)(SITES) == (("b", "a", "d"), ("c",))
