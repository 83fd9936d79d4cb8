"""Reads `specs/layouts/*.toml`: how the leaves of an older layout become those of today's items; data, and no array."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pdlib.errors import ContractError
from pdlib.items.contracts import specs_dir
from pdlib.items.paths import Keys, fill_keys, match_keys

_FIELDS = {"from", "to", "drop", "squeeze", "stack", "unit", "split", "like", "optional"}


@dataclass(frozen=True)
class Rule:
    """What becomes of the stored leaves that one pattern matches.

    Attributes:
        source: item, then keys: literals, `{name}`, `*`, `**`.
        target: the same for where they go; None where they are dropped.
        drop: why they are dropped.
        squeeze: axes of size one that go.
        stack: the capture whose values, counted from 0, become a new first axis.
        unit: axes of size one in what is made, after stacking.
        split: the capture of `target` that the last axis is divided among, in the layout's order of sites, by their C.
        like: item and first keys: what follows `source`'s `**` is treated as a leaf below them is.
        optional: whether the leaves may be absent.
    """

    source: Keys
    target: Keys | None
    drop: str = ""
    squeeze: tuple[int, ...] = ()
    stack: str | None = None
    unit: tuple[int, ...] = ()
    split: str | None = None
    like: Keys | None = None
    optional: bool = False


class Found(NamedTuple):
    """What a layout says of one stored leaf: its rule, what the pattern took, where it goes (None: it is dropped)."""

    rule: Rule
    captures: Mapping[str, Keys]
    target: Keys | None


@dataclass(frozen=True)
class Layout:
    """One older layout.

    Attributes:
        name: what people call it.
        about: who wrote it and what tells it apart.
        sites: the sites that it stores, in the order in which it concatenates what belongs to each.
        rules: the first that matches a leaf is its rule; a leaf that none matches is not of this layout.
        path: its file.
    """

    name: str
    about: str
    sites: tuple[str, ...]
    rules: tuple[Rule, ...]
    path: Path

    @property
    def items(self) -> frozenset[str]:
        """The stored items that it knows."""
        return frozenset(rule.source[0] for rule in self.rules)

    def find(self, keys: Keys) -> Found | None:
        """The rule of a stored leaf (item, then its keys), and where that leaf goes; None where no rule is about it."""
        return next(self._matches(keys), None)

    def _matches(self, keys: Keys) -> Iterator[Found]:
        for rule in self.rules:
            if rule.like is not None:
                yield from self._like(rule, keys)
            else:
                for captures in match_keys(rule.source, keys):
                    yield Found(rule, captures, None if rule.target is None else fill_keys(rule.target, captures))

    def _like(self, rule: Rule, keys: Keys) -> Iterator[Found]:
        root, like, into = rule.source[:-1], rule.like or (), (rule.target or ())[:-1]
        if keys[: len(root)] != root:
            return
        for start in range(len(root), len(keys)):
            for found in self._matches((*like, *keys[start:])):
                if found.target is None:
                    yield found
                else:
                    yield found._replace(target=(*into, *keys[len(root) : start], *found.target[len(into) :]))


@cache
def layouts() -> tuple[Layout, ...]:
    """The older layouts that pdlib knows, by name."""
    return tuple(read_layout(path) for path in sorted((specs_dir() / "layouts").glob("*.toml")))


def read_layout(path: Path) -> Layout:
    """Parse a layout file, one of pdlib's or of a user's own.

    Raises:
        ContractError: the file is no TOML, or a key of it is unknown or impossible.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ContractError(f"{path}: {error}; a layout is a UTF-8 TOML file") from error
    unknown = table.keys() - {"layout", "about", "sites", "leaf"}
    if unknown or not isinstance(table.get("layout"), str) or not _are_tables(table.get("leaf")):
        what = f"unknown key {min(unknown)!r}" if unknown else "`layout` or [[leaf]] is missing"
        raise ContractError(f"{path}: {what}; write layout = NAME, about, sites = [...], and a table [[leaf]] a rule")
    rules = tuple(_rule(path, row) for row in table["leaf"])
    return Layout(table["layout"], table.get("about", ""), tuple(table.get("sites", ())), rules, path)


def _rule(path: Path, row: Mapping[str, Any]) -> Rule:
    where = f"{path}: leaf {'/'.join(map(str, row.get('from', ())))!r}"
    unknown = row.keys() - _FIELDS
    if unknown:
        raise ContractError(f"{where}: unknown key {min(unknown)!r}; known: {', '.join(sorted(_FIELDS))}")
    if not _are_keys(row.get("from")) or ("to" in row) == ("drop" in row):
        raise ContractError(f"{where}: write from = [item, keys…], and either to = [item, keys…] or drop = a reason")
    target, like = row.get("to"), row.get("like")
    if (target is not None and not _are_keys(target)) or (like is not None and not _are_keys(like)):
        raise ContractError(f"{where}: `to` and `like` are lists of keys, the item first")
    if like is not None and (row["from"][-1], (target or [""])[-1]) != ("**", "**"):
        raise ContractError(f'{where}: with `like`, both `from` and `to` end in "**"')
    return Rule(
        source=tuple(row["from"]),
        target=None if target is None else tuple(target),
        drop=row.get("drop", ""),
        squeeze=tuple(row.get("squeeze", ())),
        stack=row.get("stack"),
        unit=tuple(row.get("unit", ())),
        split=row.get("split"),
        like=None if like is None else tuple(like),
        optional=row.get("optional", False),
    )


def _are_keys(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 1 and all(isinstance(key, str) for key in value)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
