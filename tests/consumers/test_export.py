"""Export and import of products: bit-equal, readable with safetensors alone, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

import pdlib
from pdlib.consumers.export import apply_export, plan_export
from pdlib.consumers.imports import apply_import, plan_import
from pdlib.consumers.index import seal
from pdlib.errors import (
    CorruptItem,
    ForeignLayout,
    NoCheckpoint,
    NotARun,
    PdlibError,
    SaveFailed,
    StepRefused,
    UnstorableLeaf,
)
from pdlib.items.contracts import default_registry
from pdlib.store import Manager, find
from pdlib.store.files import hash_file
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS
from tests.test_cli import pdlib as pdlib_command

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


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory) -> Path:
    """An export to copy."""
    return exported(CORPUS / "raw.v1", tmp_path_factory.mktemp("exported") / "out")


@pytest.mark.parametrize("name", ["raw.v1", "raw-shards.v1", "ocdbt.v1", "stripped.v1", "consolidated.v1"])
def test_every_layout_goes_out_and_comes_back_to_the_bit(tmp_path, name):
    out = exported(CORPUS / name, tmp_path / "out")
    apply_import(plan_import(out, tmp_path / "run"))
    assert_bit_equal(
        tuple(pdlib.open_run(tmp_path / "run", verify=True).decomposition),
        tuple(pdlib.open_run(CORPUS / name).decomposition),
    )
    assert digest(tmp_path / "run", 7) == digest(CORPUS / name, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_every_dtype_and_name_goes_out_and_comes_back(tmp_path):
    run = odd_run(tmp_path / "odd")
    out = exported(run, tmp_path / "out")
    apply_import(plan_import(out, tmp_path / "again"))
    for where in (run, tmp_path / "again"):
        with Manager(where / "ckpts", registry=LOOSE, read_only=True) as manager:
            assert manager.verify(3)
    one, other = (Manager(at / "ckpts", registry=LOOSE, read_only=True) for at in (run, tmp_path / "again"))
    assert_bit_equal(other.restore_to_host(3, "decomposition"), one.restore_to_host(3, "decomposition"))
    names = [p.name for p in out.glob("site-*.safetensors")]
    assert len({name.lower() for name in names}) == 5
    assert all(name.isascii() for name in names)


ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "pdlib", "torch", "ml_dtypes", "orbax", "tensorstore", "blake3"):
            raise RuntimeError("imported " + name)
sys.meta_path.insert(0, Refuse())
import pathlib
card = pathlib.Path(sys.argv[1], "README.md").read_text("utf-8")
exec(card.partition("```python\\n")[2].partition("```")[0])
for leaf in json.loads(pathlib.Path(sys.argv[1], "index.json").read_text("utf-8"))["leaves"]:
    found = read(sys.argv[1], *leaf["path"])
    print(json.dumps([leaf["path"], found.dtype.name, list(found.shape), found.tobytes().hex()]))
"""


