"""Carries a product out as safetensors that need nothing of pdlib, and back in, bit for bit; imports no training code.

OUT holds one safetensors file a site, one of the importance function, `index.json` (contract, structure, lineage: all
that coming back needs) and `README.md`, a model card. Nothing but `safetensors` is needed to read the arrays.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdlib.errors import CorruptItem, ForeignLayout, NoCheckpoint, NotARun, UnstorableLeaf
from pdlib.items.contracts import default_registry
from pdlib.store import files
from pdlib.store.checkpoint import Manager
from pdlib.store.decomposition import PRODUCT
from pdlib.store.digest import content_digest, verify_item
from pdlib.store.find import find_run
from pdlib.store.ledger import size
from pdlib.store.mapped import map_leaf, numpy_dtype
from pdlib.store.orbax_format import zarray
from pdlib.store.places import locate
from pdlib.store.remote import bring
from pdlib.store.seal import Entries, seal_item, seal_step, write_entry
from pdlib.store.stored import StoredItem, StoredLeaf, chunk_file, read_item

INDEX_FILE, CARD_FILE = "index.json", "README.md"
FORMAT = 1
# The dtypes that safetensors has a name for (its format page); the others go as their bytes.
_NAMED = frozenset(
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "complex64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes.

    Attributes:
        run: the run directory.
        out: the directory to be made.
        item: the stored product.
        step: its step.
        groups: file → the leaves that it holds.
    """

    run: Path
    out: Path
    item: StoredItem
    step: int
    groups: Mapping[str, tuple[StoredLeaf, ...]]

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        held = {file: ["/".join(leaf.path) for leaf in leaves] for file, leaves in self.groups.items()}
        return {"run": str(self.run), "step": self.step, "out": str(self.out), "bytes": self.item.nbytes, "files": held}

    def render(self) -> str:
        """The plan as text, a line a file."""
        lines = [f"{self.run}, step {self.step} → {self.out}: {size(self.item.nbytes)}"]
        return "\n".join([*lines, *(f"  {file}: {len(leaves)} leaves" for file, leaves in self.groups.items())])


def plan_export(run: str | Path, out: str | Path, *, step: int | None = None) -> ExportPlan:
    """Look at what an export writes; touches nothing.

    Args:
        run: the run directory.
        out: the directory to be made.
        step: the newest that holds a product when None.

    Raises:
        NotARun, NoCheckpoint, TornStep: there is no such product.
        UnstorableLeaf: a leaf is a typed PRNG key or a Python number, which no safetensors file holds.
    """
    home = find_run(locate(run))
    with Manager(home / "ckpts", read_only=True) as manager:
        newest = manager.latest(items=(PRODUCT,)) if step is None else step
        if newest is None:
            raise NoCheckpoint(f"{home} holds no product yet; let it train to its first save")
        item = manager.describe(newest, PRODUCT)
    for leaf in item.leaves:
        if leaf.key_impl or leaf.python:
            what = "a typed PRNG key" if leaf.key_impl else f"a Python {leaf.python}"
            raise UnstorableLeaf(f"{PRODUCT}:{'/'.join(leaf.path)} is {what}; store it as an array to export it")
    groups: dict[str, list[StoredLeaf]] = {}
    for leaf in item.leaves:
        groups.setdefault(_file_of(leaf), []).append(leaf)
    return ExportPlan(home, locate(out), item, newest, {file: tuple(leaves) for file, leaves in groups.items()})


