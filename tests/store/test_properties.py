"""Round trips to the bit: random trees, saved on a mesh of n devices and restored on m, by every way of reading."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdlib
from pdlib.errors import NameCollision
from pdlib.items.contracts import default_registry
from pdlib.testing import (
    HOST_DTYPES,
    any_trees,
    assert_bit_equal,
    assert_leaves_equal,
    check_round_trip,
    is_storable,
    item_trees,
    items,
    keys,
    leaves,
    shardings,
    to_host,
)

ANY = pdlib.Registry((pdlib.ItemSpec(name="anything", leaves=[pdlib.LeafSpec(path="**")]),))
COUNTS = st.sampled_from([1, 2, 4, 8])


def mesh_over(count: int, *, square: bool) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:count])
    shape = (2, count // 2) if square and count > 1 else (1, count)
    return jax.sharding.Mesh(devices.reshape(shape), ("a", "b"))


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)


def placed(data: st.DataObject, tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Some NumPy leaves of a tree as JAX arrays, split at random over a mesh."""

    def place(leaf: Any) -> Any:
        if not is_array(leaf) or data.draw(st.integers(0, 4), label="stays NumPy") == 0:
            return leaf
        return jax.device_put(leaf, data.draw(shardings(leaf.shape, mesh), label="split"))

    return jax.tree.map(place, tree)


def twin(data: st.DataObject, tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """An abstract tree that asks for random splits over another mesh."""

    def ask(leaf: Any) -> Any:
        if type(leaf) in (bool, int, float):
            return leaf
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        split = data.draw(shardings(leaf.shape, mesh), label="wanted split")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)

    return jax.tree.map(ask, tree)


def without_empty(tree: Any) -> dict[tuple[str, ...], Any]:
    """The leaves that orbax knows, by path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    names = [(tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in p), x) for p, x in pairs]
    return {path: to_host(leaf) for path, leaf in names if np.size(to_host(leaf))}


def check_any_tree(data: st.DataObject) -> None:
    source = mesh_over(data.draw(COUNTS, label="saved on"), square=data.draw(st.booleans()))
    target = mesh_over(data.draw(COUNTS, label="restored on"), square=data.draw(st.booleans()))
    tree = placed(data, data.draw(item_trees(), label="tree"), source)
    abstract = twin(data, tree, target)
    with tempfile.TemporaryDirectory() as folder:
        digests = set()
        for layout in ("raw", "ocdbt"):
            with pdlib.Manager(Path(folder) / layout, registry=ANY, layout=layout) as manager:
                manager.save(7, {"anything": tree}, background=data.draw(st.booleans(), label="background"))
                manager.wait()
                restored = manager.restore(7, {"anything": abstract})["anything"]
                assert_bit_equal(restored, tree)
                for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
                    wanted = getattr(want, "sharding", None)
                    assert wanted is None or got.sharding == wanted
                host = jax.tree.map(to_host, tree)
                assert_bit_equal(manager.restore_to_host(7, "anything"), host)
                assert_bit_equal(manager.restore_to_host(7, "anything", mapped=True), host)
                assert_bit_equal(manager.open(7, "anything"), tree)
                assert manager.verify(7), manager.verify(7)
                digests.add(manager.content_digest(7, "anything"))
                item = manager.directory / "7" / "anything"
                stock = ocp.PyTreeCheckpointer().restore(item) if jax.tree.leaves(tree) else {}
                exotic = any(str(getattr(leaf, "dtype", "")) == "uint4" for leaf in jax.tree.leaves(tree))
                if not exotic:
                    assert_same_leaves(without_empty(stock), without_empty(tree))
        assert len(digests) == 1


def assert_same_leaves(actual: dict[tuple[str, ...], Any], expected: dict[tuple[str, ...], Any]) -> None:
    flat = [{"\n".join(path): np.asarray(leaf) for path, leaf in tree.items()} for tree in (actual, expected)]
    assert_bit_equal(*flat)


@settings(max_examples=200)
@given(st.data())
def test_any_tree_comes_back_to_the_bit_from_any_mesh_onto_any_other(data):
    check_any_tree(data)


@pytest.mark.deep
@settings(max_examples=5000)
@given(st.data())
def test_any_tree_comes_back_in_the_long_form(data):
    check_any_tree(data)


@settings(max_examples=200)
@given(any_trees(leaves(sizes=(1, 2)), max_leaves=6))
def test_trees_whose_names_collide_are_refused_and_leave_nothing(tree):
    if is_storable(tree):
        return
    with tempfile.TemporaryDirectory() as folder:
        manager = pdlib.Manager(Path(folder) / "steps", registry=ANY)
        with pytest.raises(NameCollision):
            manager.save(0, {"anything": tree})
        assert not list(Path(folder).rglob("*"))


@settings(max_examples=60)
@given(item_trees(leaves(dtypes=HOST_DTYPES)))
def test_64_bit_leaves_come_back_to_the_host(tree):
    check_round_trip(ANY, {"anything": tree})


@settings(max_examples=60)
@given(items(default_registry()))
def test_the_registry_s_own_trees_fit_it_and_come_back(trees):
    registry = default_registry()
    registry.check(trees)
    check_round_trip(registry, trees, meshes=[None, jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))])


@settings(max_examples=30)
@given(st.data())
def test_haiku_parameters_and_optax_states_come_back_in_their_classes(data):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([data.draw(st.sampled_from([4, 8])), 8])(x)))
    params = net.init(jax.random.key(data.draw(st.integers(0, 9))), jnp.ones((1, 8)))
    if data.draw(st.booleans(), label="FlatMapping"):
        params = hk.data_structures.to_immutable_dict(params)
    optimizer = data.draw(
        st.sampled_from([
            optax.adamw(1e-3),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 9))),
            optax.masked(optax.sgd(0.1, momentum=0.9), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
            optax.multi_transform({"w": optax.adam(1e-3), "b": optax.set_to_zero()},
                                  lambda tree: {m: {k: k for k in leaf} for m, leaf in tree.items()}),
            optax.inject_hyperparams(optax.adam)(1e-3),
        ])
    )  # fmt: skip
    opt_state = optimizer.init(hk.data_structures.to_mutable_dict(params))
    chex.assert_tree_all_finite(params)
    check_round_trip(ANY, {"anything": {"params": params, "opt_state": opt_state}})


@settings(max_examples=20)
@given(keys())
def test_a_restored_key_draws_the_same_numbers(key):
    with tempfile.TemporaryDirectory() as folder, pdlib.Manager(Path(folder) / "steps", registry=ANY) as manager:
        manager.save(0, {"anything": {"key": key}})
        abstract = jax.eval_shape(lambda: key)
        restored = manager.restore(0, {"anything": {"key": abstract}})["anything"]["key"]
    draw = jax.random.bits if key.shape == () else jax.vmap(jax.random.bits)
    assert_leaves_equal(draw(restored), draw(key))
