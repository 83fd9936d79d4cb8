"""Finishes staged items: the descriptions and manifest that make one readable; the only code that writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pdlib.errors import PdlibError
from pdlib.store import orbax_format
from pdlib.store.files import flush_tree, write_file
from pdlib.store.stored import FORMAT, ITEM_FILE, MANIFEST_FILE, StoredLeaf, read_item
from pdlib.tree import Skeleton

Entries = dict[str, dict[str, Any]]


class Contract(Protocol):
    """What an item says of the contract that it was written under: an `ItemSpec`, or a `StoredItem` already written."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> Any: ...


def write_entry(home: Path, file: str, data: bytes | memoryview, entries: Entries) -> None:
    """Write one file of an item and note it for the manifest."""
    entries[file] = write_file(home / file, data)


def seal_item(
    home: Path, contract: Contract, tree: Skeleton, leaves: Sequence[StoredLeaf], *, layout: str, entries: Entries
) -> None:
    """Describe an item whose leaves are written, and read it back as a reader will, while it can still be refused.

    Args:
        home: the staged item.
        contract: under which its leaves were written.
        tree: its containers.
        leaves: in the order of `tree`.
        layout: `raw` or `ocdbt`.
        entries: the manifest so far; grows.

    Raises:
        OSError: a file could not be written, or what was written does not read back.
    """
    write_entry(home, "_METADATA", orbax_format.tree_metadata(tree, leaves, ocdbt=layout == "ocdbt"), entries)
    record = {
        "format": FORMAT,
        "item": contract.name,
        "role": contract.role,
        "version": contract.version,
        "digest": contract.digest,
        "layout": layout,
        "tree": tree,
        "leaves": [leaf.as_dict() for leaf in leaves],
    }
    write_entry(home, ITEM_FILE, json.dumps(record).encode(), entries)
    manifest = {"algorithm": "blake3", "files": dict(sorted(entries.items()))}
    write_file(home / MANIFEST_FILE, json.dumps(manifest).encode())
    try:
        read_item(home).check_whole()
    except PdlibError as error:
        raise OSError(f"what was written does not read back: {error}") from error


def seal_step(staging: Path, started: float) -> None:
    """Write what orbax wants of a step, and flush every name in it; `started` in seconds since the epoch."""
    write_file(staging / "_CHECKPOINT_METADATA", orbax_format.step_metadata(started))
    flush_tree(staging)
