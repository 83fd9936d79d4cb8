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
from tests.store.test_cases import state_of

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
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))

    def ask(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        split = PartitionSpec("x") if leaf.ndim and leaf.shape[0] % 8 == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, split))

    template = jax.tree.map(ask, plain)
    restored = ocp.StandardCheckpointer().restore(ckpts / "4" / item, template)
    assert by_path(restored) == by_path(getattr(state_of(4), item))
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
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
