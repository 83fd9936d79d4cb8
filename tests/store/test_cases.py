"""What broke for others who keep checkpoints, as whole kinds of fault; the numbers are those of the collected cases."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pdlib
from pdlib.errors import (
    CorruptItem,
    ForeignLayout,
    NameCollision,
    NoCheckpoint,
    NotARun,
    ReadOnly,
    SaveFailed,
    ShardingRefused,
    SpecMismatch,
    StepRefused,
    TornStep,
    UnstorableLeaf,
)
from pdlib.items.state import Decomposition, Factors, TrainingItem, TrainState
from pdlib.store import (
    KeepAll,
    KeepMarked,
    KeepNewest,
    Manager,
    Retention,
    init_from_parent,
    restore_decomposition,
    restore_decomposition_to_host,
    restore_factors,
    restore_latest,
    restore_step,
    save_state,
)
from pdlib.testing import assert_bit_equal, tree_twin

ANY = pdlib.Registry((pdlib.ItemSpec(name="anything", leaves=[pdlib.LeafSpec(path="**")]),))
LAYOUTS = pytest.mark.parametrize("layout", ["raw", "ocdbt"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """A user's own container."""

    first: Any
    second: Any


def state_of(seed: int = 0, *, C: int = 8, sites: tuple[str, ...] = ("layers.18.mlp", "out")) -> TrainState:
    random = np.random.default_rng(seed)

    def bits(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    product = Decomposition(
        {s: Factors(bits(16, C), bits(C, 24)) for s in sites}, {"mlp/~/linear_0": {"w": bits(8, 8), "b": bits(8)}}
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))
    moments = jax.tree.map(lambda x: x + 1, (optimizer.init(product.components), optimizer.init(product.ci_fn)))
    adversaries = {"ppgd": {"sources": {s: bits(1, 4, C + 1) for s in sites}, "count": jnp.float32(3)}}
    return TrainState(product, TrainingItem(*moments, adversaries, jnp.int32(seed)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with both items at 10, the product alone at 15, and both at 20."""
    with Manager(tmp_path / "run" / "ckpts") as manager:
        save_state(manager, 10, state_of(10))
        save_state(manager, 15, state_of(15), process=False)
        save_state(manager, 20, state_of(20))
    return tmp_path / "run"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*"))}


def python(code: str, *args: str | Path, devices: int = 1) -> str:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# Topology and host restore


SAVE_ON_EIGHT = """
    import sys, jax, numpy as np, pdlib
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from tests.store.test_cases import state_of
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    state = state_of(3)
    registry = pdlib.store.checkpoint.default_registry()
    def split(name, tree):
        return jax.device_put(tree, jax.tree.map(lambda a: a.sharding, registry.abstract(name, tree, mesh)))
    product, process = split("decomposition", state.decomposition), split("training", state.training)
    assert len(product.components["out"].V.sharding.device_set) == 8
    with pdlib.Manager(sys.argv[1]) as manager:
        manager.save(3, {"decomposition": product, "training": process})
"""


def test_case_1_saved_on_8_devices_opens_in_a_process_with_1(tmp_path):
    python("import pdlib.store.checkpoint\n" + textwrap.dedent(SAVE_ON_EIGHT), tmp_path / "ckpts", devices=8)
    printed = python(
        """
        import sys, jax, pdlib
        from pdlib.store import restore_step, restore_decomposition
        from pdlib.testing import assert_bit_equal
        from tests.store.test_cases import state_of
        assert len(jax.devices()) == 1
        with pdlib.Manager(sys.argv[1], read_only=True) as manager:
            assert_bit_equal(restore_step(manager, 3, jax.eval_shape(lambda: state_of(3))), state_of(3))
            assert_bit_equal(restore_decomposition(manager), state_of(3).decomposition)
        print("equal")
        """,
        tmp_path / "ckpts",
    )
    assert printed == "equal\n"
    assert "cpu:" not in (tmp_path / "ckpts" / "3" / "decomposition" / "pdlib.json").read_text()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_case_2_shardings_come_from_the_current_mesh(run, mesh_of, count):
    mesh = mesh_of(count)
    with Manager(run / "ckpts", read_only=True) as manager:
        abstract = jax.eval_shape(lambda: state_of(20))
        state = restore_step(manager, 20, abstract, mesh=mesh)
        assert_bit_equal(state, state_of(20))
        wanted = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        assert state.decomposition.components["out"].V.sharding == wanted
        assert state.training.components_opt_state[1][0].mu["out"].V.sharding == wanted
        opened = restore_decomposition(manager, 20, mesh=mesh)
        assert_bit_equal(opened, state_of(20).decomposition)
        assert opened.components["out"].V.sharding == wanted


def test_case_2_an_axis_that_does_not_divide_is_refused_by_leaf_and_axis(tmp_path, mesh_of):
    with Manager(tmp_path) as manager:
        save_state(manager, 0, state_of(0, C=6))
        with pytest.raises(ShardingRefused) as caught:
            restore_decomposition(manager, mesh=mesh_of(4))
    assert str(caught.value) == (
        "decomposition:components/layers.18.mlp/V: mesh axis fsdp of size 4 does not divide dimension 1 of size 6; "
        "use a mesh whose axis divides it, or one without that axis"
    )


def test_case_3_without_a_sharding_arrays_come_whole_to_the_first_device(run, mesh_of):
    def check() -> None:
        state = restore_step(manager, 20, jax.eval_shape(lambda: state_of(20)))
        for leaf in jax.tree.leaves(state):
            assert isinstance(leaf, jax.Array)
            assert leaf.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(restore_decomposition_to_host(manager, 20)))

    with Manager(run / "ckpts", read_only=True) as manager:
        check()
        with jax.set_mesh(mesh_of(8)):  # an ambient mesh changes nothing
            check()


def test_case_4_a_leaf_in_pinned_host_memory_comes_back_there(tmp_path):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else jax.devices()[0].default_memory().kind
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    leaf = jax.device_put(np.arange(6.0, dtype=np.float32), pinned)
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": leaf})
        restored = manager.restore(0, {"anything": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=pinned)})[
            "anything"
        ]
    assert restored.sharding.memory_kind == kind
    assert_bit_equal(restored, leaf)


# Memory and aliasing


@pytest.mark.parametrize("damage", ["deleted", "truncated", "garbage", "emptied"])
@LAYOUTS
def test_case_6_the_product_opens_whatever_became_of_the_process(tmp_path, damage, layout):
    with Manager(tmp_path / "ckpts", layout=layout) as manager:
        save_state(manager, 1, state_of(1))
    training = tmp_path / "ckpts" / "1" / "training"
    if damage == "deleted":
        shutil.rmtree(training)
    for file in [p for p in training.rglob("*") if p.is_file()]:
        data = file.read_bytes()
        file.write_bytes(
            {"truncated": data[: len(data) // 2], "garbage": os.urandom(len(data) + 3), "emptied": b""}[damage]
        )
    product = state_of(1).decomposition
    assert_bit_equal(pdlib.open_run(tmp_path).decomposition, product)
    assert_bit_equal(pdlib.open_run(tmp_path, verify=True, host=True).decomposition, jax.tree.map(np.asarray, product))


def test_case_6_opening_reads_no_more_than_the_product(tmp_path):
    big = Decomposition({"s": Factors(np.ones((512, 2048), np.float32), np.ones((2048, 512), np.float32))}, {})
    training = TrainingItem((), (), {"t": {"sources": {"s": np.ones((40, 128, 2049), np.float32)}}}, np.int32(0))
    with Manager(tmp_path / "ckpts") as manager:
        save_state(manager, 0, TrainState(big, training))
        assert manager.describe(0, "training").nbytes > 4 * manager.describe(0, "decomposition").nbytes
        code = """
            import sys, pdlib, numpy as np, jax
            import pdlib.consumers.open, pdlib.store.decomposition, pdlib.store.mapped, pdlib.store.arrays
            def read(): return int(next(l for l in open("/proc/self/io") if l.startswith("rchar")).split()[1])
            with pdlib.Manager(sys.argv[1], read_only=True) as manager:
                before = read()
                pdlib.store.decomposition.restore_decomposition_to_host(manager)
                owned = read() - before
            before = read()
            opened = pdlib.open_run(sys.argv[1] + "/..")
            print(owned, read() - before)
        """
        owned, mapped = map(int, python(code, tmp_path / "ckpts").split())
    nbytes = 2 * 4 * 512 * 2048
    assert nbytes <= owned <= 1.05 * nbytes
    assert mapped <= 0.05 * nbytes


def test_case_6_opening_needs_no_optimizer_and_no_training_code(run):
    code = """
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                training = ("pdlib.method", "pdlib.run", "pdlib.targets")
                if name.split(".")[0] in ("optax", "haiku") or name.startswith(training):
                    raise RuntimeError("imported " + name)
        sys.meta_path.insert(0, Refuse())
        import pdlib
        print(pdlib.open_run(sys.argv[1]).step)
    """
    assert python(code, run) == "20\n"


@LAYOUTS
def test_case_7_the_first_donating_step_reuses_the_restored_buffers(tmp_path, mesh_of, layout):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with Manager(tmp_path, layout=layout) as manager:
        save_state(manager, 5, state_of(5))
        for mesh in (None, mesh_of(4)):
            state = restore_step(manager, 5, jax.eval_shape(lambda: state_of(5)), mesh=mesh)
            leaves = jax.tree.leaves(state)
            held = [{s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards} for leaf in leaves]
            after = jax.tree.leaves(step(state))
            reused = [{s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards} for leaf in after]
            assert all(leaf.is_deleted() for leaf in leaves)
            assert reused == held


def test_case_10_many_saves_in_one_process_leave_memory_flat(tmp_path):
    code = """
        import sys, gc, pdlib, jax
        from pdlib.store import KeepNewest, Retention, save_state
        from tests.store.test_cases import state_of
        def resident(): return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])
        import os
        state = state_of(0, C=4096)
        nbytes = sum(x.nbytes for x in jax.tree.leaves(state)) / 1024
        with pdlib.Manager(sys.argv[1], retention=Retention(product=KeepNewest(2), process=KeepNewest(1))) as manager:
            for step in range(24):
                save_state(manager, step, state, background=step % 2 == 0)
                if step == 3: manager.wait(); gc.collect(); before, files = resident(), len(os.listdir("/proc/self/fd"))
            manager.wait(); gc.collect()
            print(nbytes, resident() - before, len(os.listdir("/proc/self/fd")) - files)
    """
    state, grown, descriptors = map(float, python(code, tmp_path / "ckpts").split())
    assert grown < 2 * state
    assert descriptors <= 0


def test_case_11_host_arrays_are_read_only_views_or_owned_copies(run):
    with Manager(run / "ckpts", read_only=True) as manager:
        device = restore_decomposition(manager)
        for leaf in jax.tree.leaves(restore_decomposition_to_host(manager, mapped=True)):
            with pytest.raises(ValueError, match="read-only"):
                leaf[...] = 0
        for leaf in jax.tree.leaves(restore_decomposition_to_host(manager)):
            leaf[...] = 0
        assert_bit_equal(device, state_of(20).decomposition)
        assert manager.verify(20)


@LAYOUTS
def test_case_12_a_background_save_holds_the_values_of_the_moment_of_the_call(tmp_path, layout):
    donate = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)
    tree = {"jax": jnp.arange(1 << 20, dtype=jnp.float32), "numpy": np.arange(1 << 20, dtype=np.float32)}
    want = jax.tree.map(np.array, tree)
    with Manager(tmp_path, registry=ANY, layout=layout) as manager:
        manager.save(0, {"anything": tree}, background=True)
        donate(tree["jax"])
        tree["numpy"][:] = -1
        manager.wait()
        assert_bit_equal(manager.restore_to_host(0, "anything"), want)


# Structure and keys


def test_case_13_missing_and_unexpected_leaves_are_listed_in_one_error(run):
    other = jax.eval_shape(lambda: state_of(20, sites=("out", "extra")))
    with Manager(run / "ckpts", read_only=True) as manager, pytest.raises(SpecMismatch) as caught:
        manager.restore(20, {"decomposition": other.decomposition})
    assert str(caught.value) == (
        "restore of decomposition v1, step 20: 4 leaves differ from the stored\n"
        "  components/extra/V  is asked for, but not stored\n"
        "  components/extra/U  is asked for, but not stored\n"
        "  components/layers.18.mlp/V  is stored, but not asked for\n"
        "  components/layers.18.mlp/U  is stored, but not asked for\n"
        "Ask for what is stored (Manager.describe lists it), or restore_to_host, which needs no template."
    )


def test_case_14_a_leaf_that_no_row_registers_is_refused_and_nothing_is_written(tmp_path):
    state = state_of(0)
    grown = state.decomposition._replace(components={**state.decomposition.components, "x": {"W": jnp.ones(3)}})
    with Manager(tmp_path / "new") as manager, pytest.raises(SpecMismatch) as caught:
        manager.save(0, {"decomposition": grown})
    assert "save of step 0: decomposition v1: 1 of 7 leaves differ" in str(caught.value)
    assert "components/x/W  is registered by no row of decomposition v1" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_case_15_items_are_read_in_any_order_by_one_reader(run):
    with Manager(run / "ckpts", read_only=True) as manager:
        abstract = jax.eval_shape(lambda: state_of(20))
        for name in ("decomposition", "training", "decomposition"):
            tree = getattr(abstract, name)
            manager.describe(20, name)
            assert_bit_equal(manager.restore(20, {name: tree})[name], getattr(state_of(20), name))
            manager.restore_to_host(20, name)


def test_case_16_a_later_version_with_an_optional_subtree_opens_an_old_checkpoint(tmp_path):
    rows = [pdlib.LeafSpec(path="params/**")]
    old = pdlib.Registry((pdlib.ItemSpec(name="model", version=1, leaves=rows),))
    grown = [*rows, pdlib.LeafSpec(path="ema/**", optional=True)]
    new = pdlib.Registry((pdlib.ItemSpec(name="model", version=2, leaves=grown),))
    with Manager(tmp_path, registry=old) as manager:
        manager.save(0, {"model": {"params": {"w": jnp.ones(2)}}})
    abstract = {
        "params": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "ema": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)},
    }
    with Manager(tmp_path, registry=new) as manager:
        assert manager.restore(0, {"model": abstract})["model"]["ema"] == {"w": None}
        manager.save(1, {"model": {"params": {"w": jnp.ones(2)}, "ema": {"w": jnp.zeros(2)}}})
    with (
        Manager(tmp_path, registry=old, read_only=True) as manager,
        pytest.raises(pdlib.PdlibError, match="under model v2"),
    ):
        manager.restore_to_host(1, "model")


def test_case_17_a_wrong_shape_names_path_stored_and_wanted(run):
    with Manager(run / "ckpts", read_only=True) as manager, pytest.raises(SpecMismatch) as caught:
        manager.restore(20, {"decomposition": jax.eval_shape(lambda: state_of(20, C=4)).decomposition})
    assert "components/out/V  shape (16, 8) stored, (16, 4) asked for" in caught.value.problems


def test_case_18_optax_states_pass_through_cond_beside_a_stepped_one(tmp_path):
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    masked = optax.masked(optax.adam(1e-3), {"w": True, "b": False})
    optimizer = optax.chain(
        optax.clip(1.0), masked, optax.multi_transform({"a": optax.sgd(0.1, 0.9)}, {"w": "a", "b": "a"})
    )
    state = optimizer.init(params)
    extras = {"none": None, "dict": {}, "tuple": (), "list": [(), [jnp.ones(1)], (jnp.ones(2),)]}
    extras |= {"numbered": {0: jnp.ones(1), 10: jnp.ones(2), 2: {}}, "record": Record(jnp.ones(3), [jnp.zeros(1)])}
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": (state, extras)})
        back, kept = manager.restore(0, {"anything": tree_twin((state, extras))})["anything"]
        host = manager.restore_to_host(0, "anything")[1]
    assert_bit_equal((back, kept), (state, extras))
    assert list(host["numbered"]) == [0, 2, 10]
    assert host["record"].keys() == {"first", "second"}
    stepped = optimizer.update(params, state, params)[1]
    jax.lax.cond(jnp.bool_(True), lambda: back, lambda: stepped)


def test_case_19_and_20_names_that_differ_stay_apart_and_names_that_meet_are_refused(tmp_path):
    apart = {
        "a/b": np.ones(1),
        "a": {"b": np.zeros(2)},
        "mlp/~/linear": np.ones(3),
        "mlp/_/linear": np.zeros(3),
        "a.b.c": np.ones(4),
    }
    with Manager(tmp_path / "apart", registry=ANY) as manager:
        manager.save(0, {"anything": apart})
        assert_bit_equal(manager.restore_to_host(0, "anything"), apart)
    meeting: list[tuple[Any, str]] = [
        ({"a.b": {"c": 1}, "a": {"b.c": 2}}, "['a', 'b.c'] and ['a.b', 'c'] would both be stored as 'a.b.c'"),
        ({"a": np.ones(2), "a/0": np.ones(2)}, "['a/0'] would be stored inside the files of ['a']"),
        ({"": 1}, "'': its name '' has an empty or dotted path part, which is no file name"),
        ({"../x": 1}, "'../x': its name '../x' has an empty or dotted path part, which is no file name"),
        ({"/etc": 1}, "has an empty or dotted path part, which is no file name"),
        ({"x" * 256: 1}, "its name has a part longer than 255 bytes, which is no file name"),
        ({"a\\b": 1}, "has a NUL or a backslash, which orbax cannot have in a file name"),
        ({"manifest.json": 1}, "its name is one that the store uses itself"),
    ]
    for tree, text in meeting:
        with Manager(tmp_path / "met", registry=ANY) as manager, pytest.raises(NameCollision) as caught:
            manager.save(0, {"anything": tree})
        assert str(caught.value).startswith("item anything: the leaves cannot all be stored\n")
        assert text in str(caught.value)
        assert str(caught.value).endswith("\nRename the keys; nothing was written.")
        assert not (tmp_path / "met").exists()


# Dtypes and bits


def test_case_21_a_stored_dtype_is_compared_before_any_value(tmp_path):
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": {"i": jnp.int32(16777217), "f": jnp.ones(2, jnp.float32)}})
        asked = {"i": jax.ShapeDtypeStruct((), jnp.float32), "f": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
        with pytest.raises(SpecMismatch) as caught:
            manager.restore(0, {"anything": asked})
    assert caught.value.problems == (
        "f  dtype float32 stored, bfloat16 asked for",
        "i  dtype int32 stored, float32 asked for",
    )


def test_case_21_casts_and_part_of_the_sites_come_only_when_asked_for(run):
    with Manager(run / "ckpts", read_only=True) as manager:
        assert restore_decomposition(manager).components["out"].V.dtype == jnp.float32
        cast = restore_decomposition(manager, dtype=jnp.bfloat16, sites=["out"])
        assert list(cast.components) == ["out"]
        want = state_of(20).decomposition
        assert_bit_equal(cast.components["out"].V, want.components["out"].V.astype(jnp.bfloat16))
        assert_bit_equal(restore_factors(manager, "out"), {"out": want.components["out"]})
        assert_bit_equal(restore_factors(manager, ["out", "layers.18.mlp"]), want.components)
        with pytest.raises(NoCheckpoint, match=r"has no site 'layer.18.mlp'; did you mean layers.18.mlp"):
            restore_factors(manager, "layer.18.mlp")


@LAYOUTS
def test_case_22_to_26_every_dtype_shape_and_bit_pattern_comes_back(tmp_path, layout):
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF], np.uint32)
    tree = {
        "nan": patterns.view(np.float32),
        "zero": {str(d): np.empty((3, 0), d) for d in (np.float32, np.int8, np.bool_, ml_dtypes.bfloat16)},
        "empty": np.empty((0,), np.float64),
        "scalar": np.float32(-0.0),
        "wide": {"f": np.array([np.pi, 5e-324]), "i": np.array([2**62 + 1, -1]), "c": np.array([1 + 2j])},
        "narrow": {
            d: np.arange(4).astype(d) for d in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, np.uint8)
        },
        "big-endian": np.arange(3, dtype=">f4"),
        "strided": np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::3].T,
    }
    tree["narrow"] = {np.dtype(d).name: value for d, value in tree["narrow"].items()}
    with Manager(tmp_path, registry=ANY, layout=layout) as manager:
        manager.save(0, {"anything": tree})
        want = {**tree, "big-endian": tree["big-endian"].astype("<f4"), "scalar": np.asarray(tree["scalar"])}
        assert_bit_equal(manager.restore_to_host(0, "anything"), want)
        assert_bit_equal(manager.restore_to_host(0, "anything", mapped=True), want)


def test_case_24_64_bit_leaves_are_refused_on_devices_without_x64(tmp_path):
    tree = {"f": np.array([np.pi]), "i": np.array([2**62 + 1])}
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": tree})
        with pytest.raises(SpecMismatch) as caught:
            manager.restore(0, {"anything": tree})
        assert caught.value.problems[0] == "f  dtype float64 needs jax_enable_x64; restore_to_host keeps all its bits"
        with pytest.raises(SpecMismatch, match="jax_enable_x64"):
            manager.open(0, "anything")
    code = """
        import sys, jax
        jax.config.update("jax_enable_x64", True)
        from tests.store.test_cases import *
        tree = {"f": np.array([np.pi]), "i": np.array([2**62 + 1])}
        with Manager(sys.argv[1], registry=ANY) as manager:
            assert_bit_equal(manager.restore(0, {"anything": tree})["anything"], tree)
            assert_bit_equal(manager.open(0, "anything"), tree)
    """
    python(code, tmp_path)


@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]"), np.zeros(2, "V1"), 2**70, {1}],
)
def test_leaves_that_have_no_bit_exact_form_are_refused(tmp_path, leaf):
    with Manager(tmp_path / "new", registry=ANY) as manager, pytest.raises(UnstorableLeaf, match=r"^anything:x "):
        manager.save(0, {"anything": {"x": leaf}})
    assert not (tmp_path / "new").exists()


# Crash, commit, retention, corruption


def tear(step: Path, how: str) -> None:
    item = step / "decomposition"
    chunk = next(p for p in item.rglob("*") if p.name == "0.0" and p.parent.name.endswith("V"))
    match how:
        case "chunk missing":
            chunk.unlink()
        case "chunk short":
            chunk.write_bytes(chunk.read_bytes()[:-1])
        case "manifest missing":
            (item / "manifest.json").unlink()
        case "manifest short":
            (item / "manifest.json").write_bytes((item / "manifest.json").read_bytes()[:-9])
        case "description missing":
            (item / "pdlib.json").unlink()
        case "description short":
            (item / "pdlib.json").write_bytes((item / "pdlib.json").read_bytes()[:-9])
        case "description empty object":
            (item / "pdlib.json").write_text('{"format": 1}')
        case "empty step":
            shutil.rmtree(step)
            step.mkdir()
        case _:
            raise ValueError(how)


TEARS = pytest.mark.parametrize(
    "how",
    ["chunk missing", "chunk short", "manifest missing", "manifest short", "description missing", "description short",
     "description empty object", "empty step"],
)  # fmt: skip


@TEARS
def test_case_27_a_torn_newest_step_is_said_and_passed_over_only_when_asked(run, how):
    tear(run / "ckpts" / "20", how)
    abstract = jax.eval_shape(lambda: state_of(10))
    with Manager(run / "ckpts") as manager:
        for attempt in (lambda: restore_latest(manager, abstract), manager.latest, lambda: pdlib.open_run(run)):
            with pytest.raises(TornStep) as caught:
                attempt()
            assert "the newest step, 20," in str(caught.value)
            assert "pass fallback=True" in str(caught.value)
        assert manager.latest(fallback=True) == 15
        step, state = restore_latest(manager, abstract, fallback=True)
        assert step == 10
        assert_bit_equal(state, state_of(10))


@LAYOUTS
@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "grow"])
def test_case_28_every_damage_to_every_file_is_found(tmp_path, layout, how):
    with Manager(tmp_path / "run" / "ckpts", layout=layout) as manager:
        save_state(manager, 1, state_of(1, sites=("s",)))
    whole = tmp_path / "run"
    files = [p.relative_to(whole) for p in (whole / "ckpts" / "1").rglob("*") if p.is_file() and p.parent.name != "1"]
    assert len(files) > (20 if layout == "raw" else 8)
    for file in files:
        path = whole / file
        data = path.read_bytes()
        match how:
            case "flip":
                path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
            case "truncate":
                path.write_bytes(data[:-1])
            case "grow":
                path.write_bytes(data + b"\0")
            case _:
                path.unlink()
        with Manager(whole / "ckpts", read_only=True) as manager:
            found = manager.verify(1)
            assert not found, file
            assert file.parts[2] in str(found)
        if "decomposition" in file.parts:
            with pytest.raises((CorruptItem, TornStep, ForeignLayout)):
                pdlib.open_run(whole, verify=True, step=1)
        path.write_bytes(data)
    with Manager(whole / "ckpts", read_only=True) as manager:
        assert manager.verify(1)
    (whole / "ckpts" / "1" / "training" / "stray").write_text("x")
    with Manager(whole / "ckpts", read_only=True) as manager:
        assert manager.verify(1).extra == ("1/training/stray",)


@LAYOUTS
def test_case_28_any_byte_flipped_in_the_descriptions_is_found(tmp_path, layout):
    with Manager(tmp_path / "run" / "ckpts", layout=layout) as manager:
        save_state(manager, 1, state_of(1, sites=("s",)), process=False)
    random = np.random.default_rng(0)
    for name in ("manifest.json", "pdlib.json"):
        path = tmp_path / "run" / "ckpts" / "1" / "decomposition" / name
        data = path.read_bytes()
        for place in random.choice(len(data), 150, replace=False):
            changed = bytearray(data)
            changed[place] ^= 1 << int(random.integers(0, 8))
            path.write_bytes(changed)
            with Manager(tmp_path / "run" / "ckpts", read_only=True) as manager:
                assert not manager.verify(1), (name, place)
            with pytest.raises(pdlib.PdlibError):
                pdlib.open_run(tmp_path / "run", verify=True)
        path.write_bytes(data)


def test_an_array_that_is_gone_or_traced_is_refused(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    with Manager(tmp_path / "new", registry=ANY) as manager:
        with pytest.raises(UnstorableLeaf, match="anything:x was donated or deleted"):
            manager.save(0, {"anything": {"x": gone}})
        with pytest.raises(UnstorableLeaf, match="anything:x is traced; call save outside jit"):
            jax.jit(lambda x: manager.save(0, {"anything": {"x": x}}))(jnp.ones(3))
        with pytest.raises(UnstorableLeaf, match="anything:x is abstract"):
            manager.save(0, {"anything": {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}})
    assert not (tmp_path / "new").exists()


def test_case_29_leftovers_are_ignored_and_block_no_save(run):
    for name in (".staging-30-aa", ".trash-bb", "30.orbax-checkpoint-tmp", "30.tmp", "07", "x", "-3", "1e3"):
        (run / "ckpts" / name / "decomposition").mkdir(parents=True)
    with Manager(run / "ckpts") as manager:
        assert manager.steps() == [10, 15, 20]
        save_state(manager, 30, state_of(30))
        assert manager.latest() == 30
    assert pdlib.open_run(run).step == 30


@LAYOUTS
def test_case_30_a_failed_background_save_is_raised_at_the_next_call(tmp_path, layout, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for next_call in ("save", "wait", "close", "steps", "latest", "prune", "restore", "verify", "open"):
        manager = Manager(tmp_path / next_call, registry=ANY, layout=layout)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            manager.save(1, {"anything": jnp.ones(3)}, background=True)
            manager._pending.exception()  # pyright: ignore
        calls = {
            "save": lambda m: m.save(2, {"anything": jnp.ones(3)}),
            "restore": lambda m: m.restore(1, {"anything": jnp.ones(3)}),
            "verify": lambda m: m.verify(1),
            "open": lambda m: m.open(1, "anything"),
        }
        with pytest.raises(SaveFailed) as caught:
            calls.get(next_call, getattr(Manager, next_call))(manager)
        assert str(caught.value).startswith(
            f"step 1 was not saved to {tmp_path / next_call}: [Errno 28] No space left on device\n"
        )
        assert not list((tmp_path / next_call).iterdir())
        if next_call != "close":
            manager.save(1, {"anything": jnp.ones(3)})  # the cause mended, the same step is saved
            assert manager.steps() == [1]
        manager.close()


def test_case_30_retention_tolerates_an_absent_step(tmp_path):
    keep = Retention(product=KeepNewest(2), process=KeepNewest(1))
    with Manager(tmp_path, retention=keep) as manager:
        save_state(manager, 1, state_of(1))
        save_state(manager, 2, state_of(2))
        shutil.rmtree(tmp_path / "1")
        save_state(manager, 3, state_of(3))
        assert manager.steps() == [2, 3]


def test_case_31_a_reader_never_writes(run):
    (run / "ckpts" / ".staging-1-x").mkdir()
    before = listing(run)
    with Manager(run / "ckpts", read_only=True, retention=Retention(KeepNewest(1), KeepNewest(1))) as manager:
        restore_latest(manager, jax.eval_shape(lambda: state_of(20)))
        restore_decomposition(manager)
        manager.verify(20)
        manager.content_digest(20, "training")
        for write in (
            lambda: manager.save(30, {}), manager.prune, lambda: manager.keep(20), lambda: manager.resume_at(20),
        ):  # fmt: skip
            with pytest.raises(ReadOnly, match="was opened with read_only=True; open it without to write"):
                write()
    pdlib.open_run(run, verify=True)
    pdlib.open_run(run, host=True)
    init_from_parent(run, jax.eval_shape(lambda: state_of(20)).decomposition)
    assert listing(run) == before


@pytest.mark.parametrize("step", [20, 19, 0])
def test_case_33_a_step_that_is_not_above_the_newest_is_refused(run, step):
    before = listing(run)
    with Manager(run / "ckpts") as manager, pytest.raises(StepRefused) as caught:
        save_state(manager, step, state_of(1))
    assert str(caught.value) == (
        f"step {step} is not above 20, the newest of {run / 'ckpts'}; "
        "restore the newest step and go on from it, or save to a new directory"
    )
    assert listing(run) == before


@pytest.mark.parametrize("step", [-1, 1.5, "7", True, None])
def test_case_33_a_step_is_a_whole_number(tmp_path, step):
    with (
        Manager(tmp_path, registry=ANY) as manager,
        pytest.raises(StepRefused, match="is not a whole number from 0 up"),
    ):
        manager.save(step, {"anything": 1})


def test_a_resumed_run_completes_later_products_of_equal_bits_and_refuses_others(tmp_path):
    with Manager(tmp_path) as manager:
        save_state(manager, 10, state_of(10))
        save_state(manager, 20, state_of(20), process=False)
    with Manager(tmp_path) as manager:
        assert restore_latest(manager, jax.eval_shape(lambda: state_of(0)))[0] == 10
        save_state(manager, 15, state_of(15))
        with pytest.raises(StepRefused, match=r"step 20 of .* holds another decomposition: the values differ"):
            save_state(manager, 20, state_of(21))
        assert manager.items(20) == ["decomposition"]
        manager.resume_at(15)
        save_state(manager, 20, state_of(20))
        assert_bit_equal(restore_latest(manager, jax.eval_shape(lambda: state_of(0)))[1], state_of(20))
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_case_34_marks_and_the_newest_resumable_step_outlive_every_policy(tmp_path):
    keep = Retention(product=KeepMarked(), process=KeepMarked())
    with Manager(tmp_path, retention=keep) as manager:
        save_state(manager, 1, state_of(1))
        manager.keep(1)
        for step in (2, 3):
            save_state(manager, step, state_of(step))
        for step in (4, 5):
            save_state(manager, step, state_of(step), process=False)
        assert {s: manager.items(s) for s in manager.steps()} == {
            1: ["decomposition", "training"], 3: ["decomposition", "training"], 5: ["decomposition"],
        }  # fmt: skip
        manager.keep(1, keep=False)
        assert (1, "training") in manager.prune()
        assert manager.steps() == [3, 5]
        with pytest.raises(NoCheckpoint, match="holds no step 9; it holds 3, 5"):
            manager.keep(9)


def test_pruning_a_process_never_touches_its_product(tmp_path):
    with Manager(tmp_path, retention=Retention(product=KeepAll(), process=KeepNewest(1))) as manager:
        save_state(manager, 1, state_of(1))
        product = listing(tmp_path / "1" / "decomposition")
        save_state(manager, 2, state_of(2))
        assert manager.items(1) == ["decomposition"]
        assert listing(tmp_path / "1" / "decomposition") == product
        assert manager.verify(1)


# Errors of place


def test_wrong_places_are_named_with_the_right_one(run, tmp_path):
    ckpts = run / "ckpts"
    for path, text in [
        (run / "ckptz", f"{run / 'ckptz'} does not exist; did you mean 'ckpts'?"),
        (run, f"{run} is a run, a level too shallow; open {ckpts}"),
        (ckpts / "20", f"{ckpts / '20'} is one step, a level too deep; open {ckpts}"),
        (
            ckpts / "20" / "training",
            f"{ckpts / '20' / 'training'} is one item of a step, two levels too deep; open {ckpts}",
        ),
    ]:
        with pytest.raises(NotARun) as caught:
            Manager(path, read_only=True)
        assert str(caught.value) == text
    for path, text in [
        (tmp_path / "rum", f"{tmp_path / 'rum'} does not exist; did you mean 'run'?"),
        (tmp_path, f"{tmp_path} holds runs, it is none itself; open one of them: run"),
        (ckpts, f"{ckpts} lies inside a run; open {run}"),
        (ckpts / "20", f"{ckpts / '20'} lies inside a run; open {run}"),
        (ckpts / "20" / "training", f"{ckpts / '20' / 'training'} lies inside a run; open {run}"),
    ]:
        for use in (pdlib.open_run, lambda p: init_from_parent(p, state_of(20).decomposition)):
            with pytest.raises(NotARun) as caught:
                use(path)
            assert str(caught.value) == text


def test_what_is_not_there_is_listed_with_what_is(run, tmp_path):
    with Manager(run / "ckpts", read_only=True) as manager:
        with pytest.raises(NoCheckpoint, match="holds no step 11; it holds 10, 15, 20"):
            manager.restore_to_host(11, "decomposition")
        with pytest.raises(NoCheckpoint, match="holds no item 'training'; it holds decomposition"):
            manager.restore_to_host(15, "training")
    (tmp_path / "young" / "ckpts").mkdir(parents=True)
    with pytest.raises(NoCheckpoint, match="holds no product yet; let it train to its first save"):
        pdlib.open_run(tmp_path / "young")
    with Manager(tmp_path / "young" / "ckpts") as manager, pytest.raises(NoCheckpoint, match="holds no step with both"):
        restore_latest(manager, state_of(0))


def test_a_foreign_layout_is_named(tmp_path):
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(tmp_path / "ckpts" / "5" / "decomposition", {"V": jnp.ones(3)})
    with pytest.raises(TornStep, match="was not written by pdlib"):
        pdlib.open_run(tmp_path)
    with pytest.raises(ForeignLayout, match="Open it with the program that wrote it"):
        pdlib.open_run(tmp_path, step=5)


# Paths and environment


def test_case_38_odd_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real place é 空").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real place é 空")
    for place in ("relative", "with space/é/重み", "link/inside", tmp_path / "absolute"):
        with Manager(Path(place) / "ckpts") as manager:
            save_state(manager, 1, state_of(1))
            assert {p.name for p in manager.directory.iterdir()} == {"1"}  # staged beside, gone now
        assert_bit_equal(pdlib.open_run(place).decomposition, state_of(1).decomposition)
    shutil.move("relative", "moved")
    assert pdlib.open_run("moved").step == 1


@LAYOUTS
@pytest.mark.parametrize("name", ["pdlib.json", "manifest.json", "leaf"])
def test_case_40_a_save_reads_back_what_it_wrote_before_it_commits(tmp_path, monkeypatch, layout, name):
    """A disk that reports more than it keeps is found out while the step can still be refused."""
    real = os.open
    lying: set[int] = set()

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        handle = real(path, flags, *rest, **named)
        wanted = str(path).endswith(f"/{name}" if name != "leaf" else ("/w/0" if layout == "raw" else "/_METADATA"))
        lying.update({handle} if wanted and flags & os.O_CREAT else ())
        return handle

    def write(handle: int, data: Any, real: Any = os.write) -> int:
        return real(handle, data[:-1]) + 1 if handle in lying else real(handle, data)

    with Manager(tmp_path / "steps", registry=ANY, layout=layout) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opened)
            patch.setattr(os, "write", write)
            with pytest.raises(SaveFailed, match="what was written does not read back"):
                manager.save(0, {"anything": {"w": jnp.ones(3)}})
        assert lying
        assert not list((tmp_path / "steps").iterdir())
        manager.save(0, {"anything": {"w": jnp.ones(3)}})
        assert manager.verify(0)


def test_a_template_s_format_is_the_format_of_the_restored_array(tmp_path):
    """The step's own layout in memory, and buffers that it takes over."""
    wanted = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    leaf = jnp.arange(12.0).reshape(3, 4)
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": leaf})
        asked = jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=wanted)
        restored = manager.restore(0, {"anything": asked})["anything"]
    assert restored.format.layout.major_to_minor == (1, 0)
    assert restored.sharding == wanted.sharding
    assert_bit_equal(restored, leaf)
    step = jax.jit(lambda x: x + 1, in_shardings=wanted, out_shardings=wanted, donate_argnums=0)
    held = restored.unsafe_buffer_pointer()
    assert step(restored).unsafe_buffer_pointer() == held


