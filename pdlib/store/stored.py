"""Reads what a step directory says of itself: items, leaves, files; needs neither jax nor orbax, and never writes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pdlib.errors import ForeignLayout, NoCheckpoint, TornStep
from pdlib.store.places import anywhere, is_remote

ITEM_FILE = "pdlib.json"
MANIFEST_FILE = "manifest.json"
KEEP_FILE = "keep"
FORMAT = 1

Keys = tuple[str, ...]


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf as an item's `pdlib.json` records it.

    Attributes:
        path: its keys.
        name: the name that orbax knows it by, and its directory in a raw item.
        shape: of the array as its user sees it.
        dtype: as its user sees it; `key<impl>` for typed PRNG keys.
        stored_shape: of the array in the file (key data has one dimension more).
        stored_dtype: of the array in the file (dtypes without a zarr name are kept as their bytes).
        chunks: the shape of each file of a raw leaf; None in an OCDBT item.
        python: `bool`, `int` or `float` where the leaf was a Python number.
    """

    path: Keys
    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    stored_dtype: str
    chunks: tuple[int, ...] | None
    python: str | None = None

    @property
    def key_impl(self) -> str | None:
        """The implementation of a typed PRNG key, None for other leaves."""
        return self.dtype[4:-1] if self.dtype.startswith("key<") else None

    @property
    def is_empty(self) -> bool:
        """Whether the leaf has no element: it has no file then."""
        return 0 in self.stored_shape

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of files along each dimension of a raw leaf."""
        assert self.chunks is not None
        return tuple(size // max(chunk, 1) for size, chunk in zip(self.stored_shape, self.chunks, strict=True))

    def files(self) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Each file of a raw leaf, relative to the item, and the part of the array that it holds."""
        if self.is_empty or self.chunks is None:
            return
        for place in product(*map(range, self.grid)):
            index = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, self.chunks, strict=True))
            yield chunk_file(self.name, place), index

    def as_dict(self) -> dict[str, Any]:
        """The leaf as `pdlib.json` holds it."""
        return {field: _plain(getattr(self, field)) for field in self.__dataclass_fields__}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> StoredLeaf:
        """The inverse of `as_dict`."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return StoredLeaf(**fields)


def chunk_file(name: str, place: Sequence[int]) -> str:
    """The zarr file of one chunk of a leaf, relative to the item."""
    return f"{name}/{'.'.join(map(str, place)) or '0'}"


@dataclass(frozen=True)
class StoredItem:
    """One item of a step, known from its `pdlib.json` alone.

    Attributes:
        directory: where its files are read.
        name, role, version, digest: of the contract it was written under.
        layout: `raw` or `ocdbt`.
        tree: its containers; see `pdlib.tree`.
        leaves: its leaves, in the order of `tree`.
        origin: its place in an object store, whose files come to `directory` when they are asked for.
    """

    directory: Path
    name: str
    role: str
    version: int
    digest: str
    layout: str
    tree: dict[str, Any]
    leaves: tuple[StoredLeaf, ...]
    origin: Path | None = None

    @cached_property
    def files(self) -> dict[str, dict[str, Any]]:
        """The manifest: file, relative to the item → `size` in bytes and `blake3`.

        Raises:
            TornStep: the manifest is missing or no manifest.
        """
        path = (self.origin or self.directory) / MANIFEST_FILE
        record = _read_json(path)
        files = record.get("files")
        if (
            record.get("algorithm") != "blake3"
            or not isinstance(files, dict)
            or not all(map(_is_entry, files.values()))
            or not all(map(_is_inside, files))
        ):
            raise TornStep(f"{path} is no whole manifest; restore it from a copy, or open an earlier step")
        return files

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(entry["size"] for entry in self.files.values())

    @cached_property
    def by_path(self) -> dict[Keys, StoredLeaf]:
        """The leaves by their keys."""
        return {leaf.path: leaf for leaf in self.leaves}

    @anywhere
    def is_as_written(self) -> bool:
        """Whether the description is, to the byte, the one that the manifest names; else nothing it says is worth much.

        Raises:
            TornStep: the manifest is missing or no manifest.
        """
        from blake3 import blake3

        try:
            described = blake3((self.directory / ITEM_FILE).read_bytes()).hexdigest()
        except FileNotFoundError:
            return False
        return self.files.get(ITEM_FILE, {}).get("blake3") == described

    def unnamed(self) -> list[str]:
        """Files of its leaves that the manifest does not name; only for an item that is as it was written."""
        return sorted({file for leaf in self.leaves for file, _ in leaf.files()} - self.files.keys())

    @anywhere
    def check_whole(self) -> None:
        """Compare the size of each file with the manifest, and the description to the byte; reads no array.

        Raises:
            TornStep: a file is missing or has another size, or the description was changed; lists each.
        """
        as_written = self.is_as_written()
        problems = [] if as_written else [f"{ITEM_FILE} is not the one that was written"]
        sizes = file_sizes(self.directory)
        for file, entry in self.files.items():
            if file not in sizes:
                problems.append(f"{file} is missing")
            elif sizes[file] != entry["size"]:
                problems.append(f"{file} has {sizes[file]} bytes, want {entry['size']}")
        if as_written:
            problems += [f"{file} is not in the manifest" for file in self.unnamed()]
        if problems:
            raise TornStep(
                f"{self.directory} is not whole: {'; '.join(problems[:8])}{' …' if len(problems) > 8 else ''}\n"
                "Restore the files from a copy, or open an earlier step."
            )


@anywhere
def read_item(directory: Path) -> StoredItem:
    """Read an item's description.

    Raises:
        NoCheckpoint: there is no such item.
        ForeignLayout: the item was written by another program, or by a newer pdlib.
        TornStep: its description is unreadable.
    """
    path = directory / ITEM_FILE
    if not path.exists():
        if not directory.is_dir():
            raise NoCheckpoint(
                f"{directory.parent} holds no item {directory.name!r}; it holds {_listing(directory.parent)}"
            )
        if (directory / MANIFEST_FILE).exists():
            raise TornStep(f"{directory}: {ITEM_FILE} is missing; restore it from a copy, or open an earlier step")
        raise ForeignLayout(
            f"{directory} was not written by pdlib: it has no {ITEM_FILE}\n"
            "Open it with the program that wrote it, for example orbax.checkpoint.PyTreeCheckpointer().restore(…)."
        )
    record = _read_json(path)
    if record.get("format") != FORMAT:
        raise ForeignLayout(f"{path}: format {record.get('format')!r}, this pdlib reads {FORMAT}; use a newer pdlib")
    try:
        return StoredItem(
            directory=directory,
            name=record["item"],
            role=record["role"],
            version=record["version"],
            digest=record["digest"],
            layout=record["layout"],
            tree=record["tree"],
            leaves=tuple(StoredLeaf.from_dict(leaf) for leaf in record["leaves"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TornStep(f"{path} is not a whole item description ({error!r}); open an earlier step") from error


@anywhere
def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below a directory, by its name relative to it."""
    if is_remote(directory):  # an object store lists all it holds below a prefix in one request
        place: Any = directory
        found = place.fs.find(place.path, detail=True)
        return {name.removeprefix(place.path.rstrip("/") + "/"): info["size"] for name, info in found.items()}
    sizes: dict[str, int] = {}
    before = len(os.path.join(directory, ""))  # noqa: PTH118
    for folder, _, names in os.walk(os.fspath(directory), followlinks=True):
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - of thousands of files, Path objects would take most of the time
            with contextlib.suppress(OSError):
                sizes[path[before:]] = os.stat(path).st_size  # noqa: PTH116
    return sizes


@anywhere
def step_numbers(directory: Path) -> list[int]:
    """The numbers of the committed step directories, ascending; anything with another name is not a step."""
    try:
        names = [entry.name for entry in directory.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)


@anywhere
def item_names(step: Path) -> list[str]:
    """The items of one step, ascending by name; staging and trash are no items."""
    try:
        return sorted(e.name for e in step.iterdir() if e.is_dir() and not e.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _listing(step: Path) -> str:
    return ", ".join(item_names(step)) or "nothing"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict):
            raise ValueError("no object")
        return record
    except FileNotFoundError as error:
        raise TornStep(f"{path} is missing; restore it from a copy, or open an earlier step") from error
    except ValueError as error:
        raise TornStep(f"{path} is unreadable ({error}); restore it from a copy, or open an earlier step") from error


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("blake3"), str)


def _is_inside(file: Any) -> bool:
    return isinstance(file, str) and not file.startswith("/") and ".." not in file.split("/")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
