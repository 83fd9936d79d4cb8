"""Tells which older layout a step is of, and accounts for every leaf in it; reads names and shapes, and no array."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlib.errors import ForeignLayout, NoCheckpoint
from pdlib.items.layouts import Found, Layout
from pdlib.store.foreign import ForeignItem, Keys, read_foreign
from pdlib.store.stored import ITEM_FILE, item_names


@dataclass(frozen=True)
class Recognised:
    """An older step whose every leaf has a rule.

    Attributes:
        home: its directory.
        layout: what it is.
        items: the stored items by name.
        found: stored leaf (item, then keys) → its rule and place, those that are dropped too.
    """

    home: Path
    layout: Layout
    items: Mapping[str, ForeignItem]
    found: Mapping[Keys, Found]

    @property
    def dropped(self) -> dict[str, str]:
        """Stored leaf → why it has no place today."""
        return {"/".join(keys): one.rule.drop for keys, one in self.found.items() if one.target is None}


def recognise(home: Path, known: Sequence[Layout]) -> Recognised:
    """Match a step with the layouts.

    Raises:
        NoCheckpoint: there is no such step, or nothing in it.
        ForeignLayout: it is pdlib's already, or of no known layout; names the nearest one and every difference.
    """
    names = item_names(home)
    if not names:
        raise NoCheckpoint(f"{home} holds no item; check the path")
    if any((home / name / ITEM_FILE).exists() for name in names):
        raise ForeignLayout(f"{home} is of today's layout already: there is nothing to migrate; open it as it is")
    items = {name: read_foreign(home / name) for name in names}
    stored = [(name, *keys) for name, item in items.items() for keys in item.leaves]
    trials = [(layout, _differences(layout, stored)) for layout in known]
    for layout, differences in trials:
        if not differences:
            found = {keys: match for keys in stored if (match := layout.find(keys)) is not None}
            return Recognised(home, layout, items, found)
    raise ForeignLayout(_report(home, trials))


def _differences(layout: Layout, stored: Sequence[Keys]) -> list[str]:
    lines: list[str] = []
    met: set[int] = set()
    for keys in stored:
        match = layout.find(keys)
        if match is None:
            lines.append(f"{'/'.join(keys)}  is stored, and not of this layout")
        else:
            met.add(id(match.rule))
    absent = [rule for rule in layout.rules if id(rule) not in met and not rule.optional and rule.like is None]
    return lines + [f"{'/'.join(rule.source)}  is of this layout, and not stored" for rule in absent]


def _report(home: Path, trials: Sequence[tuple[Layout, list[str]]]) -> str:
    if not trials:
        return f"{home}: no layout is known that it could be of; pass --layout FILE with one of yours"
    layout, lines = min(trials, key=lambda trial: len(trial[1]))
    shown = [f"  {line}{_near(line, lines)}" for line in lines[:20]] + (["  …"] if len(lines) > 20 else [])
    return "\n".join(
        [
            f"{home} is of no known layout; the nearest is {layout.name}, {len(lines)} leaves differ from it:",
            *shown,
            f"Copy {layout.path.name}, write down what differs, and pass it with --layout FILE.",
        ]
    )


def _near(line: str, lines: Sequence[str]) -> str:
    name, is_stored = line.split("  ")[0], line.endswith("not of this layout")
    others = [other.split("  ")[0] for other in lines if other.endswith("not stored")] if is_stored else []
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f"; near {near[0]}" if near else ""
