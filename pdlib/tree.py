"""Paths, stored names and structure of any pytree; bridges JAX trees and what is written, and touches no file."""

from __future__ import annotations

import keyword
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from pdlib.errors import NameCollision

Keys = tuple[str, ...]
Skeleton = dict[str, Any]

_LONGEST_NAME = 255  # bytes in one directory entry, on every file system in use
_RESERVED = {".zarray", ".zattrs", ".zgroup"}


class FlatTree(NamedTuple):
    """A tree taken apart.

    Attributes:
        paths: the keys of each leaf, as text.
        leaves: in the same order.
        skeleton: the containers as JSON, empty ones too; its leaves are indices into `leaves`.
    """

    paths: list[Keys]
    leaves: list[Any]
    skeleton: Skeleton


def flatten(tree: Any) -> FlatTree:
    """Take a pytree apart; containers of any registered kind are kept in the skeleton, with their class by name."""
    flat = FlatTree([], [], {})

    def visit(node: Any, keys: Keys) -> Skeleton:
        children = _children(node)
        if children is None:
            flat.paths.append(keys)
            flat.leaves.append(node)
            return {"leaf": len(flat.leaves) - 1}
        record = _container(node, [_json_key(key) for key, _ in children])
        record["children"] = [visit(child, (*keys, key_text(key))) for key, child in children]
        return record

    skeleton = visit(tree, ())
    return FlatTree(flat.paths, flat.leaves, skeleton)


def unflatten(skeleton: Skeleton, leaves: Sequence[Any]) -> Any:
    """Rebuild a tree from its skeleton without importing anything.

    Mappings come back as dict. A NamedTuple comes back as its own class where this process has it loaded, otherwise as
    a namedtuple of the same name and fields; any other registered class as a dict of its children.
    """
    if "leaf" in skeleton:
        return leaves[skeleton["leaf"]]
    children = [unflatten(child, leaves) for child in skeleton["children"]]
    kind = skeleton["kind"]
    if kind == "none":
        return None
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "namedtuple":
        return _namedtuple(skeleton["class"], tuple(skeleton["keys"]))(*children)
    return dict(zip(skeleton["keys"], children, strict=True))


def nest(places: Mapping[Keys, int]) -> Skeleton:
    """The skeleton of nested dicts over some leaves' keys, in their order; a leaf at no key is the whole tree."""
    if () in places:
        return {"leaf": places[()]}
    groups: dict[str, dict[Keys, int]] = {}
    for keys, place in places.items():
        groups.setdefault(keys[0], {})[keys[1:]] = place
    return {"kind": "dict", "keys": [*groups], "children": [nest(group) for group in groups.values()]}


def select(skeleton: Skeleton, wanted: Callable[[int], bool]) -> Skeleton | None:
    """The part of a skeleton whose leaves are wanted, None where none is left; lost entries of a sequence are None."""
    if "leaf" in skeleton:
        return skeleton if wanted(skeleton["leaf"]) else None
    parts = [select(child, wanted) for child in skeleton["children"]]
    kept = [index for index, part in enumerate(parts) if part is not None]
    if not kept:
        return None
    if skeleton["kind"] in ("tuple", "namedtuple", "list") and len(kept) < len(parts):
        parts = [part or {"kind": "none", "keys": [], "children": []} for part in parts]
        return {**skeleton, "children": parts}
    keys = [skeleton["keys"][index] for index in kept]
    return {**skeleton, "keys": keys, "children": [parts[index] for index in kept]}


def map_with_keys(function: Callable[[Keys, Any], Any], tree: Any) -> Any:
    """Like `jax.tree.map`, with each leaf's keys as text."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(tuple(map(key_text, path)), leaf), tree)


def show(keys: Keys) -> str:
    """A leaf's path for people: keys joined by `/`."""
    return "/".join(keys) if keys else "(the whole item)"


def stored_names(paths: Sequence[Keys], *, subject: str) -> list[str]:
    """The name that orbax stores each leaf under: its keys joined by dots.

    Raises:
        NameCollision: two leaves share a name, one name lies inside another's chunk files, or a name is no file name;
            every such pair is listed.
    """
    names = [".".join(keys) if keys else "value" for keys in paths]
    problems: list[str] = []
    taken: dict[str, Keys] = {}
    for keys, name in zip(paths, names, strict=True):
        why = _unusable(name)
        if why:
            problems.append(f"{show(keys)!r}: {why}")
        elif name in taken:
            problems.append(f"{_quote(taken[name])} and {_quote(keys)} would both be stored as {name!r}")
        taken[name] = keys
    for keys, name in zip(paths, names, strict=True):
        parts = name.split("/")
        for depth in range(1, len(parts)):
            outer = "/".join(parts[:depth])
            if outer in taken and (parts[depth][:1].isdigit() or parts[depth] in _RESERVED):
                problems.append(f"{_quote(keys)} would be stored inside the files of {_quote(taken[outer])}")
    if problems:
        lines = "\n".join(f"  {line}" for line in problems)
        raise NameCollision(
            f"{subject}: the leaves cannot all be stored\n{lines}\nRename the keys; nothing was written."
        )
    return names


def key_text(key: Any) -> str:
    """One entry of a JAX key path as text."""
    return str(_raw_key(key))


def _raw_key(key: Any) -> Any:
    if isinstance(key, (DictKey, FlattenedIndexKey)):
        return key.key
    if isinstance(key, SequenceKey):
        return key.idx
    if isinstance(key, GetAttrKey):
        return key.name
    return key


def _json_key(key: Any) -> str | int:
    raw = _raw_key(key)
    return raw if type(raw) is int else str(raw)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The children of one container with their keys, or None for a leaf."""
    if node is None:
        return []
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs]


def _container(node: Any, keys: list[str | int]) -> Skeleton:
    cls = type(node)
    if node is None:
        kind = "none"
    elif cls is list:
        kind = "list"
    elif isinstance(node, tuple):
        kind = "namedtuple" if hasattr(cls, "_fields") else "tuple"
    elif isinstance(node, Mapping):
        kind = "dict"
    else:
        kind = "object"
    record: Skeleton = {"kind": kind, "keys": keys}
    if kind == "namedtuple":
        record["keys"] = [*getattr(cls, "_fields", ())]
    if kind in ("namedtuple", "object"):
        record["class"] = f"{cls.__module__}:{cls.__qualname__}"
    return record


def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    short = qualname.rpartition(".")[2]
    short = short if short.isidentifier() and not keyword.iskeyword(short) else "Stored"
    return namedtuple(short, fields)  # pyright: ignore[reportUntypedNamedTuple]


def _unusable(name: str) -> str | None:
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"its name {name!r} has an empty or dotted path part, which is no file name"
        if len(part.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
            return f"its name has a part longer than {_LONGEST_NAME} bytes, which is no file name"
    if "\0" in name or "\\" in name:
        return f"its name {name!r} has a NUL or a backslash, which orbax cannot have in a file name"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return f"its name {name!r} has a lone surrogate, which is no file name"
    return "its name is one that the store uses itself" if name.split("/")[0] in STORE_FILES else None


def _quote(keys: Keys) -> str:
    return repr(list(keys))


STORE_FILES = frozenset(
    {"pdlib.json", "manifest.json", "_METADATA", "_CHECKPOINT_METADATA", "_sharding", "array_metadatas"}
)
