"""Turns steps of older layouts into today's: a plan that only looks, and an execution that streams leaf by leaf.

The source is only read. What is made is staged beside its place, held value by value to the source, and moved there by
one rename.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint, NotARun
from pdlib.items.layouts import Layout, layouts
from pdlib.items.registry import Registry
from pdlib.store import files
from pdlib.store.assemble import Assembly, assemble
from pdlib.store.ledger import size
from pdlib.store.places import locate
from pdlib.store.recognise import recognise
from pdlib.store.seal import seal_item, seal_step
from pdlib.store.stored import StoredLeaf, step_numbers
from pdlib.store.transcribe import transcribe
from pdlib.tree import nest, stored_names

LINEAGE_FILE = "lineage.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class StepMigration:
    """What becomes of one older step.

    Attributes:
        step: its number.
        source: its directory.
        layout: the layout it was recognised as.
        leaves: what is written, by item.
        dropped: stored leaf → why it has no place today.
        left: stored leaves of the process that stay behind without `with_training`.
    """

    step: int
    source: Path
    layout: str
    leaves: Mapping[str, tuple[Assembly, ...]]
    dropped: Mapping[str, str]
    left: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are written."""
        return sum(leaf.nbytes for leaves in self.leaves.values() for leaf in leaves)


@dataclass(frozen=True)
class MigrationPlan:
    """What a migration does, step by step; `source` stays as it is."""

    source: Path
    destination: Path
    steps: tuple[StepMigration, ...]
    registry: Registry

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are written."""
        return sum(step.nbytes for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        steps = [
            {
                "step": step.step,
                "layout": step.layout,
                "bytes": step.nbytes,
                "leaves": {
                    item: [
                        {"path": list(leaf.keys), "shape": list(leaf.shape), "from": [part.text for part in leaf.parts]}
                        for leaf in leaves
                    ]
                    for item, leaves in step.leaves.items()
                },
                "dropped": dict(step.dropped),
                "left_behind": list(step.left),
            }
            for step in self.steps
        ]
        return {"source": str(self.source), "destination": str(self.destination), "bytes": self.nbytes, "steps": steps}

    def render(self) -> str:
        """The plan as text: a line a step, and what does not come along."""
        lines = [f"{self.source} → {self.destination}: {len(self.steps)} steps, {size(self.nbytes)}"]
        for step in self.steps:
            held = ", ".join(f"{item}: {len(leaves)} leaves" for item, leaves in step.leaves.items())
            lines.append(f"  step {step.step:<9} {step.layout}: {held}, {size(step.nbytes)}")
            lines += [f"    drops {name}: {why}" for name, why in step.dropped.items()]
            if step.left:
                lines.append(
                    f"    leaves {len(step.left)} leaves of the process behind; --with-training takes them along"
                )
        return "\n".join(lines)


def plan_migration(
    source: str | Path,
    destination: str | Path,
    *,
    registry: Registry,
    with_training: bool = False,
    step: int | None = None,
    known: tuple[Layout, ...] | None = None,
) -> MigrationPlan:
    """Recognise the steps of a directory and say what becomes of every leaf; touches nothing.

    Args:
        source: a directory of older steps, or a run whose `ckpts` holds them.
        destination: the run directory to be made.
        registry: today's contracts, which what is made is held to.
        with_training: also optimizer states and adversaries, so that the run can resume.
        step: only this step; all when None.
        known: the layouts to recognise; those that pdlib knows when None.

    Raises:
        NotARun, NoCheckpoint: there are no such steps.
        ForeignLayout: a step is of no known layout; names the nearest and every difference.
        SpecMismatch: what would be made does not fit today's contracts.
    """
    home = steps_directory(locate(source))
    numbers = step_numbers(home) if step is None else [step]
    if not set(numbers) <= set(step_numbers(home)):
        held = ", ".join(map(str, step_numbers(home)))
        raise NoCheckpoint(f"{home} holds no step {step}; it holds {held}")
    plans = tuple(
        plan_step(home / str(number), registry=registry, with_training=with_training, known=known) for number in numbers
    )
    return MigrationPlan(home, locate(destination), plans, registry)


def steps_directory(path: Path) -> Path:
    """The directory of older steps at a path, which may be the run that holds it.

    Raises:
        NotARun: there is none.
    """
    for home in (path, path / "ckpts", path / "checkpoints"):
        if step_numbers(home):
            return home
    raise NotARun(f"{path} holds no steps: want a directory of numbered steps, or a run with a folder ckpts; check it")


def plan_step(
    home: Path, *, registry: Registry, with_training: bool, known: tuple[Layout, ...] | None = None
) -> StepMigration:
    """Recognise one older step and say what becomes of its leaves; see `plan_migration`."""
    found = recognise(home, layouts() if known is None else known)
    made = assemble(found)
    roles = {item.name: item.role for item in registry.items}
    wanted = {item: leaves for item, leaves in made.items() if with_training or roles.get(item) != "process"}
    registry.check_leaves(
        {item: [leaf.as_leaf() for leaf in leaves] for item, leaves in wanted.items()}, action=f"{home}"
    )
    left = tuple(
        part.text for item, leaves in made.items() if item not in wanted for leaf in leaves for part in leaf.parts
    )
    return StepMigration(int(home.name), home, found.layout.name, wanted, found.dropped, tuple(dict.fromkeys(left)))


@files.changing
def apply_migration(plan: MigrationPlan, *, say: Say = lambda _: None) -> None:
    """Make the destination. A kill at any instruction leaves it absent or whole, and the source as it was.

    A destination that the same migration has made before is left alone: running twice is running once.

    Raises:
        StepRefused: the destination exists and is something else; nothing was changed.
        CorruptItem: what was written differs from the source; nothing was moved into place.
        TornStep: a leaf of the source cannot be read.
    """
    destination = plan.destination
    lineage = _lineage(plan)
    if destination.exists() and _made_before(destination, lineage):
        say(f"{destination} is there already")
        return
    with files.staged(destination) as staging:
        for step in plan.steps:
            say(f"step {step.step}: {size(step.nbytes)}")
            write_step(step, staging / "ckpts" / str(step.step), plan.registry)
        files.write_file(staging / LINEAGE_FILE, (json.dumps(lineage, indent=2) + "\n").encode())


def write_step(plan: StepMigration, home: Path, registry: Registry, *, twice: bool = False) -> None:
    """Write the items of one step to a staged directory, and hold every file, as it reads then, to what was read.

    Args:
        plan: of `plan_step`.
        home: the step to be made.
        registry: today's contracts.
        twice: also read the source a second time, and compare; for when the source does not outlive this.

    Raises:
        CorruptItem: a leaf reads differently a second time, or was not written as it was read.
        TornStep: a leaf of the source cannot be read.
    """
    started = time.time()
    home.mkdir(parents=True)
    for item, leaves in plan.leaves.items():
        (home / item).mkdir()
        names = stored_names([leaf.keys for leaf in leaves], subject=f"item {item}")
        records = [
            StoredLeaf(leaf.keys, name, leaf.shape, leaf.dtype.name, leaf.shape, leaf.dtype.name, leaf.shape)
            for leaf, name in zip(leaves, names, strict=True)
        ]
        entries = transcribe(leaves, records, home / item, twice=twice)
        tree = nest({leaf.keys: place for place, leaf in enumerate(leaves)})
        seal_item(home / item, registry[item], tree, records, layout="raw", entries=entries)
    seal_step(home, started)


def _lineage(plan: MigrationPlan) -> dict[str, Any]:
    made = {
        str(step.step): {"layout": step.layout, "items": sorted(step.leaves), "dropped": dict(step.dropped)}
        for step in plan.steps
    }
    return {"target": None, "parent": None, "migrated": {"source": str(plan.source), "steps": made}}


def _made_before(destination: Path, lineage: dict[str, Any]) -> bool:
    try:
        return json.loads((destination / LINEAGE_FILE).read_bytes()) == lineage
    except (OSError, ValueError):
        return False
