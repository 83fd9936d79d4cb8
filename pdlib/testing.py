"""Property tests for anyone's items: hypothesis strategies of trees, and equality to the bit; needs `pdlib[testing]`.

Two lines hold a registry of your own to what pdlib promises:

    @given(pdlib.testing.items(registry))
    def test_round_trip(trees): pdlib.testing.check_round_trip(registry, trees)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pdlib.errors import NameCollision, PdlibError
from pdlib.items.binding import is_key, key_impl
from pdlib.items.registry import Registry
from pdlib.items.specs import ItemSpec, LeafSpec, parse_dim
from pdlib.store.checkpoint import Manager
from pdlib.store.mapped import numpy_dtype
from pdlib.tree import Keys, flatten, show, stored_names

try:
    from hypothesis import strategies as st
except ImportError as error:  # pragma: no cover
    raise PdlibError("pdlib.testing needs hypothesis: pip install 'pdlib[testing]'") from error

HOST_DTYPES = ("float64", "int64", "uint64", "complex128")  # kept by NumPy; JAX has them with jax_enable_x64 only
DEVICE_DTYPES = (
    "bool", "int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32",
    "complex64", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


class Pair(NamedTuple):
    """A NamedTuple whose field order is not alphabetical, for random trees."""

    second: Any
    first: Any


class Empty(NamedTuple):
    """A NamedTuple without fields, like optax's `EmptyState`."""


def assert_bit_equal(actual: Any, expected: Any) -> None:
    """Assert that two trees have one structure, and leaves of equal shape, dtype and bits.

    Bits are compared as unsigned integers in NumPy: NaN payloads, −0.0 and subnormals count. A JAX array equals a NumPy
    array of the same bits; a typed PRNG key equals only a key of the same implementation.

    Raises:
        AssertionError: lists every leaf that differs.
    """
    one, other = jax.tree.structure(actual), jax.tree.structure(expected)
    assert one == other, f"structures differ:\n  {one}\n  {other}"
    left, right = flatten(actual), flatten(expected)
    problems = [
        f"{show(keys)}  {why}"
        for keys, a, b in zip(left.paths, left.leaves, right.leaves, strict=True)
        if (why := _difference(a, b))
    ]
    assert not problems, "leaves differ:\n  " + "\n  ".join(problems)


def to_host(leaf: Any) -> Any:
    """A leaf as `Manager.restore_to_host` gives it: NumPy, key data of typed keys, Python numbers as they are."""
    if type(leaf) in (bool, int, float):
        return leaf
    return np.asarray(jax.random.key_data(leaf)) if is_key(leaf.dtype) else np.asarray(leaf)


def check_round_trip(registry: Registry, trees: Mapping[str, Any], *, meshes: Sequence[Any] = (None,)) -> None:
    """Save trees and hold every way of reading them to the same bits.

    Args:
        registry: contracts of the trees.
        trees: item name → tree.
        meshes: restore onto each of these, with the contracts' axes; None is the first device.

    Raises:
        AssertionError: a way of reading gives other bits.
    """
    with tempfile.TemporaryDirectory() as folder, Manager(Path(folder) / "steps", registry=registry) as manager:
        manager.save(0, trees)
        assert manager.verify(0), str(manager.verify(0))
        for name, tree in trees.items():
            host = jax.tree.map(to_host, tree)
            for mapped in (True, False):
                assert_leaves_equal(manager.restore_to_host(0, name, mapped=mapped), host)
            if any(str(getattr(leaf, "dtype", "")) in HOST_DTYPES for leaf in jax.tree.leaves(tree)):
                continue
            assert_leaves_equal(manager.open(0, name), tree)
            for mesh in meshes:
                assert_bit_equal(manager.restore(0, {name: tree_twin(tree)}, mesh=mesh)[name], tree)


def assert_leaves_equal(actual: Any, expected: Any) -> None:
    """Like `assert_bit_equal`, for trees whose containers may differ in class: paths, shapes, dtypes and bits agree."""
    left, right = flatten(actual), flatten(expected)
    one, other = dict(zip(left.paths, left.leaves, strict=True)), dict(zip(right.paths, right.leaves, strict=True))
    assert one.keys() == other.keys(), f"leaves differ: {sorted(one.keys() ^ other.keys())}"
    problems = [f"{show(keys)}  {why}" for keys in one if (why := _difference(one[keys], other[keys]))]
    assert not problems, "leaves differ:\n  " + "\n  ".join(problems)


