"""Puts leaves of today together from parts of older ones: squeezed, stacked, divided; holds no array itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdlib.errors import ForeignLayout
from pdlib.items.binding import Leaf
from pdlib.items.layouts import Found
from pdlib.store.foreign import ForeignItem, ForeignLeaf, Keys, open_leaf, read_into
from pdlib.store.recognise import Recognised

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """A region of a stored leaf: a new leaf, or one of several that are stacked to it."""

    item: ForeignItem
    leaf: ForeignLeaf
    index: Index

    @property
    def text(self) -> str:
        """The stored leaf, for people."""
        return "/".join((self.item.name, *self.leaf.keys))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the region."""
        return tuple(part.stop - part.start for part in self.index)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of the stored leaf as it is decoded, before any of it is in place."""
        return math.prod(self.leaf.handle.chunk_layout.read_chunk.shape or ()) * self.leaf.dtype.itemsize


@dataclass(frozen=True)
class Assembly:
    """One leaf of today's item, and the parts that it is made of."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_part(self) -> bool:
        """Whether it is a region of one stored leaf, and not all of it."""
        return len(self.parts) == 1 and self.parts[0].shape != self.parts[0].leaf.shape

    def as_leaf(self) -> Leaf:
        """The leaf as contracts see it."""
        return Leaf(self.keys, self.shape, self.dtype.name, self.nbytes)


def read_whole(part: Part) -> np.ndarray:
    """The stored leaf that a part is of, all of it."""
    array = np.empty(part.leaf.shape, part.leaf.dtype)
    read_into(part.item, part.leaf, tuple(slice(0, n) for n in part.leaf.shape), array)
    return array


def read_assembly(leaf: Assembly, into: np.ndarray) -> None:
    """Fill an array of the leaf's shape from its parts, without another copy of any."""
    targets = into.reshape(len(leaf.parts), *leaf.parts[0].shape)  # axes of size one come and go without a copy
    for place, part in enumerate(leaf.parts):
        target = targets[place : place + 1].reshape(part.shape)  # a view for leaves without dimensions too
        read_into(part.item, part.leaf, part.index, target)


def assemble(step: Recognised) -> dict[str, tuple[Assembly, ...]]:
    """The leaves of today's items that a recognised step gives, sorted by path.

    Raises:
        ForeignLayout: parts do not fit together: sites without factors, a stack with a gap, unequal shapes.
        TornStep: a stored leaf cannot be opened.
    """
    opened = {keys: open_leaf(step.items[keys[0]], keys[1:]) for keys, f in step.found.items() if f.target is not None}
    groups: dict[Keys, list[tuple[int, Part, Found]]] = {}
    widths = _components(step, opened)
    for keys, found in step.found.items():
        if found.target is None:
            continue
        item, leaf = step.items[keys[0]], opened[keys]
        order = int(found.captures[found.rule.stack][0]) if found.rule.stack else 0
        for target, index in _places(step, found.target, found, leaf, widths):
            groups.setdefault(target, []).append((order, Part(item, leaf, index), found))
    items: dict[str, list[Assembly]] = {}
    for target, members in sorted(groups.items()):
        items.setdefault(target[0], []).append(_assembly(step, target, sorted(members, key=lambda m: m[0])))
    return {name: tuple(leaves) for name, leaves in sorted(items.items())}


def _components(step: Recognised, opened: Mapping[Keys, ForeignLeaf]) -> dict[str, int]:
    """C of each site that the step stores: the last axis of its V."""
    return {
        found.target[2]: opened[keys].shape[-1]
        for keys, found in step.found.items()
        if found.target is not None and found.target[1] == "components" and found.target[-1] == "V"
    }


def _places(
    step: Recognised, target: Keys, found: Found, leaf: ForeignLeaf, widths: Mapping[str, int]
) -> list[tuple[Keys, Index]]:
    whole = tuple(slice(0, n) for n in leaf.shape)
    if found.rule.split is None:
        return [(target, whole)]
    sites = step.layout.sites
    if set(sites) != set(widths) or sum(widths.values()) != leaf.shape[-1]:
        raise ForeignLayout(
            f"{step.home}: {'/'.join(leaf.keys)} of width {leaf.shape[-1]} is divided among {', '.join(sites)}, "
            f"the step has {', '.join(f'{site} (C={width})' for site, width in widths.items())}\n"
            f"Copy {step.layout.path.name}, name these sites in their order, and pass it with --layout FILE."
        )
    mark, start, places = f"{{{found.rule.split}}}", 0, []
    for site in sites:
        index = (*whole[:-1], slice(start, start + widths[site]))
        places.append((tuple(key.replace(mark, site) for key in target), index))
        start += widths[site]
    return places


def _assembly(step: Recognised, target: Keys, members: list[tuple[int, Part, Found]]) -> Assembly:
    rule, first = members[0][2].rule, members[0][1]
    kept = [n for axis, n in enumerate(first.shape) if axis not in rule.squeeze]
    bad = [axis for axis in rule.squeeze if axis >= len(first.shape) or first.shape[axis] != 1]
    orders = [order for order, _, _ in members]
    if bad or any(p.shape != first.shape for _, p, _ in members) or orders != list(range(len(orders))):
        why = f"axis {bad[0]} is not of size one" if bad else "the leaves that it is made of do not fit together"
        shown = ", ".join(f"{part.text} {part.shape}" for _, part, _ in members[:4])
        raise ForeignLayout(f"{step.home}: {'/'.join(target)}: {why}: {shown}; correct the layout file")
    stacked = [len(members)] if rule.stack else []
    shape = [*stacked, *kept]
    for axis in rule.unit:
        shape.insert(axis, 1)
    return Assembly(target[1:], tuple(shape), first.leaf.dtype, tuple(part for _, part, _ in members))
