"""Deletes what retention does not keep, at each save or after the fact: a plan that only looks, and its execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint
from pdlib.store import files
from pdlib.store.find import find_run
from pdlib.store.ledger import size
from pdlib.store.lock import is_locked, locked
from pdlib.store.places import locate
from pdlib.store.retention import Retention, evictions
from pdlib.store.stored import KEEP_FILE, file_sizes, item_names, read_item, step_numbers

Pairs = list[tuple[int, str]]


@dataclass(frozen=True)
class PrunePlan:
    """What pruning a run deletes.

    Attributes:
        run: its directory.
        doomed: (step, item) → bytes; a process goes before, and with, its product.
        steps: how many steps there are.
        live: whether another process is at work in the run; the plan cannot be applied then.
    """

    run: Path
    doomed: Mapping[tuple[int, str], int]
    steps: int
    live: bool

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        rows = [{"step": step, "item": item, "bytes": nbytes} for (step, item), nbytes in self.doomed.items()]
        return {"run": str(self.run), "live": self.live, "freed_bytes": sum(self.doomed.values()), "deletes": rows}

    def render(self) -> str:
        """The plan as text, a line an item."""
        lines = [f"{self.run}: {self.steps} steps, {size(sum(self.doomed.values()))} to free"]
        lines += [f"  step {step:<9} delete {item} {size(nbytes)}" for (step, item), nbytes in self.doomed.items()]
        if self.live:
            lines.append("another process is at work in this run: it cannot be pruned now")
        return "\n".join(lines)


def plan_prune(run: str | Path, retention: Retention) -> PrunePlan:
    """Look at what pruning would delete; touches nothing. Items that pdlib did not write are left alone.

    Raises:
        NotARun, NoCheckpoint: there is no such run, or it has no step.
    """
    home = find_run(locate(run))
    ckpts = home / "ckpts"
    numbers = step_numbers(ckpts)
    if not numbers:
        raise NoCheckpoint(f"{home} holds no step yet; there is nothing to prune")
    roles: dict[str, str] = {}
    for step in numbers:
        for name in item_names(ckpts / str(step)):
            if name not in roles and (ckpts / str(step) / name / "pdlib.json").exists():
                roles[name] = read_item(ckpts / str(step) / name).role
    pairs = unkept(ckpts, roles, retention)
    sizes = {(step, item): sum(file_sizes(ckpts / str(step) / item).values()) for step, item in pairs}
    return PrunePlan(home, sizes, len(numbers), is_locked(home))


@files.changing
def apply_prune(plan: PrunePlan) -> None:
    """Do what a plan says. A kill at any instruction leaves each item whole or gone, and no product without need.

    Raises:
        RunConflict: another process is at work in the run.
    """
    with locked(plan.run):
        delete_items(plan.run / "ckpts", [*plan.doomed])


def unkept(directory: Path, roles: Mapping[str, str], retention: Retention) -> Pairs:
    """The (step, item) pairs of a directory that retention does not keep; see `evictions`."""
    steps = {step: set(item_names(directory / str(step))) for step in step_numbers(directory)}
    marked = {step for step in steps if (directory / str(step) / KEEP_FILE).exists()}
    return evictions(steps, roles, retention, marked=marked)


def delete_items(directory: Path, pairs: Sequence[tuple[int, str]]) -> None:
    """Delete items, each by one rename; a step that holds nothing more goes with its last one."""
    for step, item in pairs:
        home = directory / str(step)
        last = item_names(home) == [item]
        files.discard(home if last else home / item, home=directory)
