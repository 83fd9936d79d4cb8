"""Writes assembled leaves as files, reading and writing at the same time within a bound of memory; knows no layout."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from pdlib.errors import CorruptItem
from pdlib.store.assemble import Assembly, read_assembly, read_whole
from pdlib.store.files import holds
from pdlib.store.memory import aligned_empty, as_bytes, run_parallel
from pdlib.store.orbax_format import zarray
from pdlib.store.seal import Entries, write_entry
from pdlib.store.stored import StoredLeaf, chunk_file

_SLACK = 128 << 20  # bytes in flight besides two of the largest leaves

Unit = list[tuple[Assembly, StoredLeaf]]


def transcribe(leaves: Sequence[Assembly], records: Sequence[StoredLeaf], home: Path, *, twice: bool) -> Entries:
    """Write leaves as one file each, and hold each file, as it reads then, to the values that were read.

    At any time, no more is in memory than two of the largest leaves and a little more.

    Args:
        leaves: what to write.
        records: how each is described, in the same order.
        home: the item, which is there.
        twice: read the source a second time too, and compare.

    Returns:
        the files' entries for the manifest.

    Raises:
        CorruptItem: a leaf reads differently a second time, or was not written as it was read.
        TornStep: a leaf of the source cannot be read.
    """
    entries: Entries = {}
    units = _units(leaves, records)
    budget = _Budget(2 * max((leaf.nbytes for leaf in leaves), default=0) + _SLACK)
    run_parallel([partial(_write_unit, unit, home, entries, budget, twice) for unit in units])
    return entries


class _Budget:
    """Bytes that may be in memory at once; one that needs more than all of them runs alone."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.free = limit, 0, threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Generator[None]:
        with self.free:
            self.free.wait_for(lambda: self.used == 0 or self.used + nbytes <= self.limit)
            self.used += nbytes
        try:
            yield
        finally:
            with self.free:
                self.used -= nbytes
                self.free.notify_all()


def _units(leaves: Sequence[Assembly], records: Sequence[StoredLeaf]) -> list[Unit]:
    """Leaves that are written together: parts of one stored array, which is then read once; the largest first."""
    units: dict[object, Unit] = {}
    for leaf, record in zip(leaves, records, strict=True):
        key = leaf.parts[0].text if leaf.is_part else leaf.keys
        units.setdefault(key, []).append((leaf, record))
    return sorted(units.values(), key=lambda unit: -max(leaf.nbytes for leaf, _ in unit))


def _write_unit(unit: Unit, home: Path, entries: Entries, budget: _Budget, twice: bool) -> None:
    first = unit[0][0]
    shared = first.parts[0].leaf.nbytes if first.is_part else 0
    with budget.hold(shared + max(leaf.nbytes for leaf, _ in unit) + max(part.chunk_bytes for part in first.parts)):
        whole = read_whole(first.parts[0]) if first.is_part else None
        for leaf, record in unit:
            _write(leaf, record, whole, home, entries)
        if twice:
            whole = read_whole(first.parts[0]) if first.is_part else None
            for leaf, record in unit:
                _compare(leaf, record, _values(leaf, whole), home)


def _values(leaf: Assembly, whole: np.ndarray | None) -> np.ndarray:
    array = aligned_empty(leaf.shape, leaf.dtype)
    if whole is None:
        read_assembly(leaf, array)
    else:
        array.reshape(leaf.parts[0].shape)[...] = whole[leaf.parts[0].index]
    return array


def _write(leaf: Assembly, record: StoredLeaf, whole: np.ndarray | None, home: Path, entries: Entries) -> None:
    values = _values(leaf, whole)
    write_entry(home, _file(record), as_bytes(values), entries)
    write_entry(home, f"{record.name}/.zarray", zarray(record), entries)
    _compare(leaf, record, values, home)


def _compare(leaf: Assembly, record: StoredLeaf, values: np.ndarray, home: Path) -> None:
    if not holds(home / _file(record), as_bytes(values)):
        raise CorruptItem(f"{home.name}: {'/'.join(leaf.keys)} is not what was read; check the disk, and try again")


def _file(record: StoredLeaf) -> str:
    return chunk_file(record.name, (0,) * len(record.stored_shape))
