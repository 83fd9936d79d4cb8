"""Reads items of object stores: the files asked for come here once, each held to its manifest; never writes there.

Leaves are read from a cache on this machine by the same readers as local ones, so all ways give equal bits.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pdlib.errors import CorruptItem
from pdlib.store.places import is_remote, reaching
from pdlib.store.stored import MANIFEST_FILE, StoredItem, StoredLeaf

_PIECE = 16 << 20  # bytes in memory at a time


def cached(item: StoredItem) -> StoredItem:
    """An item whose files are read here: itself, or for an object store one that brings its files on request."""
    if not is_remote(item.directory):
        return item
    from blake3 import blake3

    with reaching(item.directory):
        digest = blake3((item.directory / MANIFEST_FILE).read_bytes()).hexdigest()
    return replace(item, directory=_cache() / digest, origin=item.directory)


def bring(item: StoredItem, leaves: Iterable[StoredLeaf]) -> None:
    """Have the files of these leaves here, in parallel; costs nothing for a local item or a second time.

    Raises:
        CorruptItem: what came is not what the manifest records; lists the files, and keeps none of them.
        Unreachable: the store did not answer.
    """
    if item.origin is None:
        return
    from pdlib.store.memory import run_parallel

    wanted = item.files if item.layout == "ocdbt" else {file for leaf in leaves for file, _ in leaf.files()}
    absent = [file for file in sorted(wanted) if not (item.directory / file).exists()]
    came = run_parallel([lambda file=file: _bring(item, file) for file in absent])
    bad = [file for file, right in zip(absent, came, strict=True) if not right]
    if bad:
        lines = "\n".join(f"changed: {item.origin / file}" for file in bad)
        raise CorruptItem(f"{lines}\nRestore these files from a copy, or open another step.")


def hash_remote(path: Path) -> dict[str, object]:
    """The manifest entry of a file in an object store: `size` and `blake3`; streams it and keeps nothing."""
    from blake3 import blake3

    digest, size = blake3(max_threads=blake3.AUTO), 0
    with reaching(path), path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return {"size": size, "blake3": digest.hexdigest()}


def _bring(item: StoredItem, file: str) -> bool:
    from pdlib.store.files import hash_file

    target, origin = item.directory / file, cast(Any, item.origin) / file
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with reaching(origin):
            origin.fs.get_file(origin.path, str(partial))
        right = hash_file(partial) == item.files[file]
        if right:
            partial.replace(target)
        return right
    finally:
        partial.unlink(missing_ok=True)


def _cache() -> Path:
    import platformdirs

    return Path(os.environ.get("PDLIB_CACHE") or platformdirs.user_cache_path("pdlib")).expanduser().absolute()
