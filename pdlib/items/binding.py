"""Holds leaves to contracts: binds named dimensions, and reports every difference with who bound what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdlib.errors import UnstorableLeaf
from pdlib.items.specs import Keys, parse_dim
from pdlib.tree import show

if TYPE_CHECKING:
    from pdlib.items.registry import Match, Registry

_SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class Leaf(NamedTuple):
    """A leaf as contracts see it: where it is, its shape, and the name of its dtype (`key<impl>` for PRNG keys)."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def describe(item: str, keys: Keys, leaf: Any) -> Leaf:
    """Path, shape and dtype of an array, abstract array, typed PRNG key or Python number.

    Raises:
        UnstorableLeaf: the leaf is something else.
    """
    if type(leaf) in _SCALARS:
        return Leaf(keys, (), _SCALARS[type(leaf)], 1 if type(leaf) is bool else 8)
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or not isinstance(shape, tuple):
        raise UnstorableLeaf(
            f"{item}:{show(keys)} is a {type(leaf).__module__}.{type(leaf).__qualname__}, not an array; "
            "store it as an array, or keep it out of the item"
        )
    size = math.prod(shape)
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return Leaf(keys, shape, f"key<{key_impl(dtype)}>", math.prod(data.shape) * data.dtype.itemsize)
    numpy_dtype = np.dtype(dtype)
    return Leaf(keys, shape, numpy_dtype.name, size * numpy_dtype.itemsize)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_impl(dtype: Any) -> str:
    """The name of a typed PRNG key's implementation, as `jax.random.key(seed, impl=…)` takes it."""
    return dtype._impl.name


def check_items(registry: Registry, items: Mapping[str, list[Leaf]]) -> list[str]:
    """Every difference between the leaves of some items and their contracts, a line each, in order of path."""
    checker = _Checker(registry, items)
    leaves = [(name, leaf) for name in items for leaf in sorted(items[name], key=lambda leaf: leaf.keys)]
    found: dict[int, list[str]] = {}
    # A leaf that repeats another binds nothing before that other has: it is the copy that is blamed.
    for place in sorted(range(len(leaves)), key=lambda place: checker.repeats(*leaves[place])):
        found[place] = checker.leaf(*leaves[place])
    problems = [line for place in range(len(leaves)) for line in found[place]]
    for name in items:
        problems += checker.missing(name, items[name])
    return problems


class _Bound(NamedTuple):
    size: Any
    by: str


class _Checker:
    """Collects bindings and problems over all the leaves of one check."""

    def __init__(self, registry: Registry, items: Mapping[str, list[Leaf]]) -> None:
        self.registry = registry
        self.many = len(items) > 1
        self.shapes = {(name, leaf.keys): leaf.shape for name, leaves in items.items() for leaf in leaves}
        self.bound: dict[tuple[str, frozenset[tuple[str, str]]], _Bound] = {}

    def label(self, name: str, keys: Keys) -> str:
        return f"{name}:{show(keys)}" if self.many else show(keys)

    def repeats(self, name: str, leaf: Leaf) -> bool:
        """Whether a leaf is one by a row with `like`."""
        return any(match.repeats is not None for match in self.registry.matches(name, leaf.keys)[:1])

    def leaf(self, name: str, leaf: Leaf) -> list[str]:
        """The differences of one leaf; binds the dimensions that no leaf has bound yet."""
        label = self.label(name, leaf.keys)
        matches = self.registry.matches(name, leaf.keys)
        if not matches:
            return [f"{label}  is registered by no row of {self.registry[name].title}"]
        trials = [self._try(name, leaf, match) for match in matches]
        complaints, bindings = next((trial for trial in trials if not trial[0]), trials[0])
        for key, size in bindings.items():
            self.bound.setdefault(key, _Bound(size, label))
        return [f"{label}  {complaint}" for complaint in complaints]

    def _try(self, name: str, leaf: Leaf, match: Match) -> tuple[list[str], dict[Any, int]]:
        complaints: list[str] = []
        bindings: dict[Any, int] = {}
        if match.row.dims is not None:
            complaints += self._dims(name, leaf, match, bindings)
        if match.repeats in self.shapes and not complaints and self.shapes[match.repeats] != leaf.shape:
            other = f"{match.repeats[0]}:{show(match.repeats[1])}"
            complaints.append(f"shape {leaf.shape}, want {self.shapes[match.repeats]} like {other}")
        repeats = match.repeats
        if repeats is not None and repeats not in self.shapes and repeats[0] in {name for name, _ in self.shapes}:
            complaints.append(f"repeats {repeats[0]}:{show(repeats[1])}, which is not there")
        wanted = match.row.dtypes
        if wanted and not any(leaf.dtype == dtype or leaf.dtype.split("<")[0] == dtype for dtype in wanted):
            complaints.append(f"dtype {leaf.dtype}, want {' or '.join(wanted)}")
        return complaints, bindings

    def _dims(self, name: str, leaf: Leaf, match: Match, bindings: dict[Any, int]) -> list[str]:
        texts = list(match.row.dims or ())
        if "..." in texts:
            place = texts.index("...")
            texts[place : place + 1] = ["_"] * (len(leaf.shape) - len(texts) + 1)
        wanted: list[str] = []
        blame: list[str] = []
        fits = len(texts) == len(leaf.shape)
        wrong = not fits
        for index, text in enumerate(texts):
            dim = parse_dim(text)
            size = leaf.shape[index] if fits else None
            if dim.kind == "size":
                wanted.append(text)
                wrong = wrong or size != dim.offset
            elif dim.kind == "any":
                wanted.append("_" if size is None else str(size))
            else:
                scope = self.registry.scopes[name].get(dim.name, frozenset())
                key = (dim.name, frozenset((c, v) for c, v in match.captures.items() if c in scope))
                known = self.bound.get(key)
                base = known.size if known else bindings.get(key)
                if base is None and size is not None:
                    base = bindings[key] = size - dim.offset
                wanted.append(text if base is None else f"{text}={base + dim.offset}")
                if base is not None and size is not None and size != base + dim.offset:
                    wrong = True
                    blame.append(f"{dim.name} bound by {known.by}" if known else f"{dim.name} stands twice")
        if not wrong:
            return []
        bindings.clear()
        want = f"({', '.join(wanted)}{',' if len(wanted) == 1 else ''})"
        return [f"shape {leaf.shape}, want {want}{''.join('; ' + b for b in blame)}"]

    def missing(self, name: str, leaves: Iterable[Leaf]) -> list[str]:
        """The rows that are not optional, and whose captures other leaves bind, without a leaf of their own."""
        spec = self.registry[name]
        present = {leaf.keys for leaf in leaves}
        bindings: dict[Keys, Mapping[str, str]] = {}
        problems: list[str] = []
        for keys in sorted(present):
            for row in spec.leaves:
                captures = row.match(keys) if row.like is None and row.exact else None
                if captures is not None:
                    bindings[keys] = captures
        for row in spec.leaves:
            if row.optional or row.like is not None or not row.exact:
                continue
            for captures in [*bindings.values()] if row.captures else [{}]:
                if not row.captures <= set(captures):
                    continue
                wanted = row.fill(captures)
                if wanted not in present:
                    present.add(wanted)
                    witness = next((keys for keys, found in bindings.items() if found is captures), None)
                    why = f"; {self.label(name, witness)} is there" if witness and row.captures else ""
                    problems.append(f"{self.label(name, wanted)}  is missing{why}")
        return problems
