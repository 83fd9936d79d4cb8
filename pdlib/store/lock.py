"""One writer of a run at a time: a lock that goes with its process, however that ends; knows no step."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pdlib.errors import RunConflict

LOCK_FILE = ".lock"


@contextmanager
def locked(run: Path, *, hint: str = "wait for it, or stop it first") -> Generator[None]:
    """Hold a run for this process; the directory is made if it is not there.

    Raises:
        RunConflict: another process holds it, because it trains in it, or strips, prunes or migrates it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunConflict(f"another process is at work in {run}; {hint}") from error
        yield


def is_locked(run: Path) -> bool:
    """Whether another process holds a run; writes nothing."""
    try:
        with (run / LOCK_FILE).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
