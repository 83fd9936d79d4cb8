"""Reads items of earlier versions as today's contract has them: leaves get their new paths, and no file changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdlib.items.specs import ItemSpec
from pdlib.store.stored import Keys, StoredItem
from pdlib.tree import Skeleton, nest, select


def evolve(item: StoredItem, spec: ItemSpec) -> StoredItem:
    """An item as it would have been described under a later contract; itself where nothing changed.

    Containers that a changed path passes through come as dicts where no template gives them a class.
    """
    moved = [spec.moved(leaf.path, version=item.version) for leaf in item.leaves]
    if all(keys == leaf.path for keys, leaf in zip(moved, item.leaves, strict=True)):
        return item
    kept = [place for place, keys in enumerate(moved) if keys is not None]
    paths = [moved[place] or () for place in kept]
    leaves = tuple(replace(item.leaves[place], path=keys) for place, keys in zip(kept, paths, strict=True))
    return replace(item, leaves=leaves, tree=_merge(item, moved, kept, paths))


def _merge(item: StoredItem, moved: Sequence[Keys | None], kept: Sequence[int], paths: Sequence[Keys]) -> Skeleton:
    """The containers of what stayed where it was, with the rest put beside, each leaf under its new number."""
    number = {old: new for new, old in enumerate(kept)}
    stayed = {place for place in kept if moved[place] == item.leaves[place].path}
    base = select(item.tree, stayed.__contains__)
    fresh = nest({keys: number[place] for place, keys in zip(kept, paths, strict=True) if place not in stayed})
    old = None if base is None else _renumber(base, number)
    return fresh if old is None else _join(old, fresh)


def _renumber(node: Skeleton, number: dict[int, int]) -> Skeleton:
    if "leaf" in node:
        return {"leaf": number[node["leaf"]]}
    return {**node, "children": [_renumber(child, number) for child in node["children"]]}


def _join(one: Skeleton, other: Skeleton) -> Skeleton:
    if "leaf" in one or "leaf" in other or not other["children"]:
        return one
    children: dict[Any, Skeleton] = {str(k): c for k, c in zip(one["keys"], one["children"], strict=True)}
    for key, child in zip(other["keys"], other["children"], strict=True):
        children[key] = _join(children[key], child) if key in children else child
    return {"kind": "dict", "keys": [*children], "children": [*children.values()]}
