"""Reads leaves: by read-only mapping where a file is the array, by parallel reads otherwise; never writes.

A raw leaf in one file is a C-order array on disk. Mapping it costs microseconds whatever its size, and JAX on CPU takes
a page-aligned mapping without a copy. A leaf in several files is read in parallel straight into one owned array.
OCDBT leaves are read through TensorStore. All ways give equal bits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pdlib.errors import TornStep
from pdlib.store.memory import PIECE, aligned_empty, as_bytes, run_parallel
from pdlib.store.stored import StoredItem, StoredLeaf

Index = tuple[slice, ...]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a stored dtype name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def map_leaf(item: StoredItem, leaf: StoredLeaf) -> np.ndarray:
    """A leaf as a read-only array: mapped if it is one raw file, read into an owned array otherwise.

    Raises:
        TornStep: a file is missing or too short.
    """
    return map_region(item, leaf, tuple(slice(0, size) for size in leaf.stored_shape))


def map_region(item: StoredItem, leaf: StoredLeaf, index: Index) -> np.ndarray:
    """A part of a leaf, read-only: a view of the mapping if one file holds all of it, owned otherwise."""
    parts = _overlaps(leaf, index)
    if len(parts) == 1:
        file, inside, _ = parts[0]
        view = _view(leaf, _map(item, leaf, file)[(*inside, ...)])
        view.flags.writeable = False
        return view
    region = read_region(item, leaf, index)
    region.flags.writeable = False
    return region


def read_region(item: StoredItem, leaf: StoredLeaf, index: Index) -> np.ndarray:
    """A part of a leaf as an owned, writable, page-aligned array, read in parallel."""
    region = aligned_empty(tuple(s.stop - s.start for s in index), numpy_dtype(leaf.stored_dtype))
    run_parallel(_read_tasks(item, leaf, index, region))
    return _view(leaf, region)


def read_leaves(item: StoredItem, leaves: Sequence[StoredLeaf]) -> list[np.ndarray]:
    """Whole leaves as owned, writable arrays, all of their files read in one parallel sweep."""
    arrays = [aligned_empty(leaf.stored_shape, numpy_dtype(leaf.stored_dtype)) for leaf in leaves]
    whole = [tuple(slice(0, size) for size in leaf.stored_shape) for leaf in leaves]
    tasks = [
        t
        for leaf, array, index in zip(leaves, arrays, whole, strict=True)
        for t in _read_tasks(item, leaf, index, array)
    ]
    run_parallel(tasks)
    return [_view(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)]


def _overlaps(leaf: StoredLeaf, index: Index) -> list[tuple[str, Index, Index]]:
    """The files that hold a part of a region: file, the part inside the file, the part of the region."""
    result: list[tuple[str, Index, Index]] = []
    for file, extent in leaf.files():
        inside: list[slice] = []
        target: list[slice] = []
        for want, have in zip(index, extent, strict=True):
            start, stop = max(want.start, have.start), min(want.stop, have.stop)
            inside.append(slice(start - have.start, stop - have.start))
            target.append(slice(start - want.start, stop - want.start))
        if all(s.stop > s.start for s in inside):
            result.append((file, tuple(inside), tuple(target)))
    return result


def _read_tasks(item: StoredItem, leaf: StoredLeaf, index: Index, region: np.ndarray) -> Iterable[Callable[[], None]]:
    if leaf.chunks is None and region.size:
        yield _stored_reader(item, leaf, index, region)
    for file, inside, target in _overlaps(leaf, index):
        part = region[(*target, ...)]
        whole = all(s.start == 0 and s.stop == n for s, n in zip(inside, leaf.chunks or (), strict=True))
        if whole and part.flags.c_contiguous:
            data = as_bytes(part)
            for start in range(0, len(data), PIECE):
                yield _reader(item.directory / file, start, data[start : start + PIECE])
        else:
            yield _copier(item, leaf, file, inside, part)


def _reader(path: Path, start: int, into: memoryview) -> Callable[[], None]:
    def read() -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TornStep(f"{path} cannot be read ({error.strerror}); open an earlier step") from error
        try:
            done = 0
            while done < len(into):
                count = os.preadv(handle, [into[done:]], start + done)
                if count == 0:
                    raise TornStep(
                        f"{path} ends after {start + done} bytes; restore it from a copy, or open an earlier step"
                    )
                done += count
        finally:
            os.close(handle)

    return read


def _copier(item: StoredItem, leaf: StoredLeaf, file: str, inside: Index, part: np.ndarray) -> Callable[[], None]:
    def copy() -> None:
        np.copyto(part, _map(item, leaf, file)[(*inside, ...)])

    return copy


def _stored_reader(item: StoredItem, leaf: StoredLeaf, index: Index, region: np.ndarray) -> Callable[[], None]:
    def read() -> None:
        from pdlib.store.zarr import open_array, read_part

        array = open_array(item.directory, leaf.name, ocdbt=True)
        read_part(array, index, region, directory=item.directory, name=leaf.name)

    return read


def _map(item: StoredItem, leaf: StoredLeaf, file: str) -> np.ndarray:
    path = item.directory / file
    dtype, shape = numpy_dtype(leaf.stored_dtype), leaf.chunks or ()
    want = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            have = os.fstat(handle).st_size
            if have != want:
                raise TornStep(f"{path} has {have} bytes, want {want}; open an earlier step")
            mapping = mmap.mmap(handle, want, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
    except OSError as error:
        raise TornStep(f"{path} cannot be read ({error.strerror}); open an earlier step") from error
    return np.frombuffer(mapping, np.uint8).view(dtype).reshape(shape)


def _view(leaf: StoredLeaf, array: np.ndarray) -> np.ndarray:
    """Stored bytes under the dtype that the user saved; key data stays what it is."""
    if leaf.key_impl is not None or leaf.dtype == leaf.stored_dtype:
        return array
    return array.view(numpy_dtype(leaf.dtype))
