"""Whatever devices, memories, meshes and settings a process has: the same bits are stored, and come back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import pdlib
from pdlib.errors import SpecMismatch
from pdlib.items.state import TrainState
from pdlib.store import Manager, restore_decomposition, restore_factors, restore_step, save_state
from pdlib.testing import assert_bit_equal
from tests.store.crash import state_of
from tests.store.test_cases import ANY, LAYOUTS, python

CHILD = """
    import sys, jax, pdlib
    from pdlib.store import Manager, restore_decomposition, restore_step, save_state
    from pdlib.testing import assert_bit_equal
    from tests.store.crash import state_of
    assert len(jax.devices()) == 1
    state = jax.tree.map(jax.numpy.asarray, state_of(3))
    for layout in ("raw", "ocdbt"):
        with Manager(f"{sys.argv[1]}/{layout}", layout=layout) as manager:
            if sys.argv[2] == "save":
                save_state(manager, 3, state)
            else:
                assert_bit_equal(restore_step(manager, 3, jax.eval_shape(lambda: state)), state)
                assert_bit_equal(restore_decomposition(manager), state.decomposition)
                assert_bit_equal(manager.restore_to_host(3, "training"), state_of(3).training)
    print(sys.argv[2])
"""


def placed(manager: Manager, state: TrainState, mesh: Mesh) -> TrainState:
    for item in ("decomposition", "training"):
        tree = getattr(state, item)
        twin = manager.registry.abstract(item, tree, mesh)
        state = state._replace(**{item: jax.device_put(tree, jax.tree.map(lambda a: a.sharding, twin))})
    return state


def test_case_1_saved_on_8_devices_comes_back_on_1(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:3]), ("fsdp",))  # C is 3
    for layout in ("raw", "ocdbt"):
        with Manager(tmp_path / layout, layout=layout) as manager:
            state = placed(manager, state_of(3), mesh)
            assert len(state.decomposition.components["s"].V.sharding.device_set) == 3
            save_state(manager, 3, state)
    assert python(CHILD, tmp_path, "restore") == "restore\n"
    for path in tmp_path.rglob("*"):
        data = path.read_bytes().lower() if path.is_file() else b""
        assert not any(word in data for word in (b"cpu", b"mesh", b"device_", b"fsdp")), f"{path} names a device"


def test_case_1_saved_on_1_device_comes_back_on_3_of_8(tmp_path):
    assert python(CHILD, tmp_path, "save") == "save\n"
    mesh = Mesh(np.array(jax.devices()[5:8]), ("fsdp",))
    for layout in ("raw", "ocdbt"):
        with Manager(tmp_path / layout, read_only=True) as manager:
            restored = restore_step(manager, 3, jax.eval_shape(lambda: state_of(3)), mesh=mesh)
            assert_bit_equal(restored, jax.tree.map(jnp.asarray, state_of(3)))
            for product in (restored.decomposition, restore_decomposition(manager, mesh=mesh)):
                assert product.components["s"].V.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp"))
                assert_bit_equal(product, restored.decomposition)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
@pytest.mark.parametrize("background", [False, True])
@LAYOUTS
def test_case_4_every_kind_of_memory_is_saved_and_restored(tmp_path, mesh_of, kind, background, layout):
    one = SingleDeviceSharding(jax.devices()[1], memory_kind=kind)
    split = NamedSharding(mesh_of(4), PartitionSpec("fsdp"), memory_kind=kind)
    host = {"one": np.arange(6, dtype=np.float32), "split": np.arange(8, dtype=np.int16)}
    tree = jax.device_put(host, {"one": one, "split": split})
    assert {leaf.sharding.memory_kind for leaf in tree.values()} == {kind}
    other = {"one": split.update(spec=PartitionSpec()), "split": one}
    with Manager(tmp_path, registry=ANY, layout=layout) as manager:
        manager.save(0, {"anything": tree}, background=background)
        for wanted in ({"one": one, "split": split}, other):
            twin = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted[n]) for n, x in host.items()}
            restored = manager.restore(0, {"anything": twin})["anything"]
            assert {name: leaf.sharding for name, leaf in restored.items()} == wanted
            assert_bit_equal(restored, tree)
        again = manager.restore(0, {"anything": tree})["anything"]
        assert {name: leaf.sharding for name, leaf in again.items()} == {"one": one, "split": split}


def surroundings(ambient: str) -> AbstractContextManager[Any]:
    """Made only when it is entered: `jax.set_mesh` takes effect when it is called."""
    devices = np.array(jax.devices())
    match ambient:
        case "legacy":
            return Mesh(devices[:2], ("fsdp",))
        case "set":
            return jax.set_mesh(Mesh(devices.reshape(2, 4), ("fsdp", "other")))
        case _:
            return jax.default_device(jax.devices()[5])


@pytest.mark.filterwarnings("ignore:`with mesh.` context manager has been deprecated:DeprecationWarning")
@pytest.mark.parametrize("ambient", ["legacy", "set", "default device"])
@LAYOUTS
def test_what_surrounds_a_call_changes_nothing(tmp_path, mesh_of, ambient, layout):
    key = jax.random.key(1)
    state = jax.tree.map(jnp.asarray, state_of(1))
    mesh = mesh_of(1)
    tree = {"w": jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh_of(4), PartitionSpec("fsdp")))}
    tree |= {"key": key, "numpy": np.arange(3)}

    def look(place: Path) -> list[Any]:
        found: list[Any] = []
        with Manager(place / "run" / "ckpts", layout=layout) as manager:
            save_state(manager, 1, state)
            save_state(manager, 2, state, background=True)
            trees = [
                restore_step(manager, 1, jax.eval_shape(lambda: state)),
                restore_step(manager, 2, jax.eval_shape(lambda: state), mesh=mesh),
                restore_decomposition(manager),
                restore_factors(manager, "s"),
                pdlib.open_run(place / "run").decomposition,
                pdlib.open_run(place / "run", mesh=mesh, dtype="bfloat16").decomposition,
            ]
            found += [manager.content_digest(step, item) for step in (1, 2) for item in manager.items(step)]
        with Manager(place / "any", registry=ANY, layout=layout) as manager:
            manager.save(0, {"anything": tree})
            manager.save(1, {"anything": tree}, background=True)
            trees.append(manager.restore_to_host(1, "anything"))
            found.append(manager.content_digest(0, "anything"))
        leaves = jax.tree.leaves(trees)
        found += [(str(getattr(x, "sharding", "host")), x.dtype, np.asarray(x).tobytes()) for x in leaves]
        found += [p.relative_to(place).as_posix() for p in sorted(place.rglob("*")) if layout == "raw"]
        return found

    plain = look(tmp_path / "plain")
    with surroundings(ambient):
        surrounded = look(tmp_path / "surrounded")
    assert surrounded == plain


X64 = """
    import sys, jax
    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp, numpy as np, pdlib
    from pdlib.testing import assert_bit_equal
    ANY = pdlib.Registry((pdlib.ItemSpec(name="anything", leaves=[pdlib.LeafSpec(path="**")]),))
    host = {"f": np.array([np.pi, 5e-324]), "i": np.array([2**62 + 1]), "f32": np.float32([1.5]), "n": 3, "x": 0.1}
    tree = {k: jnp.asarray(v) if k[0] in "fi" else v for k, v in host.items()}
    wide = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) if k[0] in "fi" else v for k, v in host.items()}
    assert [tree[k].dtype for k in ("f", "i", "f32")] == [np.float64, np.int64, np.float32]
    with pdlib.Manager(sys.argv[1], registry=ANY) as manager:
        manager.save(0, {"anything": tree})
        assert_bit_equal(manager.restore(0, {"anything": wide})["anything"], tree)
        assert_bit_equal(manager.open(0, "anything"), tree)
        assert_bit_equal(manager.restore_to_host(0, "anything"), host)
    print("equal")
