"""Replaces an older single-item step by today's product, in place; safe to kill, and the original goes last."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdlib.store import files
from pdlib.store.migrate import StepMigration, write_step
from pdlib.store.notes import note_converted
from pdlib.store.stored import item_names

STEP_METADATA = "_CHECKPOINT_METADATA"


def convert_step(home: Path, plan: StepMigration, registry: Any) -> list[Path]:
    """Put the items of a plan into a step, then set the older ones aside.

    What is made is staged beside the step and held value by value to the original, as `write_step` does; then a note
    names the older items, the new ones are renamed into the step, and the older ones go. Killed anywhere, the step
    holds the older items, or the new ones, or both; `half_converted` then says what is left to do.

    Args:
        home: the step.
        plan: of `plan_step`; its items have other names than the older ones.
        registry: today's contracts.

    Returns:
        what was set aside, to be deleted.
    """
    older = [name for name in item_names(home) if name not in plan.leaves]
    staging = home.parent / f"{files.REWRITING}{home.name}"
    files.remove_staging(staging)
    try:
        write_step(plan, staging, registry, twice=True)
        note_converted(home, plan.layout, older)
        for item in plan.leaves:
            files.move(staging / item, home / item)
        (staging / STEP_METADATA).replace(home / STEP_METADATA)
    finally:
        files.remove_staging(staging)
    return set_older_aside(home, older)


def set_older_aside(home: Path, older: Iterable[str]) -> list[Path]:
    """Set older items of a step aside, and say which trash holds them."""
    moved = [files.set_aside(home / name, home=home.parent) for name in older]
    return [path for path in moved if path is not None]
