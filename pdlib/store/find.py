"""Tells a run, a directory of steps, a step and an item apart, and names the one that was meant; never writes."""

from __future__ import annotations

import difflib
from pathlib import Path

from pdlib.errors import NotARun
from pdlib.store.places import anywhere
from pdlib.store.stored import ITEM_FILE, item_names, step_numbers


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


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; check the path"
