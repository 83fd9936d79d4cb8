"""Writes the items of one step beside their place, and moves them there whole; the only code that makes a step.

At every instruction the directory shows either the old state or the new one: what is being written has a hidden name
until one rename. All processes of a JAX job call this together, each with the shards that it holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pdlib.errors import PdlibError, SaveFailed, StepRefused
from pdlib.items.specs import ItemSpec
from pdlib.store import orbax_format, processes
from pdlib.store.digest import content_digest
from pdlib.store.files import STAGING, hash_file, move, remove_staging
from pdlib.store.memory import WRITERS, run_parallel
from pdlib.store.seal import Entries, seal_item, seal_step, write_entry
from pdlib.store.snapshot import Snapshot
from pdlib.store.stored import item_names, read_item
from pdlib.tree import Skeleton


@dataclass(frozen=True)
class ItemImage:
    """All that is written of one item: its contract, its structure and its leaves as they were when save was called."""

    spec: ItemSpec
    tree: Skeleton
    leaves: Sequence[Snapshot]
    layout: str
    arrays: dict[str, Any]  # stored name → array, for the OCDBT layout only


def commit(directory: Path, step: int, items: Sequence[ItemImage], token: str) -> None:
    """Write a step, or those items of it that it does not hold yet.

    Raises:
        SaveFailed: a file could not be written; nothing was committed.
        StepRefused: the step holds one of the items with other values; nothing was committed.
    """
    staging = directory / f"{STAGING}{step}-{token}"
    started = time.time()
    outcome: Exception | None = None
    try:
        outcome = _together(directory, step, items, token, staging, started)
        # What the first process could not commit still lies in staging when all meet: so every process knows.
        if outcome is None and processes.is_lead():
            remove_staging(staging)
        processes.barrier(f"{token}-done")
        if outcome is None and not processes.is_lead() and staging.exists():
            outcome = SaveFailed(f"step {step} was not committed by the first process; its error says why")
        processes.barrier(f"{token}-known")
    finally:
        if processes.is_lead():
            remove_staging(staging)
    if isinstance(outcome, PdlibError):
        raise outcome
    if outcome is not None:
        raise SaveFailed(
            f"step {step} was not saved to {directory}: {outcome}\nNothing was committed: mend the cause, save again."
        ) from outcome


def _together(
    directory: Path, step: int, items: Sequence[ItemImage], token: str, staging: Path, started: float
) -> Exception | None:
    """Write, agree and publish; the error instead of raising it, so that every process comes to the last barrier."""
    try:
        failure = _open(directory, staging) if processes.is_lead() else None
        processes.barrier(f"{token}-open")
        entries: dict[str, Entries] = {}
        if failure is None:
            entries, failure = _attempt(lambda: _write_items(staging, items))
        parts = _exchange(staging, entries, failure, token)
        if processes.is_lead():
            broken = [part["error"] for part in parts if part["error"]]
            if broken:
                raise failure or OSError("; ".join(broken))
            _finish(staging, items, parts, started)
            _publish(directory, step, staging)
    except Exception as error:
        return error
    return None


def _open(directory: Path, staging: Path) -> Exception | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        return error
    return None


def _write_items(staging: Path, items: Sequence[ItemImage]) -> dict[str, Entries]:
    if not staging.is_dir():
        raise OSError(f"{staging} is not there: the first process could not make it")
    entries: dict[str, Entries] = {image.spec.name: {} for image in items}
    tasks: list[Callable[[], Any]] = []
    for image in items:
        home, found = staging / image.spec.name, entries[image.spec.name]
        if image.arrays:
            orbax_format.write_ocdbt(home, image.arrays)
            continue
        home.mkdir(exist_ok=True)
        tasks += [
            partial(write_entry, home, file, data.data, found) for leaf in image.leaves for file, data in leaf.files
        ]
        if processes.is_lead():
            tasks += [
                partial(write_entry, home, f"{leaf.name}/.zarray", orbax_format.zarray(leaf), found)
                for leaf, _ in image.leaves
                if not leaf.is_empty
            ]
    run_parallel(tasks, threads=WRITERS)
    return entries


def _attempt(work: Callable[[], dict[str, Entries]]) -> tuple[dict[str, Entries], Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return {}, error


def _exchange(staging: Path, entries: Any, failure: Exception | None, token: str) -> list[dict[str, Any]]:
    """What every process wrote: through files in the staging directory, which all of them share."""
    mine = {"entries": entries, "error": f"process {jax.process_index()}: {failure}" if failure else None}
    if jax.process_count() == 1:
        return [mine]
    # Every process comes to the barrier, whatever fails before: one that stayed away would let the others wait.
    try:
        (staging / f".part-{jax.process_index()}.json").write_text(json.dumps(mine))
    except OSError as error:
        failure = failure or error
    processes.barrier(f"{token}-written")
    if not processes.is_lead():
        if failure:
            raise failure
        return []
    return [_part(staging, index) for index in range(jax.process_count())]


def _part(staging: Path, index: int) -> dict[str, Any]:
    file = staging / f".part-{index}.json"
    try:
        part = json.loads(file.read_text())
        file.unlink()
    except (OSError, ValueError) as error:
        return {"entries": {}, "error": f"process {index}: what it wrote is not known ({error})"}
    return part


def _finish(staging: Path, items: Sequence[ItemImage], parts: list[dict[str, Any]], started: float) -> None:
    for image in items:
        home = staging / image.spec.name
        leaves = [leaf for leaf, _ in image.leaves]
        entries: Entries = {}
        for part in parts:
            entries |= part["entries"][image.spec.name]
        ocdbt = image.layout == "ocdbt"
        if ocdbt:
            (home / "_METADATA").unlink(missing_ok=True)
            (home / "_sharding").unlink(missing_ok=True)
            files = [path for path in home.rglob("*") if path.is_file()]
            entries = {path.relative_to(home).as_posix(): hash_file(path) for path in files}
        seal_item(home, image.spec, image.tree, leaves, layout=image.layout, entries=entries)
    seal_step(staging, started)


def _publish(directory: Path, step: int, staging: Path) -> None:
    target = directory / str(step)
    if not target.exists():
        move(staging, target)
        return
    fresh: list[str] = []
    for name in item_names(staging):
        if not (target / name).exists():
            fresh.append(name)
        elif content_digest(read_item(staging / name)) != content_digest(read_item(target / name)):
            raise StepRefused(
                f"step {step} of {directory} holds another {name}: the values differ\n"
                "Nothing was overwritten; save to a new directory, or delete that step yourself."
            )
    for name in fresh:
        move(staging / name, target / name)
