"""Rewrites an item as one file a leaf, so that all of it opens by mapping; compares every bit; touches no original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdlib.errors import CorruptItem
from pdlib.store.digest import leaf_digest, verify_item
from pdlib.store.files import flush_tree, hash_file
from pdlib.store.mapped import read_leaves
from pdlib.store.memory import as_bytes
from pdlib.store.orbax_format import zarray
from pdlib.store.seal import Entries, seal_item, write_entry
from pdlib.store.stored import StoredItem, StoredLeaf, chunk_file


def one_file_a_leaf(item: StoredItem, home: Path) -> None:
    """Write a twin of an item in the raw layout with one file a leaf; a leaf at a time is in memory.

    Args:
        item: the original, in any layout.
        home: the directory of the twin, to be made.

    Raises:
        CorruptItem: the original is not what its manifest records, or the twin differs from it; says where.
        OSError: a file could not be written.
    """
    verify_item(item).require()
    entries: Entries = {}
    home.mkdir(parents=True)
    leaves = [replace(leaf, chunks=leaf.stored_shape) for leaf in item.leaves]
    for old, new in zip(item.leaves, leaves, strict=True):
        if new.is_empty:
            continue
        (array,) = read_leaves(item, [old])
        write_entry(home, chunk_file(new.name, (0,) * len(new.stored_shape)), as_bytes(array), entries)
        write_entry(home, f"{new.name}/.zarray", zarray(new), entries)
        del array
    seal_item(home, item, item.tree, leaves, layout="raw", entries=entries)
    _compare(item, home, leaves)
    flush_tree(home)


def _compare(item: StoredItem, home: Path, leaves: Sequence[StoredLeaf]) -> None:
    """Hold every file that was written, as it reads now, to the values of the original, read once more."""
    for old, new in zip(item.leaves, leaves, strict=True):
        for file, _ in new.files():
            if hash_file(home / file)["blake3"] != leaf_digest(item, old):
                raise CorruptItem(
                    f"{item.directory}: leaf {old.name} reads differently a second time; nothing was changed\n"
                    "Check the disk, and restore the step from a copy."
                )
