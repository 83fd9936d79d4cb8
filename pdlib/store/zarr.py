"""Reads arrays that orbax stored, OCDBT or not, through TensorStore; knows no item, and never writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pdlib.errors import TornStep


def open_array(directory: Path, name: str, *, ocdbt: bool, zarr3: bool = False) -> Any:
    """One stored array as an open `tensorstore.TensorStore`; reads its description, and none of its data.

    Args:
        directory: the item's.
        name: the array's name in it.
        ocdbt: whether the item is one key-value store, or a directory an array.
        zarr3: whether the arrays are zarr v3.

    Raises:
        TornStep: the description is missing or unreadable.
    """
    import tensorstore as ts

    base = {"driver": "file", "path": f"{directory.absolute()}/"}
    store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    if not ocdbt:
        store = {"driver": "file", "path": f"{base['path']}{name}/"}
    spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}
    try:
        return ts.open(spec, open=True, read=True, context=_context()).result()
    except ValueError as error:
        raise _torn(directory, name, error) from error


def read_part(array: Any, index: Sequence[slice], into: np.ndarray, *, directory: Path, name: str) -> None:
    """Read a part of an open array straight into one of the same shape; no second copy of it is made here.

    Raises:
        TornStep: data are missing or unreadable.
    """
    import tensorstore as ts

    try:
        ts.array(into, context=_context()).write(array[tuple(index)]).result()
    except ValueError as error:
        raise _torn(directory, name, error) from error


def _torn(directory: Path, name: str, error: Exception) -> TornStep:
    return TornStep(
        f"{directory}: leaf {name} cannot be read; restore it from a copy, or open an earlier step\n{error}"
    )


@cache
def _context() -> Any:
    """TensorStore without a cache, over mapped files: compressed bytes take no memory, and no array is held back."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_mode": {"mode": "memmap"}})
