"""Takes the bytes of a tree's leaves at one moment, shard by shard as they lie on this process; writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.core import Tracer

from pdlib.errors import UnstorableLeaf
from pdlib.items.binding import describe, is_key
from pdlib.store.memory import copies
from pdlib.store.stored import StoredLeaf, chunk_file
from pdlib.tree import Keys, flatten, show

# The dtypes that zarr, and so stock orbax, has a name for. Any other of one byte is kept as uint8.
_ML = ("bfloat16", "int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn",
       "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")  # fmt: skip
ZARR_NAMES = {name: name for name in _ML} | {
    np.dtype(name).name: np.dtype(name).newbyteorder("<").str
    for name in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}


class Snapshot(NamedTuple):
    """One leaf at the moment of a save: what to record of it, and those of its files that this process writes."""

    leaf: StoredLeaf
    files: list[tuple[str, np.ndarray]]


def refuse_tracers(items: Mapping[str, Any]) -> None:
    """Refuse trees of a function that JAX is tracing.

    Raises:
        UnstorableLeaf: names the first traced leaf.
    """
    for item, tree in items.items():
        flat = flatten(tree)
        for keys, leaf in zip(flat.paths, flat.leaves, strict=True):
            if isinstance(leaf, Tracer):
                raise UnstorableLeaf(f"{item}:{show(keys)} is traced; call save outside jit, on what it returned")


def snapshot(item: str, keys: Keys, name: str, leaf: Any) -> Snapshot:
    """Look at one leaf: its files are views of its own memory wherever it lies on the host; see `owned`.

    Args:
        item: for error messages.
        keys: where the leaf is.
        name: its stored name.
        leaf: an array of JAX or NumPy, a typed PRNG key array, or a Python number.

    Raises:
        UnstorableLeaf: the leaf has no bit-exact form on disk.
    """
    seen = describe(item, keys, leaf)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise UnstorableLeaf(f"{item}:{show(keys)} was donated or deleted; save before the step that takes it over")
    python = type(leaf).__name__ if type(leaf) in (bool, int, float) else None
    if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        raise UnstorableLeaf(f"{item}:{show(keys)} is abstract; save takes arrays, not their shapes")
    if not isinstance(leaf, jax.Array):
        leaf = _plain(item, keys, leaf)
    dtype = np.dtype(leaf.dtype)
    stored = dtype.name if dtype.name in ZARR_NAMES else "uint8"
    if dtype.name not in ZARR_NAMES and not hasattr(ml_dtypes, dtype.name):
        raise UnstorableLeaf(
            f"{item}:{show(keys)} has dtype {dtype}, which has no bit-exact form on disk; convert it first"
        )
    chunks, parts = _parts(leaf)
    files = [(chunk_file(name, place), _bytes_of(part)) for place, part in parts]
    record = StoredLeaf(keys, name, seen.shape, seen.dtype, tuple(leaf.shape), stored, chunks, python)
    return Snapshot(record, files)


def owned(leaves: Sequence[Snapshot]) -> list[Snapshot]:
    """The same leaves in memory of their own, so that what they were taken from may be donated or edited at once."""
    fresh = iter(copies([data for _, files in leaves for _, data in files]))
    return [Snapshot(leaf, [(file, next(fresh)) for file, _ in files]) for leaf, files in leaves]


def _plain(item: str, keys: Keys, leaf: Any) -> np.ndarray:
    try:
        array = np.asarray(leaf, dtype=np.int64 if type(leaf) is int else None)
    except OverflowError as error:
        raise UnstorableLeaf(
            f"{item}:{show(keys)} is {leaf}, which 64 bits cannot hold; store it as an array"
        ) from error
    return array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array


def _parts(leaf: Any) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Any]]]:
    """The shape of a leaf's files, and those that this process holds: their place in the grid and their data."""
    if 0 in leaf.shape:
        return tuple(leaf.shape), []
    if not isinstance(leaf, jax.Array):
        return leaf.shape, [((0,) * leaf.ndim, leaf)] if jax.process_index() == 0 else []
    shape = leaf.sharding.shard_shape(leaf.shape)
    if not _is_grid(leaf, shape):
        return tuple(leaf.shape), [((0,) * leaf.ndim, np.asarray(leaf))] if jax.process_index() == 0 else []
    return shape, [
        (tuple((s.start or 0) // n for s, n in zip(shard.index, shape, strict=True)), shard.data)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _is_grid(leaf: jax.Array, shape: Sequence[int]) -> bool:
    if any(size % part for size, part in zip(leaf.shape, shape, strict=True)):
        return False
    return all((s.start or 0) % n == 0 for d in leaf.addressable_shards for s, n in zip(d.index, shape, strict=True))


def _bytes_of(data: Any) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
