"""Forks a child for each request on stdin: the child saves or prunes, and dies at a given call that changes the disk.

Run as a script; everything is imported once, and JAX starts in the children alone.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import pdlib
import pdlib.store
import pdlib.store.consolidate
import pdlib.store.convert
from pdlib.consumers.export import apply_export, plan_export
from pdlib.consumers.imports import apply_import, plan_import
from pdlib.items.contracts import default_registry
from pdlib.items.state import Decomposition, Factors, TrainingItem, TrainState
from pdlib.store import KeepNewest, Manager, Retention, save_state
from pdlib.store.migrate import apply_migration, plan_migration
from pdlib.store.prune import apply_prune, plan_prune
from pdlib.store.strip import apply_strip, plan_strip

CALLS = ("write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove", "open", "close", "utime", "link")
KEEP = Retention(product=KeepNewest(2), process=KeepNewest(1))


def state_of(seed: int) -> TrainState:
    """A small state of NumPy arrays, which starts no device."""
    random = np.random.default_rng(seed)

    def bits(*shape: int) -> np.ndarray:
        return random.integers(0, 2**32, shape, np.uint32).view(np.float32)

    product = Decomposition({"s": Factors(bits(4, 3), bits(3, 5))}, {})
    return TrainState(product, TrainingItem((), (), {"t": {"sources": {"s": bits(2, 4)}}}, np.asarray(seed, np.int32)))


def act(action: str, manager: Manager) -> None:
    """What the child does to a directory."""
    match action:
        case "save":
            save_state(manager, 2, state_of(2))
        case "background":
            save_state(manager, 2, state_of(2), background=True)
            manager.wait()
        case "complete":
            manager.resume_at(1)
            save_state(manager, 2, state_of(2))
        case "prune":
            manager.prune()
        case "keep":
            manager.keep(1)
        case _:
            raise ValueError(action)


def use(tool: str, folder: Path) -> None:
    """What the child does with a tool: `folder` holds a run, and what the tool makes or reads beside it."""
    match tool:
        case "strip":
            apply_strip(plan_strip(folder / "run"))
        case "strip, older step":
            apply_strip(plan_strip(folder / "run", keep_newest=0))
        case "strip --consolidate":
            apply_strip(plan_strip(folder / "run", consolidate=True))
        case "prune, afterwards":
            apply_prune(plan_prune(folder / "run", KEEP))
        case "migrate":
            apply_migration(plan_migration(folder / "source", folder / "run", registry=default_registry()))
        case "export":
            apply_export(plan_export(folder / "source", folder / "run"))
        case "import":
            apply_import(plan_import(folder / "source", folder / "run"))
        case _:
            raise ValueError(tool)


FAILING = ("write", "fsync", "rename", "replace", "mkdir", "link")


def count_calls(limit: int, *, tear: bool, fail: int = 0) -> list[int]:
    """Kill this process at the call after `limit` others; with `tear`, after half of what that call would write.

    With `fail`, calls that could fill a disk raise this error number from there on, and nobody is killed.
    """
    lock, made = threading.Lock(), [0]

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                made[0] += 1
                if made[0] > limit and fail:
                    if name in FAILING:
                        raise OSError(fail, os.strerror(fail))
                elif made[0] > limit:
                    if tear and name == "write":
                        function(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    return made


def child(request: dict[str, Any], answer: int) -> None:
    """Do what is asked, and answer with the number of calls and the error."""
    write = os.write
    if "file_size" in request:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if request["die"] else signal.SIG_IGN)
    if "user" in request:
        pdlib.open_run(Path(request["folder"]), verify=True)  # imports what the other user may not read
        os.setgid(request["user"])
        os.setuid(request["user"])
    made, error = [0], ""
    try:
        if request.get("action") == "touch":
            Path(request["folder"], "touched").touch()
        elif request.get("action") == "open":
            opened = pdlib.open_run(Path(request["folder"]), verify=True)
            error = f"step {opened.step} {sum(f.V.size + f.U.size for f in opened.components.values())}"
        elif "tool" in request:
            limit = request.get("limit", 10**9)
            made = count_calls(limit, tear=request.get("tear", False), fail=request.get("fail", 0))
            use(request["tool"], Path(request["folder"]))
        else:
            manager = Manager(request["folder"], layout=request.get("layout", "raw"), retention=KEEP)
            made = count_calls(
                request.get("limit", 10**9), tear=request.get("tear", False), fail=request.get("fail", 0)
            )
            act(request["action"], manager)
            manager.close()
    except Exception as refused:
        error = f"{type(refused).__name__}: {refused}"
    write(answer, json.dumps({"calls": made[0], "said": error}).encode())


def main() -> None:
    """Serve requests until stdin ends."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                child(json.loads(line), writing)
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": signalled, **(json.loads(text) if text else {})}), flush=True)


if __name__ == "__main__":
    main()
