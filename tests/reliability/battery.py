"""The battery: what is done to checkpoints, by which tools, and what must hold afterwards; each run is counted."""

from __future__ import annotations

import errno
import gc
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pdlib
from pdlib.errors import PdlibError
from pdlib.store import KeepNewest, Manager, Retention, restore_latest, save_state
from pdlib.store.verify import verify_path
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS, product
from tests.store.crash import state_of
from tests.store.test_corpus import want

BOTH, PRODUCT = ["decomposition", "training"], ["decomposition"]
Ask = Callable[..., dict[str, Any]]
Files = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A tool under test.

    Attributes:
        prepare: makes what it works on, in a folder.
        held: asserts that what a user needs is there, whatever was interrupted.
        done: asserts the state that the tool is for.
    """

    prepare: Callable[[Path], None]
    held: Callable[[Path], None]
    done: Callable[[Path], None]


def files(root: Path) -> Files:
    """Every file below a directory by its bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def shown(run: Path) -> dict[int, list[str]]:
    """What a run of `state_of` shows, every item compared to the bit with what was saved."""
    with Manager(run / "ckpts", read_only=True) as manager:
        steps = {step: manager.items(step) for step in manager.steps()}
        for step in steps:
            assert manager.verify(step), manager.verify(step)
            assert_bit_equal(pdlib.open_run(run, step=step).decomposition, state_of(step).decomposition)
        newest, state = restore_latest(manager, state_of(0))
        assert_bit_equal(state, state_of(newest))
        assert newest == max(step for step, items in steps.items() if items == BOTH)
    return steps


def _steps(folder: Path) -> None:
    with Manager(folder / "run" / "ckpts") as manager:
        for step in (1, 2, 3, 4):
            save_state(manager, step, state_of(step))


def _newest_is_there(folder: Path) -> None:
    assert shown(folder / "run")[4] == BOTH


def _stripped(folder: Path) -> None:
    assert shown(folder / "run") == {1: PRODUCT, 2: PRODUCT, 3: PRODUCT, 4: BOTH}
    _nothing_is_left(folder / "run" / "ckpts")


def _all_products_are_there(folder: Path) -> None:
    assert [*shown(folder / "run")] == [1, 2, 3, 4]


def _pruned(folder: Path) -> None:
    assert shown(folder / "run") == {3: PRODUCT, 4: BOTH}


def _nothing_is_left(folder: Path) -> None:
    assert [p.name for p in folder.iterdir() if p.name.startswith((".staging", ".trash"))] == []


