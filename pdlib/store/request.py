"""Holds what is asked of an item against what is stored of it, both ways; reads no array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from pdlib.errors import SpecMismatch
from pdlib.items.binding import describe
from pdlib.items.registry import Registry
from pdlib.store.stored import StoredItem, StoredLeaf
from pdlib.tree import key_text, show


class Wanted(NamedTuple):
    """A request that fits: for each leaf wanted the stored one (None: absent, optional) and its sharding."""

    leaves: list[StoredLeaf | None]
    shardings: list[Any]
    treedef: Any


def match_request(registry: Registry, stored: StoredItem, template: Any, *, step: int) -> Wanted:
    """Match an abstract tree with a stored item, leaf by leaf.

    Raises:
        SpecMismatch: leaves are missing, unexpected, or differ in shape or dtype; lists all of them.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(template)
    result = Wanted([], [], treedef)
    problems: list[str] = []
    asked: set[tuple[str, ...]] = set()
    for path, leaf in pairs:
        keys = tuple(map(key_text, path))
        asked.add(keys)
        found = stored.by_path.get(keys)
        if found is None and not _optional(registry, stored.name, keys):
            problems.append(f"{show(keys)}  is asked for, but not stored")
        if found is not None:
            problems += _differences(stored, found, leaf)
        result.leaves.append(found)
        result.shardings.append(_sharding(leaf))
    problems += [f"{show(leaf.path)}  is stored, but not asked for" for leaf in stored.leaves if leaf.path not in asked]
    if problems:
        raise SpecMismatch(
            f"restore of {stored.name} v{stored.version}, step {step}: {len(problems)} leaves differ from the stored",
            problems,
            hint="Ask for what is stored (Manager.describe lists it), or restore_to_host, which needs no template.",
        )
    return result


def check_width(stored: StoredItem, leaves: Iterable[StoredLeaf], *, step: int) -> None:
    """Refuse leaves whose 64 bits JAX would cut to 32.

    Raises:
        SpecMismatch: lists them.
    """
    problems = [_narrowed(leaf) for leaf in leaves if _would_lose_bits(leaf)]
    if problems:
        raise SpecMismatch(
            f"open of {stored.name} v{stored.version}, step {step}: {len(problems)} leaves do not fit JAX as it is set",
            problems,
            hint="Set jax_enable_x64, or use restore_to_host.",
        )


def _narrowed(leaf: StoredLeaf) -> str:
    return f"{show(leaf.path)}  dtype {leaf.dtype} needs jax_enable_x64; restore_to_host keeps all its bits"


def _differences(stored: StoredItem, found: StoredLeaf, leaf: Any) -> list[str]:
    want = describe(stored.name, found.path, leaf)
    lines: list[str] = []
    if want.shape != found.shape:
        lines.append(f"{show(found.path)}  shape {found.shape} stored, {want.shape} asked for")
    if want.dtype != found.dtype:
        lines.append(f"{show(found.path)}  dtype {found.dtype} stored, {want.dtype} asked for")
    elif _would_lose_bits(found):
        lines.append(_narrowed(found))
    return lines


def _would_lose_bits(leaf: StoredLeaf) -> bool:
    if leaf.python or leaf.dtype not in ("int64", "uint64", "float64", "complex128"):
        return False
    return jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype)) != np.dtype(leaf.dtype)


def _optional(registry: Registry, item: str, keys: tuple[str, ...]) -> bool:
    return any(match.row.optional for match in registry.matches(item, keys)[:1])


def _sharding(leaf: Any) -> Any:
    layout = getattr(leaf, "format", None)
    if layout is not None and getattr(layout, "layout", None) is not None and isinstance(leaf, jax.ShapeDtypeStruct):
        return layout
    return getattr(leaf, "sharding", None)