def test_a_background_ocdbt_save_copies_each_leaf_once(tmp_path, monkeypatch):
    from pdlib.store import snapshot

    copied: list[int] = []
    real = snapshot.copies
    monkeypatch.setattr(snapshot, "copies", lambda arrays: copied.append(len(arrays)) or real(arrays))
    for layout, leaves in (("raw", [2]), ("ocdbt", [])):
        with Manager(tmp_path / layout, registry=ANY, layout=layout) as manager:
            manager.save(0, {"anything": {"w": jnp.ones(3), "n": np.ones(2)}}, background=True)
        assert copied == leaves
        copied.clear()


def test_host_arrays_are_not_cast_or_split(run):
    for other in ({"dtype": jnp.bfloat16}, {"mesh": object()}):
        with pytest.raises(pdlib.PdlibError, match="leave dtype and mesh out, or host"):
            pdlib.open_run(run, host=True, **other)


def test_case_40_an_item_says_under_which_contract_it_was_written(run):
    for step in (10, 20):
        for item in ("decomposition", "training"):
            record = json.loads((run / "ckpts" / str(step) / item / "pdlib.json").read_text())
            spec = pdlib.load_contract(item)
            assert (record["item"], record["version"], record["digest"]) == (item, spec.version, spec.digest)


def test_fine_tuning_starts_from_the_parents_product_alone(run):
    """S33."""
    abstract = jax.eval_shape(lambda: state_of(20)).decomposition
    shutil.rmtree(run / "ckpts" / "20" / "training")
    product = init_from_parent(run, abstract)
    assert_bit_equal(product, state_of(20).decomposition)
    assert_bit_equal(init_from_parent(run, abstract, step=15), state_of(15).decomposition)
    jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)(product)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(product))
    for other in (state_of(20, C=4), state_of(20, sites=("out",))):
        with pytest.raises(SpecMismatch, match="restore of decomposition v1, step 20"):
            init_from_parent(run, jax.eval_shape(lambda other=other: other).decomposition)


