"""A process killed at any system call of a save or a prune leaves the old state or the new one, whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from pdlib.errors import SaveFailed
from pdlib.store import KeepNewest, Manager, Retention, restore_decomposition, restore_latest, save_state
from pdlib.testing import assert_bit_equal
from tests.store.crash import state_of

ROOT = Path(__file__).resolve().parents[2]
BOTH, PRODUCT = ["decomposition", "training"], ["decomposition"]
Ask = Callable[..., dict[str, Any]]


@contextmanager
def serving() -> Iterator[Ask]:
    """Ask `tests.store.crash` to fork a child; answers with the signal that ended it, its calls and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.store.crash"]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip

        def request(**what: Any) -> dict[str, Any]:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in what.items()}) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield request
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """See `serving`."""
    with serving() as request:
        yield request


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what a kill leaves does not depend on the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def held(folder: Path) -> dict[int, list[str]]:
    """What a directory shows, every item of it read and compared to the bit with what was saved."""
    with Manager(folder, read_only=True) as manager:
        shown = {step: manager.items(step) for step in manager.steps()}
        for step in shown:
            assert manager.verify(step), manager.verify(step)
            assert_bit_equal(restore_decomposition(manager, step), state_of(step).decomposition)
        newest, state = restore_latest(manager, state_of(0))
        assert newest == max(step for step, items in shown.items() if items == BOTH)
        assert_bit_equal(state, state_of(newest))
    return shown


# action → the steps before it, and the states that may be seen while it runs, in order
ACTIONS: dict[str, tuple[dict[int, list[str]], list[dict[int, list[str]]]]] = {
    "save": ({1: BOTH}, [{1: BOTH}, {1: BOTH, 2: BOTH}, {1: PRODUCT, 2: BOTH}]),
    "background": ({1: BOTH}, [{1: BOTH}, {1: BOTH, 2: BOTH}, {1: PRODUCT, 2: BOTH}]),
    "complete": ({1: BOTH, 2: PRODUCT}, [{1: BOTH, 2: PRODUCT}, {1: BOTH, 2: BOTH}, {1: PRODUCT, 2: BOTH}]),
    "prune": (
        {1: BOTH, 3: BOTH, 4: BOTH},
        [
            {1: BOTH, 3: BOTH, 4: BOTH},
            {1: PRODUCT, 3: BOTH, 4: BOTH},
            {3: BOTH, 4: BOTH},
            {3: PRODUCT, 4: BOTH},
        ],
    ),
    "keep": ({1: BOTH}, [{1: BOTH}]),
}


def check_every_kill(ask: Ask, place: Path, action: str, layout: str, *, stride: int, tear: bool = False) -> None:
    before, expected = ACTIONS[action]
    with Manager(place / "before", layout=layout) as manager:  # pyright: ignore
        for step, items in before.items():
            save_state(manager, step, state_of(step), process=items == BOTH)
    shutil.copytree(place / "before", place / "whole")
    done = ask(action=action, folder=place / "whole", layout=layout)
    assert (done["signal"], done["said"]) == (0, "")
    assert held(place / "whole") == expected[-1]
    assert sorted(p.name for p in (place / "whole").iterdir()) == sorted(map(str, expected[-1]))
    seen: list[dict[int, list[str]]] = []
    for limit in range(0, done["calls"], stride):
        folder = place / "killed"
        shutil.copytree(place / "before", folder)
        killed = ask(action=action, folder=folder, layout=layout, limit=limit, tear=tear)
        assert killed["signal"] == signal.SIGKILL or not tear, "the counts of threads may vary a little"
        seen.append(held(folder))
        assert seen[-1] in expected, (limit, seen[-1])
        if limit % 5 == 0:
            with Manager(folder) as manager:  # what was left blocks nothing
                save_state(manager, 9, state_of(9), process=False)
                assert manager.latest() == 9
        shutil.rmtree(folder)
    assert seen[0] == expected[0]
    order = [expected.index(state) for state in seen]
    assert order == sorted(order), "a later kill showed an earlier state"
    if stride == 1:
        assert sorted(set(order)) == [*range(len(expected))]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_kill_at_any_call_leaves_whole_steps(ask, place, action):
    check_every_kill(ask, place, action, "raw", stride=1)


def test_a_kill_in_the_middle_of_any_write_leaves_whole_steps(ask, place):
    check_every_kill(ask, place, "save", "raw", stride=3, tear=True)


@pytest.mark.parametrize("action", ["save", "prune"])
def test_a_kill_between_the_calls_of_orbax_leaves_whole_steps(ask, place, action):
    check_every_kill(ask, place, action, "ocdbt", stride=7)


