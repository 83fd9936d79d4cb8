"""Reads safetensors files as bytes, mapped, whatever their dtypes; writes nothing, and trusts no header."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors

from pdlib.errors import CorruptItem

# The dtypes that safetensors has a name for (its format page); the others go as their bytes, with one axis more.
NAMED = frozenset({
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
})  # fmt: skip


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """The bytes of each tensor of a file, read-only and mapped, `uint8 [bytes]`.

    The format is the length of a header, the header (JSON with the place of each tensor) and the data; safetensors
    itself says first whether it is whole.

    Raises:
        CorruptItem: the file is no whole safetensors file.
    """
    try:
        with safetensors.safe_open(path, framework="np") as checked:
            names = set(checked.keys())
    except safetensors.SafetensorError as error:
        raise CorruptItem(f"{path} is no whole safetensors file ({error}); get the export anew") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)[8 + length :]
    return {name: data[slice(*header[name]["data_offsets"])] for name in names}
