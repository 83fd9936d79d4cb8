"""Tells a run, a directory of steps, a step and an item apart, and names the one that was meant; never writes."""

from __future__ import annotations

import difflib
from pathlib import Path

from pdlib.errors import NoCheckpoint, NotARun, PdlibError
from pdlib.store.places import anywhere
from pdlib.store.remote import cached
from pdlib.store.stored import ITEM_FILE, StoredItem, item_names, read_item, step_numbers

PRODUCT = "decomposition"


@anywhere
def check_directory(directory: Path) -> None:
    """Tell a directory of steps from its neighbours.

    Raises:
        NotARun: the path is missing, no directory, or one level too deep or too shallow; names the right one.
    """
    if not directory.exists():
        near = [e.name for e in directory.parent.iterdir()] if directory.parent.is_dir() else []
        raise NotARun(f"{directory} does not exist{_near(directory.name, near)}")
    if not directory.is_dir():
        raise NotARun(f"{directory} is a file, not a directory of steps")
    if step_numbers(directory):
        return
    if (directory / ITEM_FILE).exists():
        raise NotARun(f"{directory} is one item of a step, two levels too deep; open {directory.parent.parent}")
    if any((directory / name / ITEM_FILE).exists() for name in item_names(directory)):
        raise NotARun(f"{directory} is one step, a level too deep; open {directory.parent}")
    if step_numbers(directory / "ckpts"):
        raise NotARun(f"{directory} is a run, a level too shallow; open {directory / 'ckpts'}")


@anywhere
def find_run(path: Path) -> Path:
    """The run directory at `path`.

    Raises:
        NotARun: it is missing, or one level too deep or too shallow; names the right one.
    """
    if (path / "ckpts").is_dir():
        return path
    if not path.exists():
        near = [e.name for e in path.parent.iterdir()] if path.parent.is_dir() else []
        raise NotARun(f"{path} does not exist{_near(path.name, near)}")
    for up in (path, *path.parents[:3]):
        if up.name == "ckpts" and step_numbers(up):
            raise NotARun(f"{path} lies inside a run; open {up.parent}")
    runs = sorted(e.name for e in path.iterdir() if (e / "ckpts").is_dir()) if path.is_dir() else []
    if runs:
        raise NotARun(f"{path} holds runs, it is none itself; open one of them: {', '.join(runs[:8])}")
    if path.is_dir() and step_numbers(path):
        raise NotARun(f"{path} holds steps outside a run; open them with pdlib.Manager, or move them to RUN/ckpts")
    raise NotARun(f"{path} is no run: it has no folder ckpts")


def find_product(run: Path, step: int | None = None) -> StoredItem:
    """A run's product as it is stored, whatever the version of its contract; needs no jax.

    Args:
        run: the run directory.
        step: the newest that holds a product when None.

    Raises:
        NoCheckpoint: there is no such step, or no product in it.
        TornStep, ForeignLayout: it is not whole, or not pdlib's.
    """
    ckpts = run / "ckpts"
    while step is None:
        found = next((n for n in reversed(step_numbers(ckpts)) if PRODUCT in item_names(ckpts / str(n))), None)
        if found is None:
            raise NoCheckpoint(f"{run} holds no product yet; let it train to its first save")
        try:
            return find_product(run, found)
        except PdlibError:
            if PRODUCT in item_names(ckpts / str(found)):
                raise
            # a live run pruned it between choosing and reading: there is a newer one
    steps = step_numbers(ckpts)
    if step not in steps:
        held = ", ".join(map(str, steps[-8:])) or "no step"
        raise NoCheckpoint(f"{ckpts} holds no step {step!r}; it holds {held}")
    item = read_item(ckpts / str(step) / PRODUCT)
    item.check_whole()
    return cached(item)


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; check the path"