"""


def test_case_24_what_x64_saves_keeps_its_bits_for_x64_and_for_the_host(tmp_path):
    assert python(X64, tmp_path) == "equal\n"
    with Manager(tmp_path, registry=ANY, read_only=True) as manager:  # x64 is off here
        host = manager.restore_to_host(0, "anything")
        assert host["f"].tobytes() == np.array([np.pi, 5e-324]).tobytes()
        assert host["i"][0] == 2**62 + 1
        assert (host["n"], host["x"]) == (3, 0.1)
        with pytest.raises(SpecMismatch) as caught:
            manager.open(0, "anything")
        assert str(caught.value) == (
            "open of anything v1, step 0: 2 leaves do not fit JAX as it is set\n"
            "  f  dtype float64 needs jax_enable_x64; restore_to_host keeps all its bits\n"
            "  i  dtype int64 needs jax_enable_x64; restore_to_host keeps all its bits\n"
            "Set jax_enable_x64, or use restore_to_host."
        )
        with pytest.raises(SpecMismatch) as caught:  # float32 is never a silent stand-in
            manager.restore(0, {"anything": {**host, "f": jnp.zeros(2), "i": jnp.zeros(1, jnp.int32)}})
        assert caught.value.problems == (
            "f  dtype float64 stored, float32 asked for",
            "i  dtype int64 stored, int32 asked for",
        )
