"""Orbax's side of an item: its metadata, and OCDBT items, which orbax writes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdlib.store.mapped import numpy_dtype
from pdlib.store.snapshot import ZARR_NAMES, Snapshot
from pdlib.store.stored import StoredLeaf
from pdlib.tree import Skeleton

_SEQUENCE, _MAPPING = 1, 2  # orbax's key types
_EMPTY = {"dict": "Dict", "list": "List", "tuple": "Tuple", "none": "None", "namedtuple": "None", "object": "None"}


def zarray(leaf: StoredLeaf) -> bytes:
    """The `.zarray` of a raw leaf: zarr v2, C order, no compression, no filter, no fill value."""
    record = {
        "zarr_format": 2,
        "shape": leaf.stored_shape,
        "chunks": leaf.chunks,
        "dtype": ZARR_NAMES[leaf.stored_dtype],
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": "C",
        "dimension_separator": ".",
    }
    return json.dumps(record).encode()


def tree_metadata(tree: Skeleton, leaves: Sequence[StoredLeaf], *, ocdbt: bool) -> bytes:
    """Orbax's `_METADATA` of an item.

    Every leaf is declared a NumPy array, so that stock orbax restores it without a template on any machine; with a
    template it restores JAX arrays as the template says. Leaves without elements, which orbax refuses, read as None.
    """
    entries: dict[str, Any] = {}

    def visit(node: Skeleton, keys: list[tuple[str, int]]) -> None:
        if "leaf" in node:
            empty = leaves[node["leaf"]].is_empty
            add(keys, {"value_type": "None" if empty else "np.ndarray", "skip_deserialize": empty})
            return
        if not node["children"] and keys:
            add(keys, {"value_type": _EMPTY[node["kind"]], "skip_deserialize": True})
        kind = _SEQUENCE if node["kind"] in ("list", "tuple") else _MAPPING
        for key, child in zip(node["keys"], node["children"], strict=True):
            visit(child, [*keys, (str(key), kind)])

    def add(keys: list[tuple[str, int]], value: dict[str, Any]) -> None:
        entries[str(tuple(key for key, _ in keys))] = {
            "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys],
            "value_metadata": value,
        }

    visit(tree if "leaf" not in tree else {"kind": "dict", "keys": ["value"], "children": [tree]}, [])
    record = {
        "tree_metadata": entries,
        "use_ocdbt": ocdbt,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(record).encode()


def step_metadata(started: float) -> bytes:
    """Orbax's `_CHECKPOINT_METADATA` of a step, pinning no handler; `started` in seconds since the epoch."""
    record = {
        "item_handlers": {},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": int(started * 1e9),
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    return json.dumps(record).encode()


def for_orbax(
    snapshots: Sequence[Snapshot], arrays: Sequence[Any], *, own: bool
) -> tuple[list[Snapshot], dict[str, Any]]:
    """Leaves for an OCDBT item: their records without files, and by stored name the arrays that orbax writes.

    Args:
        snapshots: of the leaves.
        arrays: the leaves themselves, in the same order.
        own: copy what may be donated or edited before it is written.
    """
    given: dict[str, Any] = {}
    for (leaf, _), array in zip(snapshots, arrays, strict=True):
        if leaf.is_empty:
            continue
        data = jax.random.key_data(array) if leaf.key_impl else array
        if not leaf.key_impl and leaf.stored_dtype != leaf.dtype:
            # Unsigned integers of less than a byte keep their value in a byte; shards stay where they are.
            data = data.astype("uint8") if isinstance(data, jax.Array) else data.view("uint8")
        if not isinstance(data, jax.Array):
            data = np.array(data, dtype=numpy_dtype(leaf.stored_dtype))
        given[leaf.name] = jnp.copy(data) if own and isinstance(data, jax.Array) else data
    bare = [Snapshot(replace(one.leaf, chunks=None), []) for one in snapshots]
    return bare, given


def write_ocdbt(directory: Path, arrays: dict[str, Any]) -> None:
    """Write leaves by stored name as an OCDBT item, through orbax, from every process; its metadata is ours to replace.

    Args:
        directory: to be made.
        arrays: stored name → array of JAX or NumPy with at least one element.
    """
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda leaf: ocp.SaveArgs(dtype=leaf.dtype), arrays)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(arrays, save_args=args))