def test_nothing_but_safetensors_is_needed_to_read_it(tmp_path):
    out = exported(odd_run(tmp_path / "odd"), tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", ALONE, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = {tuple(path): rest for path, *rest in map(json.loads, done.stdout.splitlines())}
    with Manager(tmp_path / "odd" / "ckpts", registry=LOOSE, read_only=True) as manager:
        product = manager.restore_to_host(3, "decomposition")
    want = {("components", site, key): getattr(pair, key) for site, pair in product.components.items() for key in "VU"}
    want |= {("ci_fn", module, key): leaf for module, held in product.ci_fn.items() for key, leaf in held.items()}
    assert read.keys() == want.keys()
    for path, array in want.items():
        dtype, shape, data = read[path]
        exact = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        if array.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
            exact = array.view(np.uint8)
        if array.dtype == ml_dtypes.bfloat16:  # through NaN payloads too
            exact = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert (dtype, tuple(shape), data) == (exact.dtype.name, array.shape, exact.tobytes().hex()), path


def test_bfloat16_is_read_by_the_reader_for_flax(tmp_path):
    from safetensors.flax import load_file as load_for_flax

    run = odd_run(tmp_path / "odd")
    out = exported(run, tmp_path / "out")
    index = json.loads((out / "index.json").read_text("utf-8"))
    (leaf,) = (x for x in index["leaves"] if x["path"] == ["components", "a_b", "V"])
    with Manager(run / "ckpts", registry=LOOSE, read_only=True) as manager:
        want = manager.restore_to_host(3, "decomposition").components["a_b"].V
    assert_bit_equal(np.asarray(load_for_flax(str(out / leaf["file"]))[leaf["tensor"]]), want)


def test_safetensors_names_bfloat16_and_fp8_as_they_are(tmp_path):
    out = exported(odd_run(tmp_path / "odd"), tmp_path / "out")
    index = json.loads((out / "index.json").read_text("utf-8"))
    found = {}
    for leaf in index["leaves"]:
        with safetensors.safe_open(out / leaf["file"], framework="np") as file:
            found[leaf["dtype"]] = file.get_slice(leaf["tensor"]).get_dtype()
    assert found == {
        "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float16": "F16", "float64": "F64",
        "int4": "U8", "bool": "BOOL",
    }  # fmt: skip


def test_tensor_names_that_meet_stay_apart(tmp_path):
    ci_fn = {"a": {"b/c": np.float32([1])}, "a/b": {"c": np.float32([2])}}
    with Manager(tmp_path / "run" / "ckpts", registry=LOOSE) as manager:
        manager.save(0, {"decomposition": pdlib.Decomposition({}, ci_fn)})
    out = exported(tmp_path / "run", tmp_path / "out")
    assert len(load_file(out / "ci_fn.safetensors")) == 2
    apply_import(plan_import(out, tmp_path / "again"))
    with Manager(tmp_path / "again" / "ckpts", registry=LOOSE, read_only=True) as manager:
        assert_bit_equal(manager.restore_to_host(0, "decomposition").ci_fn, ci_fn)


def test_the_card_and_the_index_say_what_it_is(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(CORPUS / "raw.v1", run)
    (run / "run.toml").write_text('name = "example"\n', "utf-8")
    (run / "lineage.json").write_text('{"target": "blake3:abc", "parent": null}\n', "utf-8")
    (run / "results.json").write_text('{"mmcs": 0.987, "identity_error": {"x": 3}}\n', "utf-8")
    rows = ('{"step": 5, "total": 0.5}', '{"step": 6, "total": 0.25}', '{"step": 8, "total": 0.125}', '{"ste')
    (run / "metrics.jsonl").write_text("\n".join(rows), "utf-8")
    out = exported(run, tmp_path / "out")
    card = (out / "README.md").read_text("utf-8")
    for text in (
        "# example, step 7",
        "blake3:abc",
        "* mmcs: 0.987",
        '* identity_error: {"x": 3}',
        "measured in training at step 6 (`metrics.jsonl`):\n\n* total: 0.25",
        "| `layers.0.mlp.up` | 6 | 10 | 4 | float32 |",
        digest(run, 7),
    ):
        assert text in card
    assert "0.125" not in card, "measured after the step"
    head = card.split("---\n")[1].splitlines()
    assert head[0] == "library_name: pdlib"
    facts = json.loads(head[2].removeprefix("pdlib: "))
    assert facts == {"step": 7, "content_digest": digest(run, 7), "target": "blake3:abc"}
    index = json.loads((out / "index.json").read_text("utf-8"))
    assert index["contract"] == json.loads(json.dumps(default_registry()["decomposition"].as_dict()))
    apply_import(plan_import(out, tmp_path / "again"))
    assert pdlib.open_run(tmp_path / "again").spec == {"name": "example"}
    assert (tmp_path / "again" / "lineage.json").read_text("utf-8") == (run / "lineage.json").read_text("utf-8")


def test_what_was_changed_or_lost_on_the_way_is_named_and_nothing_is_made(tmp_path):
    out = exported(CORPUS / "raw.v1", tmp_path / "out")
    for file in sorted(p for p in out.iterdir() if p.suffix == ".safetensors"):
        data = file.read_bytes()
        for broken in (None, data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
            file.unlink() if broken is None else file.write_bytes(broken)
            with pytest.raises(CorruptItem, match=f"changed or missing: .*{file.name}"):
                apply_import(plan_import(out, tmp_path / "run"))
        file.write_bytes(data)
    index = out / "index.json"
    text = index.read_text("utf-8")
    for broken in (text.replace('"content_digest": "blake3:', '"content_digest": "blake3:0'), text[:-20]):
        index.write_text(broken, "utf-8")
        with pytest.raises(CorruptItem, match=r"changed or missing: .*index\.json"):
            plan_import(out, tmp_path / "run")
    index.write_text(text.replace('"format": 1', '"format": 2'), "utf-8")
    with pytest.raises(ForeignLayout, match="this pdlib reads format 1"):
        plan_import(out, tmp_path / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def resealed(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an index as one who knows how it is sealed."""
    index = json.loads((out / "index.json").read_text("utf-8"))
    change(index)
    (out / "index.json").write_text(json.dumps({**index, "digest": seal(index)}), "utf-8")


# what a hostile or broken exporter could say → a part of the refusal
IMPOSSIBLE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file outside the run": (lambda i: i["run_files"].update({"../evil": "x"}), "'../evil' is no file that a run"),
    "another file of the run": (lambda i: i["run_files"].update({"ckpts": "x"}), "'ckpts' is no file that a run"),
    "a step that is a path": (lambda i: i.update(step="../../evil"), "step '../../evil' is no whole number"),
    "a negative step": (lambda i: i.update(step=-1), "step -1 is no whole number"),
    "a time that is none": (lambda i: i.update(started=float("nan")), "its time nan no number"),
    "a leaf outside the item": (lambda i: i["leaves"][0].update(name="../../evil"), "names that no leaf is stored by"),
    "a leaf of another name": (lambda i: i["leaves"][0].update(name="evil"), "names that no leaf is stored by"),
    "a source outside": (lambda i: i["files"].update({"../x.safetensors": {}}), "'../x.safetensors' is no file of an"),
    "no files": (lambda i: i.pop("files"), "it is not whole (KeyError('files'))"),
    "leaves that are none": (lambda i: i.update(leaves=3), "it is not whole (TypeError"),
    "a leaf less": (lambda i: i["leaves"].pop(), "leaves and structure do not belong together"),
    "a leaf twice": (lambda i: i["leaves"].append(i["leaves"][0]), "leaves and files do not belong together"),
    "a file less": (lambda i: i["files"].popitem(), "leaves and files do not belong together"),
    "another structure": (lambda i: i["tree"].update(keys=["x", "y"]), "leaves and structure do not belong together"),
    "another contract": (lambda i: i["contract"].update(version=9), "the contract's digest is "),
    "another item": (lambda i: i["item"].update(name="training"), "the item is 'training' v1 in the role 'product'"),
    "a later contract": (
        lambda i: (i["item"].update(version=99), i.update(contract=None)),
        "was written under",
    ),
    "objects": (lambda i: i["leaves"][0].update(stored_dtype="object"), "stored as 'object'"),
    "a dtype of another size": (lambda i: i["leaves"][0].update(dtype="float16"), "dtype 'float16', stored as"),
    "a number": (lambda i: i["leaves"][0].update(python="int"), "it is not a plain array"),
    "another shape": (lambda i: i["leaves"][0].update(shape=[1]), "it is not a plain array"),
    "a shape below zero": (lambda i: i["leaves"][0].update(stored_shape=[-1]), "stored as (-1,) in files of"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_index_that_says_what_no_export_does_is_refused_and_writes_nowhere(exported_once, tmp_path, what):
    out, run = tmp_path / "out", tmp_path / "deep" / "run"
    shutil.copytree(exported_once, out)
    change, text = IMPOSSIBLE[what]
    resealed(out, change)
    with pytest.raises(PdlibError) as caught:
        plan_import(out, run)
    assert text in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tensors_and_values_that_are_not_those_of_the_index_are_refused(exported_once, tmp_path):
    out, run = tmp_path / "out", tmp_path / "run"
    for change, text in (
        (lambda i: i.update(content_digest=f"blake3:{'0' * 64}"), "the values are not those that were exported"),
        (lambda i: i["leaves"][0].update(tensor="W"), "does not hold .* as its index says"),
        (
            lambda i: i["leaves"][0].update(shape=[3], stored_shape=[3], chunks=[3]),
            "does not hold .* as its index says",
        ),
    ):
        shutil.copytree(exported_once, out)
        resealed(out, change)
        with pytest.raises(CorruptItem, match=text):
            apply_import(plan_import(out, run))
        shutil.rmtree(out)
    shutil.copytree(exported_once, out)
    file = out / "ci_fn.safetensors"
    file.write_bytes(b"\0" * 20)
    resealed(out, lambda i: i["files"].update({file.name: hash_file(file)}))
    with pytest.raises(CorruptItem, match="is no whole safetensors file"):
        apply_import(plan_import(out, run))
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
        apply_import(plan_import(out, out))
    with pytest.raises(NotARun, match=r"is no export: it has no index\.json"):
        apply_import(plan_import(CORPUS / "raw.v1", tmp_path / "run"))
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
    shown = json.loads(command("import", tmp_path / "out", tmp_path / "run", "--json").stdout)
    assert (shown["step"], len(shown["leaves"])) == (7, 6)
    assert shown["content_digest"] == digest(tmp_path / "run", 7)
    assert command("verify", tmp_path / "run").returncode == 0
    assert command("export", CORPUS / "ocdbt.v1", tmp_path / "out").returncode == 1


def test_export_imports_no_jax(tmp_path):
    done = pdlib_command("export", CORPUS / "raw.v1", tmp_path / "out", cwd=tmp_path, without_jax=True)
    assert done.returncode == 0, done.stderr
    assert "of arrays" in done.stdout
    apply_import(plan_import(tmp_path / "out", tmp_path / "run"))


def test_what_is_made_is_readable_by_who_may_read_its_directory(tmp_path):
    before = os.umask(0o022)
    try:
        out = exported(CORPUS / "raw.v1", tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in out.iterdir()} == {"0o644"}


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveFailed, match="Nothing that was there is lost: mend the cause"):
        exported(CORPUS / "raw.v1", tmp_path / "file" / "out")
    for place in ("memory://out", "s3://bucket/out"):
        with pytest.raises(PdlibError, match="is a URL; export to a directory here"):
            plan_export(CORPUS / "raw.v1", place)


def test_what_does_not_read_back_as_it_was_is_refused(tmp_path, monkeypatch):
    real = safetensors.serialize_file

    def damaging(tensors, path, metadata) -> None:
        real(tensors, path, metadata)
        data = bytearray(Path(path).read_bytes())
        data[-1] ^= 1
        Path(path).write_bytes(data)

    monkeypatch.setattr(safetensors, "serialize_file", damaging)
    with pytest.raises(CorruptItem, match="reads back differently from"):
        exported(CORPUS / "raw.v1", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_product_that_is_pruned_while_it_is_looked_for_is_passed_over(tmp_path, monkeypatch):
    shutil.copytree(CORPUS / "raw.v1", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "ckpts" / "7", tmp_path / "run" / "ckpts" / "9")
    real = find.read_item

    def pruning(directory: Path):
        if directory.parent.name == "9":
            shutil.rmtree(directory.parent)
        return real(directory)

    monkeypatch.setattr(find, "read_item", pruning)
    assert plan_export(tmp_path / "run", tmp_path / "out").step == 7
