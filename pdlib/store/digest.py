"""Fingerprints of stored bytes: of files against their manifest, of values whatever their shards; never writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

from blake3 import blake3

from pdlib.errors import CorruptItem, PdlibError
from pdlib.store.files import hash_file
from pdlib.store.mapped import map_region, numpy_dtype
from pdlib.store.memory import as_bytes, run_parallel
from pdlib.store.places import anywhere, is_remote
from pdlib.store.remote import bring, hash_remote
from pdlib.store.stored import MANIFEST_FILE, StoredItem, StoredLeaf, file_sizes

_ROWS = 64 << 20  # bytes of a several-file leaf that are held at a time


@dataclass(frozen=True)
class Verification:
    """What a comparison of items with their manifests found; true where nothing is wrong.

    Attributes:
        missing: files that the manifest names and the item lacks.
        changed: files whose bytes are not those that were written.
        extra: files that no manifest names.
        unverifiable: items or files of which the evidence itself is missing.
    """

    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unverifiable: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.missing or self.changed or self.extra or self.unverifiable)

    def __add__(self, other: Verification) -> Verification:
        return Verification(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __str__(self) -> str:
        lines = [f"{name}: {file}" for name in self.__dataclass_fields__ for file in getattr(self, name)]
        return "\n".join(lines) or "every file is as it was written"

    def require(self) -> None:
        """Raise what was found.

        Raises:
            CorruptItem: unless nothing is wrong.
        """
        if not self:
            raise CorruptItem(f"{self}\nRestore these files from a copy, or open another step.")


@anywhere
def verify_item(item: StoredItem) -> Verification:
    """Compare every file of an item with its manifest, reading all of it."""
    try:
        wanted = item.files
    except PdlibError as error:
        return Verification(unverifiable=(str(error),))
    home = item.directory
    present = set(file_sizes(home))
    shared = sorted(wanted.keys() & present)
    found = run_parallel([lambda file=file: _hash(item, file) for file in shared])
    label = f"{home.parent.name}/{home.name}"
    unnamed = item.unnamed() if item.is_as_written() else []
    return Verification(
        missing=tuple(f"{label}/{file}" for file in sorted(wanted.keys() - present)),
        changed=tuple(f"{label}/{file}" for file, entry in zip(shared, found, strict=True) if entry != wanted[file]),
        extra=tuple(f"{label}/{file}" for file in sorted(present - wanted.keys() - {MANIFEST_FILE})),
        unverifiable=tuple(f"{label}/{file} is not in the manifest" for file in unnamed),
    )


def content_digest(item: StoredItem) -> str:
    """BLAKE3 of an item's values: of each leaf's path, dtype, shape and C-order bytes; equal for any shards and layout.

    Raises:
        TornStep: a file is missing or cut short.
    """
    rows = sorted([list(leaf.path), leaf.dtype, list(leaf.shape), leaf_digest(item, leaf)] for leaf in item.leaves)
    return f"blake3:{blake3(json.dumps(rows, separators=(',', ':')).encode()).hexdigest()}"


def leaf_digest(item: StoredItem, leaf: StoredLeaf) -> str:
    """BLAKE3 of one leaf's C-order bytes: from the manifest where one file is the leaf, else by reading it."""
    files = [file for file, _ in leaf.files()]
    if len(files) == 1:
        return item.files[files[0]]["blake3"]
    bring(item, [leaf])
    digest = blake3()
    if leaf.is_empty:
        return digest.hexdigest()
    index = tuple(slice(0, size) for size in leaf.stored_shape)
    if not index:
        return digest.update(as_bytes(map_region(item, leaf, index))).hexdigest()
    row = max(1, prod(leaf.stored_shape) * numpy_dtype(leaf.stored_dtype).itemsize // leaf.stored_shape[0])
    count = max(1, _ROWS // row)
    for start in range(0, leaf.stored_shape[0], count):
        part = map_region(item, leaf, (slice(start, min(start + count, leaf.stored_shape[0])), *index[1:]))
        digest.update(as_bytes(part))
    return digest.hexdigest()


def _hash(item: StoredItem, file: str) -> dict[str, object]:
    path = item.directory / file
    try:
        return hash_remote(path) if is_remote(path) else hash_file(path)
    except OSError:
        return {}
