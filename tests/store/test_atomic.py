"""A process killed at any system call of a save or a prune leaves the old state or the new one, whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from pdlib.errors import SaveFailed
from pdlib.store import Manager, restore_decomposition, restore_latest, save_state
from pdlib.testing import assert_bit_equal
from tests.store.test_cases import state_of

# A child that kills itself at the n-th call that changes the disk, while it saves step 2 and prunes step 1.
CHILD = """
import os, sys, signal
from pathlib import Path
folder, count, layout, background = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "background"
from pdlib.store import KeepNewest, Manager, Retention, save_state
from tests.store.test_cases import state_of
import orbax.checkpoint
state = state_of(2, sites=("s",))
import builtins, pathlib, shutil
left = count
def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
keep = Retention(product=KeepNewest(2), process=KeepNewest(1))
with Manager(folder, layout=layout, retention=keep) as manager:
    for name in ("write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open", "close"):
        setattr(os, name, counted(getattr(os, name)))
    save_state(manager, 2, state, background=background)
    manager.wait()
    print(count - left)
"""


def child(folder: Path, count: int, layout: str, mode: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", CHILD, str(folder), str(count), layout, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.returncode, done.stdout


def check_whole(folder: Path) -> list[int]:
    abstract = jax.eval_shape(lambda: state_of(1, sites=("s",)))
    with Manager(folder, read_only=True) as manager:
        steps = manager.steps()
        assert steps in ([1], [1, 2])
        for step in steps:
            assert manager.verify(step), manager.verify(step)
            assert_bit_equal(restore_decomposition(manager, step), state_of(step, sites=("s",)).decomposition)
        newest, state = restore_latest(manager, abstract)
        assert newest == steps[-1]
        assert_bit_equal(state, state_of(newest, sites=("s",)))
    return steps


@pytest.mark.parametrize(("layout", "mode"), [("raw", "sync"), ("raw", "background"), ("ocdbt", "sync")])
def test_a_kill_at_any_call_leaves_whole_steps(tmp_path, layout, mode):
    with Manager(tmp_path / "first", layout=layout) as manager:
        save_state(manager, 1, state_of(1, sites=("s",)))
    shutil.copytree(tmp_path / "first", tmp_path / "all")
    code, printed = child(tmp_path / "all", 1_000_000, layout, mode)
    assert code == 0
    total = int(printed)
    assert check_whole(tmp_path / "all") == [1, 2]
    seen, kills = set(), 0
    points = sorted({*range(total - 12, total, 2), *range(0, total, max(1, total // 4))})
    for count in points:
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "first", folder)
        code, _ = child(folder, count, layout, mode)
        kills += code == -signal.SIGKILL  # the counts of threads vary a little from run to run
        seen.add(tuple(check_whole(folder)))
        with Manager(folder) as manager:  # what was left blocks nothing
            save_state(manager, 3, state_of(3, sites=("s",)))
            assert manager.latest() == 3
    assert seen == {(1,), (1, 2)}
    assert kills >= len(points) // 2


# Orbax's own writer threads report the error once more, and leave their event loop behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("layout", ["raw", "ocdbt"])
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename"])
def test_a_full_disk_at_any_call_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, layout, call):
    state = state_of(2, sites=("s",))
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
                    save_state(manager, 2, state)
                except SaveFailed as error:
                    refused = str(error)
                else:
                    assert manager.verify(2)
                    break
            assert "No space left on device" in refused
            assert manager.steps() == [], "a refused save left a step"
            assert not folder.exists() or not list(folder.iterdir())
        if layout == "ocdbt" and good > 3:
            break
    else:
        raise AssertionError("the save never succeeded")
