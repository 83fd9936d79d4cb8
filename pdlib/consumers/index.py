"""What an export says of itself, `index.json`: made, read and held to what can be; touches no file and trusts none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from blake3 import blake3

from pdlib.errors import CorruptItem, ForeignLayout
from pdlib.store.find import PRODUCT
from pdlib.store.mapped import numpy_dtype
from pdlib.store.stored import StoredLeaf

INDEX_FILE, CARD_FILE = "index.json", "README.md"
RUN_FILES = ("run.toml", "lineage.json")  # of the run, carried in the index
FORMAT = 1
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True)
class ExportedLeaf:
    """One leaf: as a run in one file a leaf stores it, the safetensors file that holds it, and its name there."""

    leaf: StoredLeaf
    file: str
    tensor: str


@dataclass(frozen=True)
class ExportIndex:
    """All that making a run of an export needs.

    Attributes:
        step: the product's step.
        started: when that step was written, in seconds since the epoch.
        name, role, version, digest: of the contract that the product was written under.
        contract: that contract in full; None if the exporting pdlib did not know it.
        content_digest: of the values; see `pdlib.store.digest.content_digest`.
        tree: the containers.
        leaves: in the order of `tree`.
        files: file → `size` and `blake3`.
        run_files: the text of each of `RUN_FILES` that the run has.
    """

    step: int
    started: float
    name: str
    role: str
    version: int
    digest: str
    contract: dict[str, Any] | None
    content_digest: str
    tree: dict[str, Any]
    leaves: tuple[ExportedLeaf, ...]
    files: Mapping[str, Mapping[str, Any]]
    run_files: Mapping[str, str]

    def to_json(self) -> str:
        """The text of `index.json`, sealed with its own digest."""
        record = {
            "format": FORMAT,
            "step": self.step,
            "started": self.started,
            "item": {"name": self.name, "role": self.role, "version": self.version, "digest": self.digest},
            "contract": self.contract,
            "content_digest": self.content_digest,
            "tree": self.tree,
            "leaves": [{**e.leaf.as_dict(), "file": e.file, "tensor": e.tensor} for e in self.leaves],
            "files": dict(self.files),
            "run_files": dict(self.run_files),
        }
        return json.dumps({**record, "digest": seal(record)}, indent=2) + "\n"


def seal(record: Mapping[str, Any]) -> str:
    """BLAKE3 of an index's canonical JSON, without its `digest`."""
    return _digest({key: value for key, value in record.items() if key != "digest"})


def read_index(data: bytes, place: object) -> ExportIndex:
    """Parse an index, and refuse one that could not have been exported: it may come from anywhere.

    Args:
        data: the bytes of the file.
        place: the file, for error messages.

    Raises:
        ForeignLayout: the index is of another format.
        CorruptItem: the index was changed, or says what cannot be; lists each.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _changed(place) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ForeignLayout(f"{place}: this pdlib reads format {FORMAT}; use a newer pdlib")
    if record.get("digest") != seal(record):
        raise _changed(place)
    try:
        index = _parse(record)
        problems = [*_problems(index)]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        problems = [f"it is not whole ({error!r})"]
    else:
        if not problems:
            return index
    lines = "\n".join(f"  {line}" for line in problems)
    raise CorruptItem(f"{place} says what no export does\n{lines}\nNothing was made; get the export anew.")


def tensor_bytes(leaf: StoredLeaf) -> int:
    """Bytes of one leaf's array."""
    return prod(leaf.stored_shape) * numpy_dtype(leaf.stored_dtype).itemsize


def _digest(record: Any) -> str:
    """BLAKE3 of canonical JSON, as contracts have it."""
    return f"blake3:{blake3(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()).hexdigest()}"


def _changed(place: object) -> CorruptItem:
    return CorruptItem(f"changed or missing: {place}\nRestore this file from a copy.")


def _parse(record: Mapping[str, Any]) -> ExportIndex:
    def leaf(row: Mapping[str, Any]) -> ExportedLeaf:
        stored = {key: value for key, value in row.items() if key not in ("file", "tensor")}
        return ExportedLeaf(StoredLeaf.from_dict(stored), row["file"], row["tensor"])

    return ExportIndex(
        step=record["step"],
        started=float(record["started"]),
        **{key: record["item"][key] for key in ("name", "role", "version", "digest")},
        contract=record["contract"],
        content_digest=record["content_digest"],
        tree=record["tree"],
        leaves=tuple(map(leaf, record["leaves"])),
        files=record["files"],
        run_files=record["run_files"],
    )


def _problems(index: ExportIndex) -> Iterator[str]:
    if type(index.step) is not int or index.step < 0 or not isfinite(index.started):
        yield f"step {index.step!r} is no whole number from 0 up, or its time {index.started!r} no number"
    if (index.name, index.role) != (PRODUCT, "product") or type(index.version) is not int:
        yield f"the item is {index.name!r} v{index.version!r} in the role {index.role!r}, not a {PRODUCT}"
    if index.contract is not None and _digest(index.contract) != index.digest:
        yield f"the contract's digest is {_digest(index.contract)}, the item was written under {index.digest}"
    for file, entry in index.files.items():
        if not _FILE.fullmatch(file) or {*entry} != {"size", "blake3"}:
            yield f"{file!r} is no file of an export"
    for name, text in index.run_files.items():
        if name not in RUN_FILES or type(text) is not str:
            yield f"{name!r} is no file that a run carries along; these are {', '.join(RUN_FILES)}"
    held = [(entry.file, entry.tensor) for entry in index.leaves]
    if len({*held}) < len(held) or {file for file, _ in held} != {*index.files}:
        yield "leaves and files do not belong together"
    if [*_paths(index.tree, ())] != [(place, entry.leaf.path) for place, entry in enumerate(index.leaves)]:
        yield "leaves and structure do not belong together"
    for entry in index.leaves:
        yield from (f"{'/'.join(entry.leaf.path)}: {why}" for why in _leaf_problems(entry.leaf))


def _leaf_problems(leaf: StoredLeaf) -> Iterator[str]:
    sizes = (*leaf.shape, *leaf.stored_shape)
    if not all(type(size) is int and size >= 0 for size in sizes) or leaf.chunks != leaf.stored_shape:
        yield f"shape {leaf.shape}, stored as {leaf.stored_shape} in files of {leaf.chunks}"
    if leaf.python is not None or leaf.shape != leaf.stored_shape:
        yield "it is not a plain array"
    for name in {leaf.dtype, leaf.stored_dtype}:
        dtype = numpy_dtype(name)
        if dtype.name != name or dtype.hasobject or dtype.itemsize != numpy_dtype(leaf.dtype).itemsize:
            yield f"dtype {leaf.dtype!r}, stored as {leaf.stored_dtype!r}"


def _paths(node: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The number and the path of each leaf of a structure, by number."""
    found: list[tuple[int, tuple[str, ...]]] = []
    _visit(node, keys, found)
    yield from sorted(found)


def _visit(node: Mapping[str, Any], keys: tuple[str, ...], found: list[tuple[int, tuple[str, ...]]]) -> None:
    if "leaf" in node:
        found.append((node["leaf"], keys))
        return
    for key, child in zip(node["keys"], node["children"], strict=True):
        _visit(child, (*keys, str(key)), found)