@files.changing
def apply_export(plan: ExportPlan, *, say: Say = lambda _: None) -> None:
    """Write the files of a plan; a kill at any instruction leaves OUT absent or whole.

    Raises:
        StepRefused: OUT exists.
        CorruptItem: the product is not what its manifest records.
    """
    bring(plan.item, plan.item.leaves)
    if plan.item.origin is None:  # what came from an object store was held to its manifest on the way
        verify_item(plan.item).require()
    with files.staged(plan.out) as staging:
        written: dict[str, Any] = {}
        for file, leaves in plan.groups.items():
            say(f"{file}: {len(leaves)} leaves")
            _write_tensors(staging / file, plan.item, leaves)
            written[file] = files.hash_file(staging / file)
        index = _index(plan, written)
        files.write_file(staging / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
        files.write_file(staging / CARD_FILE, _card(plan, index).encode())


@files.changing
def import_product(source: str | Path, run: str | Path, *, say: Say = lambda _: None) -> None:
    """Make a run of an export, bit-equal to the one that was exported; all or nothing.

    Args:
        source: a directory that `apply_export` made.
        run: the run directory to be made.
        say: told of each file.

    Raises:
        NotARun: the source is no export.
        CorruptItem: a file of it is missing or changed, or the values are not those that were exported; lists each.
        StepRefused: the run exists.
    """
    home, target = locate(source), locate(run)
    index = _read_index(home)
    bad = [file for file, entry in index["files"].items() if not _is_same(home / file, entry)]
    if bad:
        raise CorruptItem(
            "\n".join(f"changed or missing: {home / file}" for file in bad) + "\nRestore these files from a copy."
        )
    with files.staged(target) as staging:
        step = staging / "ckpts" / str(index["step"])
        _write_item(home, index, step / PRODUCT, say)
        seal_step(step, index["started"])
        if content_digest(read_item(step / PRODUCT)) != index["content_digest"]:
            raise CorruptItem(f"{home}: the values are not those that were exported; export again, or use another copy")
        for name, text in index["run_files"].items():
            files.write_file(staging / name, text.encode())


def _file_of(leaf: StoredLeaf) -> str:
    """A file name that is safe everywhere, and one to one with the site: letters of it, and a few of its digest."""
    if leaf.path[0] != "components":
        return f"{leaf.path[0]}.safetensors"
    site = leaf.path[1]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", site)[:80].lstrip(".")
    return f"site-{safe}-{hashlib.sha256(site.encode()).hexdigest()[:8]}.safetensors"


def _tensor_name(leaf: StoredLeaf) -> str:
    return leaf.path[-1] if leaf.path[0] == "components" else "/".join(leaf.path[1:])


def _write_tensors(path: Path, item: StoredItem, leaves: Sequence[StoredLeaf]) -> None:
    """Write leaves from where they are mapped: safetensors takes their addresses, and nothing of them is copied."""
    import safetensors

    arrays = [np.empty(leaf.stored_shape, np.uint8) if leaf.is_empty else map_leaf(item, leaf) for leaf in leaves]
    tensors: dict[str, Any] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        named = leaf.dtype in _NAMED
        shape = leaf.shape if named else (*leaf.shape, numpy_dtype(leaf.dtype).itemsize)
        tensors[_tensor_name(leaf)] = safetensors.TensorSpec(
            dtype=leaf.dtype if named else "uint8",
            shape=list(shape),
            data_ptr=array.ctypes.data,
            data_len=0 if leaf.is_empty else array.nbytes,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.serialize_file(tensors, str(path), {"format": "np"})


def _index(plan: ExportPlan, written: Mapping[str, Any]) -> dict[str, Any]:
    item = plan.item
    run_files = {n: (plan.run / n).read_text("utf-8") for n in ("run.toml", "lineage.json") if (plan.run / n).exists()}
    return {
        "format": FORMAT,
        "step": plan.step,
        "started": (item.origin or item.directory).stat().st_mtime,
        "item": {"name": item.name, "role": item.role, "version": item.version, "digest": item.digest},
        "contract": default_registry()[item.name].as_dict(),
        "content_digest": content_digest(item),
        "tree": item.tree,
        "leaves": [
            {**leaf.as_dict(), "chunks": list(leaf.stored_shape), "file": _file_of(leaf), "tensor": _tensor_name(leaf)}
            for leaf in item.leaves
        ],
        "files": dict(written),
        "run_files": run_files,
    }


def _read_index(home: Path) -> dict[str, Any]:
    try:
        index = json.loads((home / INDEX_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARun(
            f"{home} is no export: it has no {INDEX_FILE}; name the directory that pdlib export made"
        ) from error
    except ValueError as error:
        raise CorruptItem(f"changed or missing: {home / INDEX_FILE}\nRestore this file from a copy.") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ForeignLayout(f"{home / INDEX_FILE}: this pdlib reads format {FORMAT}; use a newer pdlib")
    return index


def _is_same(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and files.hash_file(path) == entry


def _write_item(home: Path, index: Mapping[str, Any], target: Path, say: Say) -> None:
    entries: Entries = {}
    target.mkdir(parents=True)
    records = [
        StoredLeaf.from_dict({k: v for k, v in leaf.items() if k not in ("file", "tensor")}) for leaf in index["leaves"]
    ]
    for file in index["files"]:
        say(file)
        for record, leaf in zip(records, index["leaves"], strict=True):
            if leaf["file"] == file and not record.is_empty:
                data = _tensor_bytes(home / file, leaf["tensor"])
                write_entry(target, chunk_file(record.name, (0,) * len(record.stored_shape)), data, entries)
                write_entry(target, f"{record.name}/.zarray", zarray(record), entries)
    contract = _Identity(**index["item"])
    seal_item(target, contract, index["tree"], records, layout="raw", entries=entries)


@dataclass(frozen=True)
class _Identity:
    name: str
    role: str
    version: int
    digest: str


def _tensor_bytes(path: Path, name: str) -> memoryview:
    """The bytes of one tensor, mapped: the format is a length, a JSON header with offsets, and the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return np.memmap(path, np.uint8, mode="r", offset=8 + length + start, shape=(stop - start,)).data


def _card(plan: ExportPlan, index: Mapping[str, Any]) -> str:
    sites = sorted({leaf.path[1] for leaf in plan.item.leaves if leaf.path[0] == "components"})
    shapes = {(leaf.path[1], leaf.path[2]): leaf for leaf in plan.item.leaves if leaf.path[0] == "components"}
    rows = [
        f"| `{site}` | {shapes[site, 'V'].shape[0]} | {shapes[site, 'U'].shape[1]} | {shapes[site, 'V'].shape[1]} | "
        f"{shapes[site, 'V'].dtype} | `{_file_of(shapes[site, 'V'])}` |"
        for site in sites
    ]
    lineage = json.loads(index["run_files"].get("lineage.json", "{}"))
    name = tomllib.loads(index["run_files"].get("run.toml", "")).get("name", plan.run.name)
    results = plan.run / "results.json"
    figures = json.loads(results.read_text("utf-8")) if results.exists() else {}
    first = _file_of(shapes[sites[0], "V"]) if sites else "ci_fn.safetensors"
    lines = [
        "---", "library_name: pdlib", "tags: [parameter-decomposition, interpretability]", "---", "",
        f"# {name}, step {plan.step}", "",
        "A parameter decomposition: each weight matrix W of the target is a sum of rank-one components, `W ≈ V U`.", "",
        f"* content digest: `{index['content_digest']}`",
        f"* target fingerprint: `{lineage.get('target') or 'not recorded'}`",
        f"* lineage: `{json.dumps({k: v for k, v in lineage.items() if k != 'target'})}`",
        f"* contract: {plan.item.name} v{plan.item.version}, `{plan.item.digest}`", "",
        "| site | d_in | d_out | C | dtype | file |", "|---|---|---|---|---|---|", *rows, "",
        "## Error figures", "",
        *([f"* {key}: {value}" for key, value in figures.items()] or ["The run has recorded none."]), "",
        "## Reading it", "", "Nothing but safetensors is needed; `index.json` says what each tensor is.", "",
        "```python", "from safetensors.numpy import load_file", f'V = load_file("{first}")["V"]', "```", "",
        "What its NumPy reader has no dtype for, its readers for Flax and PyTorch have. A dtype that safetensors has",
        "no name for is kept as uint8, with one axis more, for the bytes of an element.",
        "", "`pdlib import` makes a run of this directory again, bit for bit.", "",
    ]  # fmt: skip
    return "\n".join(lines)
