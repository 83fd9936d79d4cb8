"""Keeps the product of steps and lets the process go: a plan that only looks, and an execution safe to kill.

A step of two items loses its process by one rename, and its product is not touched. An older step of one item is
converted in place. `consolidate` rewrites products as one file a leaf, compares every bit, and lets the two change
places in a single step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint, PdlibError, StepRefused
from pdlib.items.layouts import Layout
from pdlib.store import files
from pdlib.store.ledger import find_steps, size
from pdlib.store.lock import is_locked, locked
from pdlib.store.notes import half_converted, note_stripped
from pdlib.store.places import locate
from pdlib.store.stored import KEEP_FILE, StoredItem, file_sizes, item_names, read_item, step_numbers

Say = Callable[[str], None]


@dataclass(frozen=True)
class StepPlan:
    """What stripping one step does.

    Attributes:
        step: its number.
        kept: the items that stay or are made, all of role `product`.
        freed: item → bytes, of those that go.
        rewritten: products that `consolidate` rewrites, item → bytes.
        conversion: of an older step, what becomes of it (a `pdlib.store.migrate.StepMigration`).
        spared: why nothing of the process goes, empty if it does.
    """

    step: int
    kept: tuple[str, ...]
    freed: dict[str, int]
    rewritten: dict[str, int] = field(default_factory=dict[str, int])
    conversion: Any = None
    spared: str = ""


@dataclass(frozen=True)
class StripPlan:
    """What stripping a run does, step by step.

    Attributes:
        run: its directory.
        ckpts: the directory of its steps.
        steps: ascending.
        live: whether another process is at work in the run; the plan cannot be applied then.
    """

    run: Path
    ckpts: Path
    steps: tuple[StepPlan, ...]
    live: bool

    @property
    def freed(self) -> int:
        """Bytes that go."""
        return sum(sum(step.freed.values()) for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        steps = [
            {
                "step": s.step,
                "keeps": list(s.kept),
                "frees": s.freed,
                "rewrites": s.rewritten,
                "converts": None if s.conversion is None else s.conversion.layout,
                "spared": s.spared or None,
            }
            for s in self.steps
        ]
        return {"run": str(self.run), "live": self.live, "freed_bytes": self.freed, "steps": steps}

    def render(self) -> str:
        """The plan as text, a line a step."""
        lines = [f"{self.run}: {len(self.steps)} steps, {size(self.freed)} to free"]
        for step in self.steps:
            does = [f"free {name} {size(nbytes)}" for name, nbytes in step.freed.items()]
            does += [f"rewrite {name} {size(nbytes)} as one file a leaf" for name, nbytes in step.rewritten.items()]
            if step.conversion is not None:
                does.insert(0, f"convert {step.conversion.layout}, {size(step.conversion.nbytes)} of product")
            does += [step.spared] if step.spared else []
            lines.append(f"  step {step.step:<9} keep {', '.join(step.kept) or 'nothing'}; {'; '.join(does) or 'done'}")
        if self.live:
            lines.append("another process is at work in this run: it cannot be stripped now")
        return "\n".join(lines)


def plan_strip(
    run: str | Path,
    *,
    step: int | None = None,
    keep_newest: int = 1,
    consolidate: bool = False,
    known: tuple[Layout, ...] | None = None,
) -> StripPlan:
    """Look at what stripping would do; touches nothing.

    Args:
        run: the run directory, or a directory of older steps.
        step: only this step; all when None.
        keep_newest: spare the processes of this many newest steps that have one, so that the run can resume.
        consolidate: also rewrite products of several files a leaf, or of OCDBT, as one file a leaf.
        known: the older layouts to recognise; those that pdlib knows when None.

    Raises:
        NotARun, NoCheckpoint: there is no such run or step.
        StepRefused: `step` is one of those that are spared; says what to pass.
        ForeignLayout: a step is of no known layout; names the nearest and every difference.
    """
    home, ckpts = find_steps(locate(run))
    numbers = step_numbers(ckpts)
    if step is not None and step not in numbers:
        raise NoCheckpoint(f"{home} holds no step {step}; it holds {', '.join(map(str, numbers)) or 'none'}")
    if not numbers:
        raise NoCheckpoint(f"{home} holds no step yet; there is nothing to strip")
    resumable = [number for number in numbers if _may_resume(ckpts / str(number))]
    newest = set(resumable[-keep_newest:] if keep_newest > 0 else ())
    chosen = numbers if step is None else [step]
    plans = tuple(_plan(ckpts / str(n), spare=n in newest, consolidate=consolidate, known=known) for n in chosen)
    if step is not None and plans[0].spared:
        raise StepRefused(f"step {step} of {home} was not stripped: {plans[0].spared}")
    return StripPlan(home, ckpts, plans, is_locked(home))


@files.changing
def apply_strip(plan: StripPlan, *, wait: bool = True, say: Say = lambda _: None) -> None:
    """Do what a plan says. A kill at any instruction leaves each step as it was, or as planned.

    Args:
        plan: of `plan_strip`.
        wait: until the bytes are given back; without it a process of its own does that, and this returns at once.
        say: told of each step.

    Raises:
        RunConflict: another process is at work in the run.
        TornStep, CorruptItem: a product is not whole any more; what was done before stays done.
        StepRefused: the file system cannot let directories change places (for `consolidate`).
    """
    with locked(plan.run):
        trash = [entry for entry in plan.ckpts.iterdir() if entry.name.startswith((files.TRASH, files.REWRITING))]
        try:
            for step in plan.steps:
                _apply(plan.ckpts, step, say, trash)
        finally:
            if not wait:
                files.free_later(trash)
            for path in trash if wait else ():
                files.delete(path)


def _items(step: Path) -> dict[str, StoredItem]:
    found: dict[str, StoredItem] = {}
    for name in item_names(step):
        try:
            found[name] = read_item(step / name)
        except PdlibError:
            continue  # what is not pdlib's, or not whole, is looked at by who can
    return found


def _may_resume(step: Path) -> bool:
    items = _items(step)
    return any(item.role == "process" for item in items.values()) or (bool(item_names(step)) and not items)


def _plan(home: Path, *, spare: bool, consolidate: bool, known: tuple[Layout, ...] | None) -> StepPlan:
    items = _items(home)
    if not items and item_names(home):
        return _plan_older(home, spare=spare, known=known)
    products = {name: item for name, item in items.items() if item.role == "product"}
    freed = {name: item.nbytes for name, item in items.items() if item.role == "process"}
    why = _reason(home, bool(products), spare=spare) if freed else ""
    for item in products.values():
        try:
            item.check_whole()
        except PdlibError as error:
            why = f"its product is not whole: {error}".splitlines()[0]
    freed |= {name: sum(file_sizes(home / name).values()) for name in half_converted(home)}
    rewritten = {name: item.nbytes for name, item in products.items() if consolidate and _scattered(item)}
    return StepPlan(int(home.name), tuple(products), {} if why else freed, rewritten, spared=why)


def _plan_older(home: Path, *, spare: bool, known: tuple[Layout, ...] | None) -> StepPlan:
    """Of a step that another program wrote: convert its one item, or let the one that is all process go."""
    from pdlib.items.contracts import default_registry
    from pdlib.store.migrate import plan_step

    registry = default_registry()
    found = plan_step(home, registry=registry, with_training=False, known=known)
    why = _reason(home, bool(found.leaves), spare=spare)
    names = item_names(home)
    mixed = [name for name in names if name not in {item.name for item in registry.items}]
    gone = mixed or [name for name in names if registry[name].role == "process"]
    freed = {name: sum(file_sizes(home / name).values()) for name in gone}
    kept = tuple(found.leaves) if mixed else tuple(name for name in names if name not in gone)
    if why:
        return StepPlan(int(home.name), kept, {}, spared=why)
    return StepPlan(int(home.name), kept, freed, conversion=found if mixed else None)


def _reason(home: Path, has_product: bool, *, spare: bool) -> str:
    """Why the process of a step must stay."""
    if not has_product:
        return "it has no whole product: nothing would be left of it; look with pdlib verify"
    if (home / KEEP_FILE).exists():
        return "it is marked to keep; take the mark back first with Manager.keep(step, keep=False)"
    if spare:
        return "its process is among the newest, which the run resumes from; pass --keep-newest 0 to let it go"
    return ""


def _scattered(item: StoredItem) -> bool:
    return any(leaf.chunks is None or math.prod(leaf.grid) > 1 for leaf in item.leaves if not leaf.is_empty)


def _apply(ckpts: Path, plan: StepPlan, say: Say, trash: list[Path]) -> None:
    home = ckpts / str(plan.step)
    if plan.conversion is not None:
        from pdlib.items.contracts import default_registry
        from pdlib.store.convert import convert_step

        trash += convert_step(home, plan.conversion, default_registry())
        note_stripped(home, plan.freed)
        say(f"step {plan.step}: {plan.conversion.layout} is {', '.join(plan.kept)} now")
        return
    own = _items(home)
    for name in plan.kept if plan.freed or plan.rewritten else ():
        if name in own:
            own[name].check_whole()  # as it is now, not as it was when the plan was made
    for name in plan.rewritten:
        trash += _consolidate(ckpts, home / name)
        say(f"step {plan.step}: {name} is one file a leaf")
    if plan.freed:
        note_stripped(home, plan.freed)
    for name in plan.freed:
        found = files.set_aside(home / name, home=ckpts)
        trash += [found] if found is not None else []
        say(f"step {plan.step}: {name} is gone")


def _consolidate(ckpts: Path, home: Path) -> list[Path]:
    from pdlib.store.consolidate import one_file_a_leaf

    staging = ckpts / f"{files.REWRITING}{home.parent.name}-{home.name}"
    files.remove_staging(staging)
    try:
        one_file_a_leaf(read_item(home), staging / home.name)
        try:
            files.exchange(staging / home.name, home)
        except OSError as error:
            raise StepRefused(
                f"{home} was not rewritten: {error}\nNothing was changed; export it, and import it in another place."
            ) from error
        old = files.set_aside(staging / home.name, home=ckpts)
        return [old] if old is not None else []
    finally:
        files.remove_staging(staging)