@pytest.mark.parametrize(("layout", "sizes"), [("raw", (0, 7, 40, 200, 460, 700)), ("ocdbt", (0, 200, 300, 700))])
@pytest.mark.parametrize("die", [False, True])
def test_a_write_that_the_kernel_refuses_or_kills_leaves_the_old_state(ask, place, layout, sizes, die):
    """A limit on the size of files strikes below Python, in TensorStore's threads too."""
    folder = place / "steps"
    with Manager(folder, layout=layout) as manager:
        save_state(manager, 1, state_of(1))
    for size in sizes:
        done = ask(action="save", folder=folder, layout=layout, file_size=size, die=die)
        if die:
            assert done["signal"] == signal.SIGXFSZ
        else:
            assert done["said"].startswith(f"SaveFailed: step 2 was not saved to {folder}: ")
            assert done["said"].endswith("\nNothing was committed: mend the cause, save again.")
            assert "File too large" in done["said"]
            assert [p.name for p in folder.iterdir()] == ["1"]
        assert held(folder) == {1: BOTH}
    assert ask(action="save", folder=folder, layout=layout)["said"] == ""
    assert held(folder) == {1: PRODUCT, 2: BOTH}


def test_a_reader_who_may_not_write_opens_a_run(ask, tmp_path_factory):
    user = {"user": 65534} if os.getuid() == 0 else {}
    run = tmp_path_factory.mktemp("shared") / "run"
    with Manager(run / "ckpts") as manager:
        save_state(manager, 1, state_of(1))
    opened_up = [parent for parent in run.parents if "pytest-" in str(parent)]
    for folder in opened_up:
        folder.chmod(0o755)
    entries = [run, *run.rglob("*")]
    for path in entries:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in entries}
    try:
        done = ask(action="open", folder=run, **user)
        assert done["said"] == "step 1 27"
        assert ask(action="touch", folder=run, **user)["said"].startswith("PermissionError")
        assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before
    finally:
        for path in entries:
            path.chmod(0o755)
        for folder in opened_up:
            folder.chmod(0o700)


# Orbax's own writer threads report the error once more, and leave their event loop behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("layout", ["raw", "ocdbt"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename"])
def test_a_full_disk_at_any_call_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, layout, call, background):
    state = jax.tree.map(jax.numpy.asarray, state_of(2))
    real = getattr(os, call)
    for good in range(400):
        left = good

        def limited(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        folder = tmp_path / str(good)
        with Manager(folder, layout=layout) as manager:
            with monkeypatch.context() as patch:
                patch.setattr(os, call, limited)
                try:
                    save_state(manager, 2, state, background=background)
                    manager.wait()
                except SaveFailed as error:
                    refused = str(error)
                else:
                    assert manager.verify(2)
                    break
            assert refused == (
                f"step 2 was not saved to {folder}: [Errno 28] No space left on device\n"
                "Nothing was committed: mend the cause, save again."
            )
            assert manager.steps() == [], "a refused save left a step"
            assert not folder.exists() or not list(folder.iterdir())
        if layout == "ocdbt" and good > 3:
            break
    else:
        raise AssertionError("the save never succeeded")


def test_a_write_that_takes_fewer_bytes_than_given_is_continued(tmp_path, monkeypatch):
    real = os.write
    with Manager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda handle, data: real(handle, memoryview(data)[:5]))
            save_state(manager, 2, state_of(2))
        assert manager.verify(2)
    assert held(tmp_path) == {2: BOTH}


@pytest.mark.parametrize(("call", "said"), [("rename", True), ("fsync", True), ("unlink", False), ("rmdir", False)])
def test_a_deletion_that_fails_loses_nothing_and_is_made_up_for(tmp_path, monkeypatch, call, said):
    keep = Retention(product=KeepNewest(1), process=KeepNewest(1))
    with Manager(tmp_path, retention=keep) as manager:
        save_state(manager, 1, state_of(1))
        real, spare = getattr(os, call), int(call == "fsync")  # one fsync after the rename belongs to the commit

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal spare
            if (tmp_path / "2").exists():
                spare -= 1
                if spare < 0:
                    raise OSError(5, "Input/output error")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            refused = ""
            try:
                save_state(manager, 2, state_of(2))
            except SaveFailed as error:
                refused = str(error)
        want = "step 2 is saved, but an older one could not be deleted: [Errno 5] Input/output error"
        assert refused == (want if said else "")
        assert held(tmp_path) in ({1: BOTH, 2: BOTH}, {1: PRODUCT, 2: BOTH}, {2: BOTH})
        save_state(manager, 3, state_of(3))
        assert held(tmp_path) == {3: BOTH}
