"""Memory that is ours and the few threads that fill it: page-aligned arrays, tasks, copies; knows no file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

THREADS = min(8, 2 * (os.cpu_count() or 1))
WRITERS = 8  # most of a writer's time is waiting for the disk to have it
PIECE = 64 << 20  # bytes one task moves: large enough to stream, small enough to share a leaf among threads
_ALIGN = 4096


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-order array that begins on a page, as JAX wants for taking it without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGN, np.uint8)
    start = -buffer.ctypes.data % _ALIGN
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-order array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def run_parallel(tasks: Iterable[Callable[[], Any]], *, threads: int = THREADS) -> list[Any]:
    """Run tasks on a few threads; the first failure is raised after the others have ended."""
    tasks = list(tasks)
    if len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
        return list(pool.map(lambda task: task(), tasks))


def copies(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Flat arrays of bytes in memory of their own, all copied in one parallel sweep."""
    owned = [aligned_empty(array.shape, array.dtype) for array in arrays]
    pieces = [
        (new[start : start + PIECE], old[start : start + PIECE])
        for new, old in zip(owned, arrays, strict=True)
        for start in range(0, old.size, PIECE)
    ]
    run_parallel([lambda new=new, old=old: np.copyto(new, old) for new, old in pieces])
    return owned
