"""Reads orbax items that pdlib did not write: which leaves there are, and parts of them; never writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdlib.errors import ForeignLayout, NoCheckpoint, TornStep
from pdlib.store.zarr import open_array, read_part

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
    handle = open_array(item.directory, ".".join(keys), ocdbt=item.ocdbt, zarr3=item.zarr3)
    return ForeignLeaf(keys, tuple(handle.shape), np.dtype(handle.dtype.numpy_dtype), handle)


def read_into(item: ForeignItem, leaf: ForeignLeaf, index: Sequence[slice], into: np.ndarray) -> None:
    """Read a part of a leaf straight into an array of the same shape.

    Raises:
        TornStep: its data are missing or unreadable.
    """
    read_part(leaf.handle, index, into, directory=item.directory, name=".".join(leaf.keys))
