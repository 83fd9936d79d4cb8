"""Export and import of products: bit-equal, readable with safetensors alone, all or nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import pdlib
from pdlib.consumers.export import apply_export, import_product, plan_export
from pdlib.errors import CorruptItem, ForeignLayout, NoCheckpoint, NotARun, StepRefused, UnstorableLeaf
from pdlib.items.contracts import default_registry
from pdlib.store import Manager
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS

LOOSE = pdlib.Registry((pdlib.ItemSpec(name="decomposition", leaves=[pdlib.LeafSpec(path="**")]),))


def exported(run: Path, out: Path, **options) -> Path:
    apply_export(plan_export(run, out, **options))
    return out


def digest(run: Path, step: int) -> str:
    with Manager(run / "ckpts", registry=LOOSE, read_only=True) as manager:
        return manager.content_digest(step, "decomposition")


def odd_run(path: Path) -> Path:
    """A product with dtypes of every kind, sites whose names meet in a file system, and a leaf without elements."""
    random = np.random.default_rng(3)

    def bits(dtype, *shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return random.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)

    sites = {
        "a/b": np.float32,
        "a_b": ml_dtypes.bfloat16,
        "A_b": ml_dtypes.float8_e4m3fn,
        "é.ü": np.float16,
        "..": np.float64,
    }
    components = {site: pdlib.Factors(bits(dtype, 3, 2), bits(dtype, 2, 4)) for site, dtype in sites.items()}
    ci_fn = {"m/~/n": {"w": bits(np.float32, 2, 2), "none": np.empty((0, 3), np.float32), "b": np.float32(-0.0)}}
    ci_fn["small"] = {"int4": np.arange(6).astype(ml_dtypes.int4), "on": np.array([True, False])}
    with Manager(path / "ckpts", registry=LOOSE) as manager:
        manager.save(3, {"decomposition": pdlib.Decomposition(components, ci_fn)})
    return path


@pytest.mark.parametrize("name", ["raw.v1", "raw-shards.v1", "ocdbt.v1", "stripped.v1", "consolidated.v1"])
def test_every_layout_goes_out_and_comes_back_to_the_bit(tmp_path, name):
    out = exported(CORPUS / name, tmp_path / "out")
    import_product(out, tmp_path / "run")
    assert_bit_equal(
        tuple(pdlib.open_run(tmp_path / "run", verify=True).decomposition),
        tuple(pdlib.open_run(CORPUS / name).decomposition),
    )
    assert digest(tmp_path / "run", 7) == digest(CORPUS / name, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_every_dtype_and_name_goes_out_and_comes_back(tmp_path):
    run = odd_run(tmp_path / "odd")
    out = exported(run, tmp_path / "out")
    import_product(out, tmp_path / "again")
    for where in (run, tmp_path / "again"):
        with Manager(where / "ckpts", registry=LOOSE, read_only=True) as manager:
            assert manager.verify(3)
    one, other = (Manager(at / "ckpts", registry=LOOSE, read_only=True) for at in (run, tmp_path / "again"))
    assert_bit_equal(other.restore_to_host(3, "decomposition"), one.restore_to_host(3, "decomposition"))
    names = [p.name for p in out.glob("site-*.safetensors")]
    assert len({name.lower() for name in names}) == 5
    assert all(name.isascii() for name in names)


def test_nothing_but_safetensors_is_needed_to_read_it(tmp_path):
    out = exported(CORPUS / "raw.v1", tmp_path / "out")
    want = pdlib.open_run(CORPUS / "raw.v1", host=True).components["layers.0.mlp.up"].V
    code = """
        import json, pathlib, sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("jax", "pdlib", "torch", "ml_dtypes", "orbax", "tensorstore"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Refuse())
        from safetensors.numpy import load_file
        home = pathlib.Path(sys.argv[1])
        index = json.loads((home / "index.json").read_text())
        (leaf,) = [x for x in index["leaves"] if x["path"] == ["components", "layers.0.mlp.up", "V"]]
        print(load_file(home / leaf["file"])[leaf["tensor"]].tobytes().hex())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == np.asarray(want).tobytes().hex()


def test_bfloat16_is_read_by_the_reader_for_flax(tmp_path):
    run = odd_run(tmp_path / "odd")
    out = exported(run, tmp_path / "out")
    index = json.loads((out / "index.json").read_text("utf-8"))
    (leaf,) = (x for x in index["leaves"] if x["path"] == ["components", "a_b", "V"])
    from safetensors import safe_open

    with safe_open(out / leaf["file"], framework="np") as file:
        assert file.get_slice(leaf["tensor"]).get_dtype() == "BF16"


