"""Keeps the product of steps and lets the process go: a plan that only looks, and an execution safe to kill.

A step of two items loses its process by one rename. The product is never touched, except by `consolidate`, which
rewrites it as one file a leaf, compares every bit, and lets the two change places in a single step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint, PdlibError, StepRefused
from pdlib.store import files
from pdlib.store.ledger import size
from pdlib.store.lock import is_locked, locked
from pdlib.store.places import locate
from pdlib.store.stored import KEEP_FILE, STRIPPED_FILE, StoredItem, find_run, item_names, read_item, step_numbers

Say = Callable[[str], None]


@dataclass(frozen=True)
class StepPlan:
    """What stripping one step does.

    Attributes:
        step: its number.
        kept: the items that stay, all of role `product`.
        freed: item → bytes, of those that go.
        rewritten: products that `consolidate` rewrites, item → bytes.
        spared: why nothing of the process goes, empty if it does.
    """

    step: int
    kept: tuple[str, ...]
    freed: dict[str, int]
    rewritten: dict[str, int]
    spared: str = ""


@dataclass(frozen=True)
class StripPlan:
    """What stripping a run does, step by step.

    Attributes:
        run: its directory.
        steps: ascending.
        live: whether another process is at work in the run; the plan cannot be applied then.
    """

    run: Path
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
                "spared": s.spared or None,
            }
            for s in self.steps
        ]
        return {"run": str(self.run), "live": self.live, "freed_bytes": self.freed, "steps": steps}

    def render(self) -> str:
        """The plan as text, a line a step."""
        lines = [f"{self.run}: {size(self.freed)} would be freed"]
        for step in self.steps:
            does = [f"free {name} {size(nbytes)}" for name, nbytes in step.freed.items()]
            does += [f"rewrite {name} {size(nbytes)} as one file a leaf" for name, nbytes in step.rewritten.items()]
            does += [step.spared] if step.spared else []
            lines.append(f"  step {step.step:<9} keep {', '.join(step.kept) or 'nothing'}; {'; '.join(does) or 'done'}")
        if self.live:
            lines.append("another process is at work in this run: it cannot be stripped now")
        return "\n".join(lines)


def plan_strip(
    run: str | Path, *, step: int | None = None, keep_newest: int = 1, consolidate: bool = False
) -> StripPlan:
    """Look at what stripping would do; touches nothing.

    Args:
        run: the run directory.
        step: only this step; all when None.
        keep_newest: spare the processes of this many newest steps that have one, so that the run can resume.
        consolidate: also rewrite products of several files a leaf, or of OCDBT, as one file a leaf.

    Raises:
        NotARun, NoCheckpoint: there is no such run or step.
        StepRefused: `step` is one of those that are spared; says what to pass.
    """
    home = find_run(locate(run))
    numbers = step_numbers(home / "ckpts")
    if step is not None and step not in numbers:
        raise NoCheckpoint(f"{home} holds no step {step}; it holds {', '.join(map(str, numbers)) or 'none'}")
    if not numbers:
        raise NoCheckpoint(f"{home} holds no step yet; there is nothing to strip")
    items = {number: _items(home / "ckpts" / str(number)) for number in numbers}
    with_process = [number for number in numbers if any(item.role == "process" for item in items[number].values())]
    newest = set(with_process[-keep_newest:] if keep_newest > 0 else ())
    chosen = numbers if step is None else [step]
    plans = tuple(_plan(home / "ckpts" / str(n), items[n], spare=n in newest, consolidate=consolidate) for n in chosen)
    if step is not None and plans[0].spared:
        raise StepRefused(f"step {step} of {home} was not stripped: {plans[0].spared}")
    return StripPlan(home, plans, is_locked(home))


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
    ckpts = plan.run / "ckpts"
    with locked(plan.run):
        trash = [entry for entry in ckpts.iterdir() if entry.name.startswith(files.TRASH)]
        try:
            for step in plan.steps:
                trash += _apply(ckpts, step, say)
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
            continue  # what is not whole is neither kept nor freed: verify tells of it
    return found


def _plan(home: Path, items: dict[str, StoredItem], *, spare: bool, consolidate: bool) -> StepPlan:
    products = {name: item for name, item in items.items() if item.role == "product"}
    processes = {name: item for name, item in items.items() if item.role == "process"}
    why = ""
    if processes and not products:
        why = "it has no whole product: nothing would be left of it; look with pdlib verify"
    elif processes and (home / KEEP_FILE).exists():
        why = "it is marked to keep; take the mark back first with Manager.keep(step, keep=False)"
    elif processes and spare:
        why = "its process is among the newest, which the run resumes from; pass --keep-newest 0 to let it go"
    for item in products.values():
        try:
            item.check_whole()
        except PdlibError as error:
            why = f"its product is not whole: {error}".splitlines()[0]
    rewritten = {n: item.nbytes for n, item in products.items() if consolidate and _scattered(item)}
    freed = {} if why else {name: item.nbytes for name, item in processes.items()}
    return StepPlan(int(home.name), tuple(products), freed, rewritten, why)


def _scattered(item: StoredItem) -> bool:
    return any(leaf.chunks is None or math.prod(leaf.grid) > 1 for leaf in item.leaves if not leaf.is_empty)


def _apply(ckpts: Path, plan: StepPlan, say: Say) -> list[Path]:
    home = ckpts / str(plan.step)
    trash: list[Path] = []
    for name in plan.kept if plan.freed or plan.rewritten else ():
        read_item(home / name).check_whole()  # as it is now, not as it was when the plan was made
    for name in plan.rewritten:
        trash += _consolidate(ckpts, home / name)
        say(f"step {plan.step}: {name} is one file a leaf")
    if plan.freed:
        _note(home, plan.freed)
    for name in plan.freed:
        found = files.set_aside(home / name, home=ckpts)
        trash += [found] if found is not None else []
        say(f"step {plan.step}: {name} is gone")
    return trash


def _note(home: Path, freed: dict[str, int]) -> None:
    """Leave word of why the step cannot resume; before the fact, as it says nothing while the process is there."""
    record = {"items": freed, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    files.replace_file(home / STRIPPED_FILE, (json.dumps(record) + "\n").encode())


def stripped(step: Path) -> dict[str, Any] | None:
    """What was stripped of a step and when, None if nothing was."""
    try:
        record = json.loads((step / STRIPPED_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _consolidate(ckpts: Path, home: Path) -> list[Path]:
    from pdlib.store.consolidate import one_file_a_leaf

    staging = ckpts / f"{files.STAGING}consolidate-{home.parent.name}-{home.name}"
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