@LAYOUTS
def test_the_content_digest_depends_on_values_and_not_on_shards_or_layout(tmp_path, mesh_of, layout):
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}
    digests = set()
    for place, spec in enumerate([(), ("fsdp",), (None, "fsdp")]):
        with Manager(tmp_path / str(place), registry=ANY, layout=layout) as manager:
            placed = jax.device_put(tree, NamedSharding(mesh_of(4), PartitionSpec(*spec)))
            manager.save(0, {"anything": placed})
            digests.add(manager.content_digest(0, "anything"))
    with Manager(tmp_path / "other", registry=ANY, layout="raw") as manager:
        manager.save(0, {"anything": tree})
        digests.add(manager.content_digest(0, "anything"))
        manager.save(1, {"anything": {"w": tree["w"].T.copy()}})
        assert len(digests) == 1
        assert manager.content_digest(1, "anything") not in digests


def test_a_mapped_product_is_the_file_itself(run):
    with Manager(run / "ckpts", read_only=True) as manager:
        host = restore_decomposition_to_host(manager, mapped=True)
        opened = restore_decomposition(manager)
    maps = Path("/proc/self/maps").read_text()
    starts = [
        tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps.splitlines() if "decomposition" in line
    ]
    for array in (*jax.tree.leaves(host), *jax.tree.leaves(opened)):
        pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
        assert any(start <= pointer < stop for start, stop in starts)


def test_several_shard_files_become_one_owned_array(tmp_path, mesh_of):
    mesh = mesh_of(8)
    tree = {"w": jax.device_put(jnp.arange(128.0).reshape(16, 8), NamedSharding(mesh, PartitionSpec("fsdp")))}
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": tree})
        assert len(list((tmp_path / "0" / "anything" / "w").iterdir())) == 9
        assert_bit_equal(manager.restore_to_host(0, "anything", mapped=True), jax.tree.map(np.asarray, tree))
        assert_bit_equal(manager.open(0, "anything"), tree)


def test_mesh_over_two_axes_and_partial_replication(tmp_path, devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec(None, "b")))
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(0, {"anything": w})
        assert manager.describe(0, "anything").leaves[0].grid == (1, 4)
        wanted = NamedSharding(mesh, PartitionSpec(("b", "a")))
        asked = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wanted)
        assert_bit_equal(manager.restore(0, {"anything": asked})["anything"], w)