def tree_twin(tree: Any) -> Any:
    """The abstract twin of a tree, without shardings; Python numbers stay."""
    return jax.tree.map(lambda x: x if type(x) in (bool, int, float) else jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# Strategies


def arrays(shape: tuple[int, ...], dtype: str) -> st.SearchStrategy[np.ndarray]:
    """NumPy arrays of raw bits: every NaN, infinity, subnormal and −0.0 that the dtype has."""
    kind = numpy_dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    drawn = min(nbytes, 64)
    return st.binary(min_size=drawn, max_size=drawn).map(lambda bits: _from_bits(bits, nbytes, shape, kind))


def leaves(
    *, dtypes: Sequence[str] = DEVICE_DTYPES, sizes: Sequence[int] = (0, 1, 2, 3, 4, 8)
) -> st.SearchStrategy[Any]:
    """NumPy arrays of up to three dimensions, in any of `dtypes`."""
    shapes = st.lists(st.sampled_from(sizes), max_size=3).map(tuple)
    return st.tuples(shapes, st.sampled_from(dtypes)).flatmap(lambda chosen: arrays(*chosen))


def keys() -> st.SearchStrategy[jax.Array]:
    """Typed PRNG keys, single and batched, of every implementation."""
    impl, seed = st.sampled_from(KEY_IMPLS), st.integers(0, 2**31 - 1)
    single = st.builds(lambda impl, seed: jax.random.key(seed, impl=impl), impl, seed)
    return single | st.builds(lambda key, count: jax.random.split(key, count), single, st.integers(1, 4))


def names() -> st.SearchStrategy[str]:
    """Keys as Haiku, Hugging Face and people write them: with `/`, `~`, `.` and any letter."""
    plain = st.sampled_from(
        ["w", "b", "mlp/~/linear_0", "mlp/_/linear_0", "layers.18.mlp.down_proj", "a/b", "a", "a.b", "b.c", "é", "重み"]
    )
    return plain | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


def item_trees(leaf: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Random trees that can be stored: dicts, lists, tuples, NamedTuples, None and empty containers, nested.

    Args:
        leaf: the leaves; `leaves() | keys()` and Python numbers when None.
        max_leaves: about how many.
    """
    numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
    chosen = leaves() | keys() | numbers if leaf is None else leaf
    return any_trees(chosen, max_leaves=max_leaves).filter(is_storable)


def any_trees(leaf: st.SearchStrategy[Any], *, max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Like `item_trees`, those that `Manager.save` must refuse for their names included."""
    empties = st.sampled_from([(), None, Empty()]) | st.builds(dict) | st.builds(list)
    nested = st.recursive(
        leaf | empties,
        lambda inner: (
            st.dictionaries(names(), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=max_leaves,
    )
    return st.dictionaries(names(), nested, max_size=4)


def is_storable(tree: Any) -> bool:
    """Whether the stored names of a tree's leaves are distinct file names."""
    try:
        stored_names(flatten(tree).paths, subject="tree")
    except NameCollision:
        return False
    return True


@st.composite
def items(draw: st.DrawFn, registry: Registry, *, max_captures: int = 2) -> dict[str, Any]:
    """Trees, as nested dicts, that fit all the contracts of a registry together: the registry's own strategy.

    Args:
        draw: given by hypothesis.
        registry: whose items.
        max_captures: values drawn for each captured name.
    """
    plan = _Plan(draw, registry, max_captures)
    shapes = {item.name: plan.item(item) for item in registry.items}
    for item in registry.items:
        shapes[item.name] |= plan.repeated(item, shapes)
    return {name: _nest({path: draw(_leaf(*leaf)) for path, leaf in found.items()}) for name, found in shapes.items()}


def shardings(shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> st.SearchStrategy[jax.sharding.NamedSharding]:
    """Every way to split a shape over a mesh's axes that divide it."""
    return _shardings(shape, mesh)


@st.composite
def _shardings(draw: st.DrawFn, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    spec: list[Any] = [()] * len(shape)
    for axis, parts in mesh.shape.items():
        fits = [i for i, n in enumerate(shape) if n and n % (parts * _parts(mesh, spec[i])) == 0]
        place = draw(st.sampled_from([None, *fits]))
        if place is not None:
            spec[place] = (*spec[place], axis)
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))


def _parts(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))


def _leaf(shape: tuple[int, ...], dtype: str) -> st.SearchStrategy[Any]:
    if not dtype.startswith("key"):
        return arrays(shape, dtype)
    impl = dtype[4:-1] or KEY_IMPLS[0]
    return st.integers(0, 99).map(lambda seed: jax.random.split(jax.random.key(seed, impl=impl), shape))


def _from_bits(bits: bytes, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    raw = np.resize(np.frombuffer(bits, np.uint8), nbytes) if nbytes else np.empty(0, np.uint8)
    if dtype.name == "bool":
        return (raw & 1).astype(np.bool_).reshape(shape)
    if dtype.name in ("int4", "uint4"):
        low = raw.astype(np.int16) & 15
        return (low - 8 if dtype.name == "int4" else low).astype(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape).copy()


def _difference(actual: Any, expected: Any) -> str | None:
    numbers = (bool, int, float)
    if type(actual) in numbers or type(expected) in numbers:
        same = type(actual) is type(expected) and repr(actual) == repr(expected)
        return None if same else f"{actual!r} ({type(actual).__name__}), want {expected!r} ({type(expected).__name__})"
    if is_key(actual.dtype) or is_key(expected.dtype):
        if actual.dtype != expected.dtype or key_impl(actual.dtype) != key_impl(expected.dtype):
            return f"dtype {actual.dtype}, want {expected.dtype}"
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    one, other = np.asarray(actual), np.asarray(expected)
    if one.dtype != other.dtype:
        return f"dtype {one.dtype}, want {other.dtype}"
    if one.shape != other.shape:
        return f"shape {one.shape}, want {other.shape}"
    bits = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other)]
    wrong = np.flatnonzero(bits[0] != bits[1]) // max(one.dtype.itemsize, 1)
    if wrong.size:
        place = tuple(int(i) for i in np.unravel_index(wrong[0], one.shape))
        count = len(set(wrong.tolist()))
        return f"{count} of {one.size} elements differ, first at {place}: {one[place]}, want {other[place]}"
    return None


def _nest(flat: Mapping[Keys, Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        if not path:
            return leaf
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


class _Plan:
    """Draws captures and dimension sizes once each, so that all rows of a registry agree on them."""

    def __init__(self, draw: st.DrawFn, registry: Registry, max_captures: int) -> None:
        self.draw, self.registry = draw, registry
        self.max_captures = max_captures
        self.captured: dict[str, list[str]] = {}
        self.sizes: dict[Any, int] = {}

    def item(self, item: ItemSpec) -> dict[Keys, tuple[tuple[int, ...], str]]:
        """Paths, shapes and dtypes of the rows that stand for themselves."""
        found: dict[Keys, tuple[tuple[int, ...], str]] = {}
        for row in item.leaves:
            if row.like is not None or (row.optional and self.draw(st.booleans())):
                continue
            for captures in self.bindings(sorted(row.captures)):
                path = self.path(row, captures)
                first = next((m for m in self.registry.matches(item.name, path)), None)
                if path in found or first is None or first.row is not row:
                    continue
                dtype = self.draw(st.sampled_from(row.dtypes or ("float32", "bfloat16", "int32", "uint8")))
                found[path] = (self.shape(item.name, row, captures), dtype)
        return _without_overlap(found)

    def repeated(self, item: ItemSpec, shapes: Mapping[str, Mapping[Keys, Any]]) -> dict[Keys, Any]:
        """The rows that repeat another item's leaves, for what that item has."""
        found: dict[Keys, Any] = {}
        for row in item.leaves:
            if row.like is None:
                continue
            other, *prefix = row.like.split("/")
            head = self.path(LeafSpec(path=row.path.removesuffix("/**")), {})
            for path, (shape, dtype) in shapes[other].items():
                if list(path[: len(prefix)]) == prefix:
                    found |= {(*head, moment, *path[len(prefix) :]): (shape, dtype) for moment in ("mu", "nu")}
        return found

    def bindings(self, wanted: list[str]) -> list[dict[str, str]]:
        result: list[dict[str, str]] = [{}]
        for name in wanted:
            if name not in self.captured:
                drawn = st.lists(names().filter(_is_plain), min_size=1, max_size=self.max_captures, unique=True)
                self.captured[name] = self.draw(drawn)
            result = [{**binding, name: value} for binding in result for value in self.captured[name]]
        return result

    def path(self, row: LeafSpec, captures: Mapping[str, str]) -> Keys:
        path: list[str] = []
        for segment, filled in zip(row.segments, row.fill(captures), strict=True):
            if segment == "**":
                path += self.draw(st.lists(st.sampled_from(["0", "inner", "x.y"]), min_size=1, max_size=2))
            else:
                path.append(filled.replace("*", self.draw(st.sampled_from(["a", "b1"]))))
        return tuple(path)

    def shape(self, item: str, row: LeafSpec, captures: Mapping[str, str]) -> tuple[int, ...]:
        shape: list[int] = []
        for text in ("...",) if row.dims is None else row.dims:
            dim = parse_dim(text)
            if dim.kind == "rest":
                shape += self.draw(st.lists(st.sampled_from([1, 2, 3, 8]), max_size=2))
            elif dim.kind != "name":
                shape.append(dim.offset if dim.kind == "size" else self.draw(st.sampled_from([1, 2, 8])))
            else:
                scope = self.registry.scopes[item][dim.name]
                key = (dim.name, frozenset((c, v) for c, v in captures.items() if c in scope))
                if key not in self.sizes:
                    self.sizes[key] = self.draw(st.sampled_from([8, 16]))
                shape.append(self.sizes[key] + dim.offset)
        return tuple(shape)


def _is_plain(name: str) -> bool:
    return is_storable({"x": {name: {"y": 0}}}) and "*" not in name


def _without_overlap(found: dict[Keys, Any]) -> dict[Keys, Any]:
    """Drop paths that lie inside another leaf, or whose stored name another has."""
    kept: dict[Keys, Any] = {}
    for path, leaf in found.items():
        inside = any(path[: len(other)] == other or other[: len(path)] == path for other in kept)
        trial = [*kept, path]
        if not inside and is_storable(_nest(dict.fromkeys(trial, 0))):
            kept[path] = leaf
    return kept
