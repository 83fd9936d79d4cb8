"""Says what a run holds, in bytes and leaves, what opening and stripping it would cost; needs no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint, NotARun, PdlibError
from pdlib.store.find import find_run
from pdlib.store.notes import stripped
from pdlib.store.places import is_remote, locate
from pdlib.store.stored import (
    ITEM_FILE,
    KEEP_FILE,
    StoredItem,
    StoredLeaf,
    file_sizes,
    item_names,
    read_item,
    step_numbers,
)


@dataclass(frozen=True)
class StepReport:
    """One step: its whole items, what is wrong with the others, and what was done to it.

    Attributes:
        step: its number.
        items: the whole ones, of today's layout.
        problems: of the others, a line each.
        kept: whether it is marked to keep.
        older: of a step in an older layout, which one, and what migrating it would read.
        stripped: item → bytes of what was stripped of it.
    """

    step: int
    items: tuple[StoredItem, ...]
    problems: tuple[str, ...]
    kept: bool
    older: str = ""
    stripped: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class RunReport:
    """A run as its files describe it; `render` for people, `as_dict` for programs."""

    path: Path
    steps: tuple[StepReport, ...]

    @property
    def product_bytes(self) -> int:
        """Bytes of the products of all steps."""
        return sum(item.nbytes for item in self._all("product"))

    @property
    def process_bytes(self) -> int:
        """Bytes of the processes of all steps: what keeping the products alone would free."""
        return sum(item.nbytes for item in self._all("process"))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "run": str(self.path),
            "product_bytes": self.product_bytes,
            "process_bytes": self.process_bytes,
            "steps": [
                {
                    "step": step.step,
                    "kept": step.kept,
                    "older_layout": step.older or None,
                    "stripped": dict(step.stripped),
                    "problems": list(step.problems),
                    "items": [_item_dict(item) for item in step.items],
                }
                for step in self.steps
            ],
        }

    def render(self) -> str:
        """The report as text: a line a step, and the newest step's leaves."""
        lines = [f"{self.path}: {len(self.steps)} steps"]
        for step in self.steps:
            held = ", ".join(f"{item.name} {size(item.nbytes)}" for item in step.items) or step.older or "no whole item"
            gone = f"  ({', '.join(step.stripped)} stripped: it cannot resume)" if step.stripped else ""
            lines.append(f"  step {step.step:<9} {held}{'  (kept)' if step.kept else ''}{gone}")
            lines += [f"    {problem}" for problem in step.problems]
        for item in self.steps[-1].items if self.steps else ():
            lines.append(f"\nstep {self.steps[-1].step}, {item.name} v{item.version} ({item.role}), {item.layout}:")
            width = max((len("/".join(leaf.path)) for leaf in item.leaves), default=0)
            lines += [f"  {'/'.join(leaf.path):<{width}}  {_leaf_text(item, leaf)}" for leaf in item.leaves]
        lines.append(f"\nopening   {self._opening()}")
        lines.append(f"stripping would keep {size(self.product_bytes)} of products and free {size(self.process_bytes)}")
        return "\n".join(lines)

    def _opening(self) -> str:
        products = [item for step in self.steps for item in step.items if item.role == "product"]
        if not products:
            return "there is no product"
        leaves = products[-1].leaves
        mapped = sum(leaf_bytes(products[-1], leaf) for leaf in leaves if _is_mapped(leaf))
        read = sum(leaf_bytes(products[-1], leaf) for leaf in leaves if not _is_mapped(leaf))
        return f"the newest product maps {size(mapped)} without a copy and reads {size(read)}"

    def _all(self, role: str) -> list[StoredItem]:
        return [item for step in self.steps for item in step.items if item.role == role]


def describe_run(path: str | Path) -> RunReport:
    """Report what a run directory holds; damaged steps are reported, not refused.

    Raises:
        NotARun: the path is no run; names the right one where it can.
        NoCheckpoint: the run has no step yet.
    """
    run, ckpts = find_steps(locate(path))
    steps = step_numbers(ckpts)
    if not steps:
        raise NoCheckpoint(f"{run} holds no step yet; let it train to its first save")
    return RunReport(run, tuple(_step(ckpts, step) for step in steps))


def find_steps(path: Path) -> tuple[Path, Path]:
    """A run and the directory of its steps; of steps outside a run, as older ones often are, that directory twice.

    Raises:
        NotARun: the path is neither; names the right one where it can.
    """
    try:
        run = find_run(path)
    except NotARun:
        if step_numbers(path):
            return path, path
        raise
    return run, run / "ckpts"


def leaf_bytes(item: StoredItem, leaf: StoredLeaf) -> int:
    """Bytes of one leaf's array; of its files where they are its own."""
    if leaf.chunks is not None:
        return sum(item.files[file]["size"] for file, _ in leaf.files())
    from pdlib.store.mapped import numpy_dtype

    return math.prod(leaf.stored_shape) * numpy_dtype(leaf.stored_dtype).itemsize


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _step(ckpts: Path, step: int) -> StepReport:
    items: list[StoredItem] = []
    problems: list[str] = []
    home = ckpts / str(step)
    older = older_layout(home)
    for name in () if older else item_names(home):
        try:
            item = read_item(home / name)
            item.check_whole()
            items.append(item)
        except PdlibError as error:
            problems.append(str(error).splitlines()[0])
    gone = {n: b for n, b in (stripped(home) or {"items": {}})["items"].items() if not (home / n).exists()}
    return StepReport(step, tuple(items), tuple(problems), (home / KEEP_FILE).exists(), older, gone)


def older_layout(home: Path) -> str:
    """What a step in an older layout is, for people; empty for one of today's, or of no known layout."""
    from pdlib.items.layouts import layouts
    from pdlib.store.recognise import recognise

    if is_remote(home) or any((home / name / ITEM_FILE).exists() for name in item_names(home)):
        return ""
    try:
        found = recognise(home, layouts())
    except PdlibError:
        return ""
    held = ", ".join(f"{name} {size(sum(file_sizes(home / name).values()))}" for name in found.items)
    return f"older layout {found.layout.name}: {held}, {len(found.found)} leaves; pdlib migrate makes a run of it"


def _is_mapped(leaf: StoredLeaf) -> bool:
    return leaf.chunks is not None and math.prod(leaf.grid) == 1


def _item_dict(item: StoredItem) -> dict[str, Any]:
    return {
        "item": item.name,
        "version": item.version,
        "role": item.role,
        "layout": item.layout,
        "bytes": item.nbytes,
        "leaves": [
            {"path": list(leaf.path), "shape": list(leaf.shape), "dtype": leaf.dtype, "bytes": leaf_bytes(item, leaf)}
            for leaf in item.leaves
        ],
    }


def _leaf_text(item: StoredItem, leaf: StoredLeaf) -> str:
    shape = f"[{', '.join(map(str, leaf.shape))}]"
    files = "" if leaf.chunks is None else f"  {len(list(leaf.files()))} files" if not _is_mapped(leaf) else ""
    return f"{leaf.dtype}{shape}  {size(leaf_bytes(item, leaf))}{files}"