def _copy(name: str, target: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copytree(CORPUS / name, folder / target) and None


def _older_or_new(folder: Path) -> None:
    """An older step is there to the byte, or what took its place is, whole; or both are."""
    step = folder / "run" / "ckpts" / "7"
    if (step / "decomposition").exists():
        _converted_values(folder)
    else:
        assert files(step / "default") == files(CORPUS / "era-b" / "7" / "default")


def _converted_values(folder: Path) -> None:
    components, module = want("era-b")
    opened = pdlib.open_run(folder / "run", verify=True, host=True)
    assert_bit_equal(opened.components, components)
    assert_bit_equal(opened.ci_fn, {"chunkwise_transformer": module})


def _converted(folder: Path) -> None:
    _converted_values(folder)
    assert not (folder / "run" / "ckpts" / "7" / "default").exists()
    _nothing_is_left(folder / "run" / "ckpts")


def _same_values(folder: Path) -> None:
    assert_bit_equal(tuple(pdlib.open_run(folder / "run", verify=True).decomposition), tuple(product()))


def _consolidated(folder: Path) -> None:
    _same_values(folder)
    with Manager(folder / "run" / "ckpts", read_only=True) as manager:
        assert all(len(list(leaf.files())) <= 1 for leaf in manager.describe(7, "decomposition").leaves)
    _nothing_is_left(folder / "run" / "ckpts")


def _absent_or(source: str, whole: Callable[[Path], None]) -> Callable[[Path], None]:
    def held(folder: Path) -> None:
        assert files(folder / "source") == files(CORPUS / source)
        if (folder / "run").exists():
            whole(folder)

    return held


def _made(whole: Callable[[Path], None]) -> Callable[[Path], None]:
    def done(folder: Path) -> None:
        whole(folder)
        _nothing_is_left(folder)

    return done


def _exported(folder: Path) -> None:
    from pdlib.consumers.imports import apply_import, plan_import

    shutil.rmtree(folder / "check", ignore_errors=True)
    apply_import(plan_import(folder / "run", folder / "check" / "run"))
    _same_values(folder / "check")


def _prepare_import(folder: Path) -> None:
    from pdlib.consumers.export import apply_export, plan_export

    apply_export(plan_export(CORPUS / "raw.v1", folder / "source"))


def _import_held(folder: Path) -> None:
    assert (folder / "source" / "index.json").exists()
    if (folder / "run").exists():
        _same_values(folder)


CASES: dict[str, Case] = {
    "strip": Case(_steps, _all_products_are_there, _stripped),
    "strip, older step": Case(
        lambda folder: shutil.copytree(CORPUS / "era-b" / "7", folder / "run" / "ckpts" / "7") and None,
        _older_or_new,
        _converted,
    ),
    "strip --consolidate": Case(_copy("raw-shards.v1", "run"), _same_values, _consolidated),
    "prune, afterwards": Case(_steps, _newest_is_there, _pruned),
    "migrate": Case(_copy("era-b", "source"), _absent_or("era-b", _converted_values), _made(_converted_values)),
    "export": Case(_copy("raw.v1", "source"), _absent_or("raw.v1", _exported), _made(_exported)),
    "import": Case(_prepare_import, _import_held, _made(_same_values)),
}
SAVING = ("save", "background", "complete", "prune")  # killed at every call by tests/store/test_atomic.py as well
MAY_RERUN = {"export", "import"}  # say that the place is taken when the interrupted one had come through
FAULTS = {"killed": "SIGKILL at a random call that changes the disk", "disk full": "ENOSPC from a random call on",
          "disk broken": "EIO from a random call on"}  # fmt: skip


def interrupt(ask: Ask, folder: Path, tool: str, fault: str, times: int, *, seed: int) -> int:
    """Interrupt a tool at random calls, a fresh copy each time; what must hold is asserted. Returns how often."""
    case, chance = CASES[tool], random.Random(seed)
    (folder / "before").mkdir()
    case.prepare(folder / "before")
    shutil.copytree(folder / "before", folder / "whole")
    whole = ask(tool=tool, folder=folder / "whole")
    assert (whole["signal"], whole["said"]) == (0, ""), whole
    case.done(folder / "whole")
    number = {"killed": 0, "disk full": errno.ENOSPC, "disk broken": errno.EIO}[fault]
    for _ in range(times):
        at = folder / "now"
        shutil.copytree(folder / "before", at)
        limit = chance.randrange(whole["calls"])
        answer = ask(tool=tool, folder=at, limit=limit, tear=chance.random() < 0.5, fail=number)
        if number == 0:
            assert answer["signal"] in (signal.SIGKILL, 0), answer  # threads may make a call less than the first time
        else:
            assert answer["signal"] == 0, answer
            ours = any(answer["said"].startswith(cls.__name__) for cls in _errors())
            assert ours or answer["said"] == "", answer
        case.held(at)
        again = ask(tool=tool, folder=at)
        assert again["said"] == "" or (tool in MAY_RERUN and "nothing was overwritten" in again["said"]), again
        case.done(at)
        shutil.rmtree(at)
    return times


def _errors() -> list[type]:
    return [cls for cls in vars(pdlib.errors).values() if isinstance(cls, type) and issubclass(cls, PdlibError)]


def interrupt_saves(ask: Ask, folder: Path, action: str, times: int, *, seed: int) -> int:
    """Kill saves and prunes of a manager at random calls; see `interrupt`."""
    chance = random.Random(seed)
    with Manager(folder / "before" / "ckpts") as manager:
        for step in (1, 3, 4) if action == "prune" else (1,):
            save_state(manager, step, state_of(step))
        if action == "complete":
            save_state(manager, 2, state_of(2), process=False)
    shutil.copytree(folder / "before", folder / "whole")
    calls = ask(action=action, folder=folder / "whole" / "ckpts")["calls"]
    for _ in range(times):
        at = folder / "now"
        shutil.copytree(folder / "before", at)
        ask(action=action, folder=at / "ckpts", limit=chance.randrange(calls), tear=chance.random() < 0.5)
        before = shown(at)
        assert set(before) <= {1, 2, 3, 4}
        shutil.rmtree(at)
    return times


def damage_every_file(folder: Path, name: str, *, most: int) -> Counter[str]:
    """Delete, cut short and flip a bit of files of a corpus entry, each alone: verify finds it, no reader is fooled."""
    counts: Counter[str] = Counter()
    run = folder / "run"
    shutil.copytree(CORPUS / name, run)
    home = run / "ckpts" / "7"
    paths = [p for item in ("decomposition", "training") for p in sorted((home / item).rglob("*")) if p.is_file()]
    chosen = random.Random(1).sample(paths, min(most, len(paths)))
    for path in chosen:
        data = path.read_bytes()
        for kind, broken in _broken(data).items():
            path.unlink() if broken is None else path.write_bytes(broken)
            assert not verify_path(run), f"{kind}: {path}"
            _not_fooled(run, path, home)
            path.write_bytes(data)
            counts[kind] += 1
    assert verify_path(run)
    return counts


def _broken(data: bytes) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {"file deleted": None}
    if data:
        middle = len(data) // 2
        found["file cut short"] = data[:middle]
        found["bit flipped"] = data[:middle] + bytes([data[middle] ^ 8]) + data[middle + 1 :]
    return found


def _not_fooled(run: Path, path: Path, home: Path) -> None:
    """A reader that verifies refuses; another gives an error of ours, or what the files say, and never zeros."""
    if home / "decomposition" in path.parents:
        for host in (False, True):
            try:
                pdlib.open_run(run, verify=True, host=host)
            except PdlibError:
                continue
            raise AssertionError(f"opened with verification: {path}")
    try:
        opened = pdlib.open_run(run, host=True)
    except PdlibError:
        return
    for site, factors in opened.components.items():
        for found, true in zip(factors, product().components[site], strict=True):
            differing = int((np.asarray(found).view(np.uint32) != true.view(np.uint32)).sum())
            assert differing <= 1, f"{path}: {differing} values of {site} were changed in silence"


def open_while_training(folder: Path, times: int) -> int:
    """Open a run many times while another thread saves and prunes; every opening gives one step's product, whole."""
    run, over = folder / "run", threading.Event()
    keep = Retention(product=KeepNewest(2), process=KeepNewest(1))
    manager = Manager(run / "ckpts", retention=keep)
    save_state(manager, 0, state_of(0))

    def train() -> None:
        for step in range(1, 10**9):
            if over.is_set():
                return
            save_state(manager, step, state_of(step))

    trainer = threading.Thread(target=train)
    trainer.start()
    opened = 0
    try:
        while opened < times:
            found = pdlib.open_run(run, host=True)
            assert_bit_equal(found.decomposition, state_of(found.step).decomposition)
            opened += 1
    finally:
        over.set()
        trainer.join()
        manager.close()
    return opened


def save_many(folder: Path, times: int) -> tuple[int, int]:
    """Save and prune many times in one process, every other time in the background.

    Returns:
        by how many bytes its anonymous memory and by how many its open files grew over the last three quarters.
    """
    keep = Retention(product=KeepNewest(2), process=KeepNewest(1))
    before = (0, 0)
    with Manager(folder / "ckpts", retention=keep) as manager:
        for step in range(times):
            save_state(manager, step, state_of(step), background=bool(step % 2))
            if step == times // 4:
                manager.wait()
                before = _held()
        manager.wait()
        after = _held()
    return after[0] - before[0], after[1] - before[1]


def _held() -> tuple[int, int]:
    """Anonymous bytes and open files of this process."""
    gc.collect()
    rows = Path("/proc/self/status").read_text("ascii").splitlines()
    anonymous = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))
    return anonymous, len([*Path("/proc/self/fd").iterdir()])
