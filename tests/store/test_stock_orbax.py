"""Stock orbax reads what pdlib writes, with and without a template; for the oldest and newest supported orbax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdlib.store import Manager, save_state
from pdlib.tree import flatten
from tests.store.test_cases import ANY, state_of

ITEMS = ("decomposition", "training")


@pytest.fixture(params=["raw", "ocdbt"])
def ckpts(request, tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    with Manager(tmp_path / "ckpts", layout=request.param) as manager:
        state = state_of(4)
        for item in ITEMS:
            tree = getattr(state, item)
            placed = jax.tree.map(lambda a: a.sharding, manager.registry.abstract(item, tree, mesh))
            state = state._replace(**{item: jax.device_put(tree, placed)})
        save_state(manager, 4, state)
        (tmp_path / "ckpts" / ".staging-5-dead").mkdir()
    return tmp_path / "ckpts"


def by_path(tree: Any) -> dict[tuple[str, ...], bytes]:
    flat = flatten(tree)
    return {keys: np.asarray(leaf).tobytes() for keys, leaf in zip(flat.paths, flat.leaves, strict=True)}


@pytest.mark.parametrize("item", ITEMS)
def test_case_37_without_a_template(ckpts, item):
    restored = ocp.PyTreeCheckpointer().restore(ckpts / "4" / item)
    assert by_path(restored) == by_path(getattr(state_of(4), item))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored))


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_case_37_with_a_template_onto_another_mesh(ckpts, item, count):
    plain = ocp.PyTreeCheckpointer().restore(ckpts / "4" / item)
    wanted = template(plain, count)
    restored = ocp.StandardCheckpointer().restore(ckpts / "4" / item, wanted)
    assert by_path(restored) == by_path(getattr(state_of(4), item))
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding


def test_case_37_a_stock_checkpoint_manager_reads_the_directory(ckpts):
    with ocp.CheckpointManager(ckpts, item_names=ITEMS) as manager:
        assert manager.all_steps() == [4]
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore() for item in ITEMS})
        restored = manager.restore(4, args=args)
    for item in ITEMS:
        assert by_path(restored[item]) == by_path(getattr(state_of(4), item))


@pytest.mark.parametrize("item", ITEMS)
def test_the_registry_s_arguments_drive_stock_orbax(tmp_path, ckpts, item, mesh_of):
    with Manager(ckpts, read_only=True) as manager:
        registry = manager.registry
    tree = getattr(state_of(4), item)
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    handler.save(tmp_path / "own", args=ocp.args.PyTreeSave(tree, save_args=registry.save_args(item, tree)))
    mesh = mesh_of(8)
    args = ocp.args.PyTreeRestore(
        item=registry.abstract(item, tree, mesh), restore_args=registry.restore_args(item, tree, mesh)
    )
    restored = handler.restore(tmp_path / "own", args=args)
    assert by_path(restored) == by_path(tree)
    wanted = registry.abstract(item, tree, mesh)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding
        assert got.dtype == jnp.dtype(want.dtype)


def template(tree: Any, count: int) -> Any:
    """An abstract tree over a mesh of the first `count` devices, split wherever the first dimension divides."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))

    def ask(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        split = PartitionSpec("x") if leaf.ndim and leaf.shape[0] % count == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, split))

    return jax.tree.map(ask, tree)


def check_restored(restored: Any, item: str, wanted: Any = None) -> None:
    assert by_path(restored) == by_path(getattr(state_of(4), item))
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True) if wanted is not None else ():
        assert got.sharding == want.sharding
        assert got.dtype == want.dtype


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("handler", [ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler])
def test_case_37_a_checkpointer_with_either_handler(ckpts, item, handler):
    pytree = handler is ocp.PyTreeCheckpointHandler
    with ocp.Checkpointer(handler()) as checkpointer:
        plain = checkpointer.restore(ckpts / "4" / item)
        check_restored(plain, item)
        wanted = template(plain, 8)
        if pytree:
            to = ocp.checkpoint_utils.construct_restore_args(wanted)
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=to)
        else:
            args = ocp.args.StandardRestore(wanted)
        check_restored(checkpointer.restore(ckpts / "4" / item, args=args), item, wanted)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_case_37_a_stock_checkpoint_manager_restores_both_items_onto_another_mesh(ckpts, count):
    wanted = {item: template(ocp.PyTreeCheckpointer().restore(ckpts / "4" / item), count) for item in ITEMS}
    with ocp.CheckpointManager(ckpts, item_names=ITEMS) as manager:
        assert manager.latest_step() == 4
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted[item]) for item in ITEMS})
        restored = manager.restore(4, args=args)
        for item in ITEMS:
            check_restored(restored[item], item, wanted[item])
        for item in ITEMS:  # one item alone, by its name
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted[item])})
            check_restored(manager.restore(4, args=args)[item], item, wanted[item])


@pytest.mark.parametrize("item", ITEMS)
def test_case_37_the_metadata_that_orbax_reads_says_shape_and_dtype_of_every_leaf(ckpts, item):
    metadata = ocp.PyTreeCheckpointer().metadata(ckpts / "4" / item)
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    found = {
        tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_metadata)
    }
    want = flatten(getattr(state_of(4), item))
    for keys, leaf in zip(want.paths, want.leaves, strict=True):
        assert tuple(found[keys].shape) == leaf.shape
        assert np.dtype(found[keys].dtype) == leaf.dtype


def is_metadata(node: Any) -> bool:
    return hasattr(node, "shape") and hasattr(node, "dtype")


def test_case_37_orbax_v1_reads_both_items(ckpts):
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    if not hasattr(v1, "load"):
        pytest.skip("the experimental API of this orbax reads only what it wrote itself")
    plain = v1.load_checkpointables(ckpts / "4")
    assert sorted(plain) == sorted(ITEMS)
    wanted = {item: template(plain[item], 8) for item in ITEMS}
    onto = v1.load_checkpointables(ckpts / "4", wanted)
    for item in ITEMS:
        check_restored(plain[item], item)
        check_restored(onto[item], item, wanted[item])
        check_restored(v1.load(ckpts / "4", checkpointable_name=item), item)
        check_restored(v1.load(ckpts / "4", wanted[item], checkpointable_name=item), item, wanted[item])


def test_case_37_a_step_of_the_product_alone_and_leaves_that_orbax_refuses(tmp_path):
    """Leaves without elements read as None, keys as their data; the others as they are."""
    tree = {"empty": np.empty((3, 0), np.float32), "key": jax.random.key(5), "x": jnp.arange(3.0), "none": None}
    for layout in ("raw", "ocdbt"):
        with Manager(tmp_path / layout, registry=ANY, layout=layout) as manager:
            manager.save(1, {"anything": tree})
        restored = ocp.PyTreeCheckpointer().restore(tmp_path / layout / "1" / "anything")
        assert restored["empty"] is None
        assert restored["none"] is None
        assert restored["x"].tobytes() == np.arange(3, dtype=np.float32).tobytes()
        assert restored["key"].tobytes() == np.asarray(jax.random.key_data(jax.random.key(5))).tobytes()
        with ocp.CheckpointManager(tmp_path / layout, item_names=("anything", "other")) as manager:
            found = manager.restore(1, args=ocp.args.Composite(anything=ocp.args.PyTreeRestore()))
            assert found["anything"]["x"].tobytes() == restored["x"].tobytes()