def test_the_card_and_the_index_say_what_it_is(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(CORPUS / "raw.v1", run)
    (run / "run.toml").write_text('name = "example"\n', "utf-8")
    (run / "lineage.json").write_text('{"target": "blake3:abc", "parent": null}\n', "utf-8")
    (run / "results.json").write_text('{"mmcs": 0.987}\n', "utf-8")
    out = exported(run, tmp_path / "out")
    card = (out / "README.md").read_text("utf-8")
    for text in (
        "# example, step 7",
        "blake3:abc",
        "mmcs: 0.987",
        "| `layers.0.mlp.up` | 6 | 10 | 4 | float32 |",
        digest(run, 7),
    ):
        assert text in card
    assert card.startswith("---\nlibrary_name: pdlib\n")
    index = json.loads((out / "index.json").read_text("utf-8"))
    assert index["contract"] == json.loads(json.dumps(default_registry()["decomposition"].as_dict()))
    import_product(out, tmp_path / "again")
    assert pdlib.open_run(tmp_path / "again").spec == {"name": "example"}
    assert (tmp_path / "again" / "lineage.json").read_text("utf-8") == (run / "lineage.json").read_text("utf-8")


def test_what_was_changed_or_lost_on_the_way_is_named_and_nothing_is_made(tmp_path):
    out = exported(CORPUS / "raw.v1", tmp_path / "out")
    for file in sorted(p for p in out.iterdir() if p.suffix == ".safetensors"):
        data = file.read_bytes()
        for broken in (None, data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
            file.unlink() if broken is None else file.write_bytes(broken)
            with pytest.raises(CorruptItem, match=f"changed or missing: .*{file.name}"):
                import_product(out, tmp_path / "run")
        file.write_bytes(data)
    index = out / "index.json"
    text = index.read_text("utf-8")
    index.write_text(text.replace('"content_digest": "blake3:', '"content_digest": "blake3:0'), "utf-8")
    with pytest.raises(CorruptItem, match="the values are not those that were exported"):
        import_product(out, tmp_path / "run")
    index.write_text(text[:-20], "utf-8")
    with pytest.raises(CorruptItem, match=r"changed or missing: .*index\.json"):
        import_product(out, tmp_path / "run")
    index.write_text(text.replace('"format": 1', '"format": 2'), "utf-8")
    with pytest.raises(ForeignLayout, match="this pdlib reads format 1"):
        import_product(out, tmp_path / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_corrupt_product_does_not_go_out(tmp_path):
    shutil.copytree(CORPUS / "raw.v1", tmp_path / "run")
    home = tmp_path / "run" / "ckpts" / "7" / "decomposition"
    file = next(p for p in home.rglob("0.0") if p.parent.name.endswith(".V"))
    file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    with pytest.raises(CorruptItem, match="changed: 7/decomposition"):
        exported(tmp_path / "run", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_no_safetensors_file_holds_is_refused_by_leaf(tmp_path):
    for leaf, text in ((jax.random.key(0), "a typed PRNG key"), (3, "a Python int")):
        run = tmp_path / text.split()[-1]
        with Manager(run / "ckpts", registry=LOOSE) as manager:
            manager.save(0, {"decomposition": {"components": {}, "ci_fn": {"m": {"x": leaf}}}})
        with pytest.raises(UnstorableLeaf, match=f"decomposition:ci_fn/m/x is {text}; store it as an array"):
            plan_export(run, tmp_path / "out")


def test_what_is_there_is_not_overwritten_and_wrong_places_are_named(tmp_path):
    out = exported(CORPUS / "raw.v1", tmp_path / "out")
    with pytest.raises(StepRefused, match="exists; nothing was overwritten"):
        exported(CORPUS / "raw.v1", out)
    with pytest.raises(StepRefused, match="exists; nothing was overwritten"):
        import_product(out, out)
    with pytest.raises(NotARun, match=r"is no export: it has no index\.json"):
        import_product(CORPUS / "raw.v1", tmp_path / "run")
    with pytest.raises(NoCheckpoint, match="holds no step 8"):
        plan_export(CORPUS / "raw.v1", tmp_path / "x", step=8)
    (tmp_path / "empty" / "ckpts").mkdir(parents=True)
    with pytest.raises(NoCheckpoint, match="holds no product yet"):
        plan_export(tmp_path / "empty", tmp_path / "x")


def test_the_commands(tmp_path):
    def command(*args) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdlib", *map(str, args)], capture_output=True, text=True, check=False
        )

    done = command("export", CORPUS / "ocdbt.v1", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"]["ci_fn.safetensors"] == [
        "ci_fn/importance/~/layer/b",
        "ci_fn/importance/~/layer/w",
    ]
    assert command("import", tmp_path / "out", tmp_path / "run").returncode == 0
    assert command("verify", tmp_path / "run").returncode == 0
    assert command("export", CORPUS / "ocdbt.v1", tmp_path / "out").returncode == 1
