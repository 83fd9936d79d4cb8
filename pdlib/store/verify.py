"""Holds whatever stands at a path to its manifests and contracts, and reports; changes nothing and refuses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlib.errors import NotARun, PdlibError, SpecMismatch
from pdlib.items.binding import Leaf
from pdlib.items.contracts import default_registry, load_contract
from pdlib.items.registry import Registry
from pdlib.store.digest import Verification, verify_item
from pdlib.store.files import STAGING, TRASH
from pdlib.store.find import find_run
from pdlib.store.ledger import older_layout
from pdlib.store.mapped import numpy_dtype
from pdlib.store.places import anywhere, locate
from pdlib.store.stored import ITEM_FILE, StoredItem, item_names, read_item, step_numbers


@dataclass(frozen=True)
class Report:
    """What `verify_path` found.

    Attributes:
        path: what was looked at.
        items: how many items.
        files: the comparison of their files with their manifests.
        contracts: differences of their leaves from the contracts that they name.
        leftovers: staging and trash of killed processes, which are no part of any step.
    """

    path: Path
    items: int
    files: Verification
    contracts: tuple[str, ...]
    leftovers: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.files) and not self.contracts and self.items > 0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        found = {name: list(getattr(self.files, name)) for name in self.files.__dataclass_fields__}
        return {
            "path": str(self.path),
            "whole": bool(self),
            "items": self.items,
            **found,
            "contracts": list(self.contracts),
            "leftovers": list(self.leftovers),
        }

    def render(self) -> str:
        """The report as text: a line a finding, then the verdict."""
        lines = [] if self.files else str(self.files).splitlines()
        lines += [f"contract: {line}" for line in self.contracts]
        lines += [f"leftover: {name} (no part of a step; the next trainer deletes it)" for name in self.leftovers]
        count = "1 item" if self.items == 1 else f"{self.items} items"
        verdict = "every file is as it was written, every leaf as its contract says" if self else "not whole"
        return "\n".join([*lines, f"{self.path}: {count}: {verdict}"])


@anywhere
def _found(path: Path) -> list[Path]:
    if (path / ITEM_FILE).exists():
        return [path]
    inside = [path / name for name in item_names(path)]
    if path.name.isdigit() or any((item / ITEM_FILE).exists() for item in inside):
        return inside
    if step_numbers(path):
        return list(_steps(path))
    run = find_run(path)
    return [*_steps(run / "ckpts"), *_steps(run / "target")]


def verify_path(path: str | Path) -> Report:
    """Compare every byte of a run, a directory of steps, a step or an item with manifests, and leaves with contracts.

    Raises:
        NotARun: nothing of pdlib's stands there; names the right place where it can.
    """
    place = locate(path)
    items = _found(place)
    if not items:
        raise NotARun(f"{place} holds no step and no item to verify; check the path")
    files, contracts = Verification(), list[str]()
    for home in items:
        label = f"{home.parent.name}/{home.name}"
        try:
            item = read_item(home)
            files += verify_item(item)
            if item.is_as_written():
                contracts += [f"{label}: {line}" for line in _contract(item)]
        except PdlibError as error:
            older = older_layout(home.parent)
            error = f"{older.split(';')[0]}, written without a manifest" if older else error
            files += Verification(unverifiable=(f"{label}: {error}".splitlines()[0],))
    homes = {home.parent.parent for home in items}
    leftovers = tuple(f"{h}/{e.name}" for h in homes for e in h.iterdir() if e.name.startswith((STAGING, TRASH)))
    return Report(place, len(items), files, tuple(contracts), leftovers)


def _steps(directory: Path) -> Iterator[Path]:
    for step in step_numbers(directory):
        names = item_names(directory / str(step))
        yield from (directory / str(step) / name for name in names)


def _contract(item: StoredItem) -> list[str]:
    """The differences of an item from the contract it names; none where that is a user's own, which is not here."""
    registry = default_registry()
    if item.name not in registry.names:
        return []
    try:
        spec = load_contract(item.name, item.version)
    except PdlibError as error:
        return [str(error).splitlines()[0]]
    if spec.digest != item.digest:
        return [f"was written under a contract {item.digest}, {spec.title} is {spec.digest}"]
    leaves = [Leaf(leaf.path, leaf.shape, leaf.dtype, _nbytes(leaf)) for leaf in item.leaves]
    # An item alone: what it repeats of another item is not there to be compared.
    own = Registry(tuple(spec if other.name == item.name else other for other in registry.items))
    try:
        own.check_leaves({item.name: leaves})
    except SpecMismatch as error:
        return list(error.problems)
    return []


def _nbytes(leaf: Any) -> int:
    size = numpy_dtype(leaf.stored_dtype).itemsize
    for extent in leaf.stored_shape:
        size *= extent
    return size
