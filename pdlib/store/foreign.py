"""Reads orbax items that pdlib did not write: which leaves there are, and parts of them; never writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pdlib.errors import ForeignLayout, NoCheckpoint, TornStep

Keys = tuple[str, ...]
METADATA_FILE = "_METADATA"


@dataclass(frozen=True)
class ForeignLeaf:
    """One leaf of an orbax item, opened.

    Attributes:
        keys: where it is in the tree.
        shape: of the array.
        dtype: of the array, those of ml_dtypes included.
        handle: the open `tensorstore.TensorStore`.
    """

    keys: Keys
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    handle: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class ForeignItem:
    """An orbax item by its `_METADATA` alone.

    Attributes:
        directory: where it is.
        ocdbt, zarr3: how its leaves are stored.
        leaves: the keys of each leaf that has data; containers and leaves that orbax skips are not among them.
    """

    directory: Path
    ocdbt: bool
    zarr3: bool
    leaves: tuple[Keys, ...]

    @property
    def name(self) -> str:
        """The item's name in its step."""
        return self.directory.name


def read_foreign(directory: Path) -> ForeignItem:
    """Read what an orbax item says of itself.

    Raises:
        NoCheckpoint: there is no such directory.
        ForeignLayout: it is no orbax item of arrays.
        TornStep: its `_METADATA` is unreadable.
    """
    path = directory / METADATA_FILE
    if not directory.is_dir():
        raise NoCheckpoint(f"{directory} is not there; check the path")
    try:
        record = json.loads(path.read_bytes())
        entries = record["tree_metadata"].values()
        held = [entry for entry in entries if not entry["value_metadata"]["skip_deserialize"]]
        keys = tuple(tuple(str(key["key"]) for key in entry["key_metadata"]) for entry in held)
        return ForeignItem(directory, bool(record["use_ocdbt"]), bool(record.get("use_zarr3")), keys)
    except FileNotFoundError as error:
        raise ForeignLayout(
            f"{directory} is neither pdlib's nor an orbax item: it has no {METADATA_FILE}\n"
            "Open it with the program that wrote it."
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TornStep(f"{path} is unreadable ({error!r}); restore it from a copy, or take another step") from error


def open_leaf(item: ForeignItem, keys: Keys) -> ForeignLeaf:
    """Open one leaf; reads its shape and dtype, and none of its data.

    Raises:
        TornStep: its description is missing or unreadable.
    """
    import tensorstore as ts

    base = {"driver": "file", "path": f"{item.directory.absolute()}/"}
    name = f"{'.'.join(keys)}/"
    store = {"driver": "ocdbt", "base": base, "path": name} if item.ocdbt else {**base, "path": base["path"] + name}
    spec = {"driver": "zarr3" if item.zarr3 else "zarr", "kvstore": store}
    try:
        handle = ts.open(spec, open=True, read=True, context=context()).result()
    except ValueError as error:
        raise _torn(item.directory, keys, error) from error
    return ForeignLeaf(keys, tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype), handle)


def read_into(leaf: ForeignLeaf, index: Sequence[slice], into: np.ndarray, *, where: Path) -> None:
    """Read a part of a leaf straight into an array of the same shape; no second copy of it is made here.

    Raises:
        TornStep: the data are missing or unreadable.
    """
    import tensorstore as ts

    try:
        ts.array(into, context=context()).write(leaf.handle[tuple(index)]).result()
    except ValueError as error:
        raise _torn(where, leaf.keys, error) from error


def _torn(where: Path, keys: Keys, error: Exception) -> TornStep:
    name = "/".join(keys)
    return TornStep(f"{where}: leaf {name} cannot be read; restore it from a copy, or take another step\n{error}")


@cache
def context() -> Any:
    """TensorStore without a cache: what is read is read once, and memory holds nothing of it afterwards."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})
