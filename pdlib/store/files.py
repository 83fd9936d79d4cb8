"""The few file operations that make a save atomic: write, hash, flush, rename, discard; knows no array and no item."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from blake3 import blake3

from pdlib.errors import SaveFailed, StepRefused
from pdlib.store.lock import LOCK_FILE, is_locked, locked

P = ParamSpec("P")
R = TypeVar("R")

STAGING = ".staging-"
TRASH = ".trash-"
REWRITING = f"{STAGING}rewriting-"  # of who holds the run: what is left of it belongs to nobody
_FREE = """
import os, shutil, sys
if os.fork() == 0:  # the parent ends at once, so that nobody waits for the child and none is left behind
    for path in sys.argv[1:]:
        shutil.rmtree(path, ignore_errors=True)
os._exit(0)
"""
_COMPARED = 1 << 20  # bytes compared at a time: small enough to stay in the processor's cache
_PIECE = 16 << 20  # bytes hashed and written at a time: the second pass finds them in cache


def write_file(path: Path, data: bytes | memoryview) -> dict[str, object]:
    """Write a new file, flush it to the disk, and return its manifest entry: `size` and `blake3`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    view = memoryview(data)
    digest = blake3()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            digest.update(piece)
            done = 0
            while done < len(piece):
                done += os.write(handle, piece[done:])
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"size": len(view), "blake3": digest.hexdigest()}


def hash_file(path: Path) -> dict[str, object]:
    """The manifest entry of an existing file."""
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path)
    return {"size": path.stat().st_size, "blake3": digest.hexdigest()}


def settle(path: Path) -> dict[str, object]:
    """Flush a file that another library wrote, let those read it who may read its directory, and hash it."""
    path.chmod(path.parent.stat().st_mode & 0o666)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return hash_file(path)


def holds(path: Path, data: memoryview) -> bool:
    """Whether a file, as it reads now, has these bytes and no others; a piece at a time is in memory."""
    if path.stat().st_size != len(data):
        return False
    piece = np.empty(_COMPARED, np.uint8)
    wanted = np.frombuffer(data, np.uint8)
    with path.open("rb", buffering=0) as file:
        start = 0
        while start < len(wanted):
            count = file.readinto(piece.data)
            if not count or not np.array_equal(piece[:count], wanted[start : start + count]):
                return False
            start += count
    return True


def flush_tree(directory: Path) -> None:
    """Flush every directory below and including this one, so that the names in them survive a power cut."""
    for folder, _, _ in os.walk(directory):
        flush_directory(Path(folder))


def flush_directory(directory: Path) -> None:
    """Flush one directory's entries."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename a staged directory into place, flushed.

    Raises:
        StepRefused: the target exists.
    """
    if os.path.lexists(target):
        raise StepRefused(f"{target} exists; nothing was overwritten")
    source.rename(target)
    try:
        flush_directory(target.parent)
    except OSError:
        target.rename(source)  # what may not outlive a power cut is not committed
        raise


def discard(path: Path, *, home: Path) -> None:
    """Remove a directory so that no instant shows a part of it; nothing to do where there is none."""
    trash = set_aside(path, home=home)
    if trash is not None:
        delete(trash)


def set_aside(path: Path, *, home: Path) -> Path | None:
    """Rename a directory, flushed, to a hidden name in `home`, where it is nothing any more; None if there is none."""
    trash = home / f"{TRASH}{secrets.token_hex(6)}"
    try:
        path.rename(trash)
    except FileNotFoundError:
        return None
    flush_directory(path.parent)
    return trash


def delete(path: Path) -> None:
    """Delete a directory that is nothing any more."""
    shutil.rmtree(path, ignore_errors=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole, or as it was; flushed."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        write_file(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush_directory(path.parent)


def free_later(trash: Sequence[Path]) -> None:
    """Delete what was set aside in a process of its own: giving back gigabytes takes a file system seconds."""
    if trash:
        command = [sys.executable, "-I", "-S", "-c", _FREE, *map(str, trash)]
        null = subprocess.DEVNULL
        subprocess.run(command, check=False, start_new_session=True, stdin=null, stdout=null, stderr=null)


def exchange(one: Path, other: Path) -> None:
    """Let two directories of one file system change places in a single step, flushed.

    Raises:
        OSError: the file system or the system cannot do that; nothing was changed.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system cannot exchange two directories in one step") from error
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), swap):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (exchanging two directories in one step)", str(one))
    for parent in {one.parent, other.parent}:
        flush_directory(parent)


def changing(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that changes files: what the system refuses it becomes an error of ours.

    Raises:
        SaveFailed: a file or directory could not be written, renamed or deleted; the cause is attached.
    """

    @wraps(function)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise SaveFailed(
                f"{error}\nNothing that was there is lost: mend the cause, and run it again to end what was begun."
            ) from error

    return attempt


@contextmanager
def staged(target: Path) -> Generator[Path]:
    """A hidden directory beside `target` that becomes it by one rename when all went well, and is gone otherwise.

    What killed processes left of earlier attempts is deleted; what another one is making is not.

    Raises:
        StepRefused: the target exists.
    """
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{STAGING}{target.name}-"
    for entry in [*target.parent.iterdir()]:
        if entry.name.startswith(prefix) and not is_locked(entry):
            delete(entry)
    staging = target.parent / f"{prefix}{secrets.token_hex(6)}"
    try:
        with locked(staging):
            yield staging
            flush_tree(staging)
            move(staging, target)
            with contextlib.suppress(OSError):  # held until here: a staging without its lock is anybody's to delete
                (target / LOCK_FILE).unlink()
    finally:
        remove_staging(staging)


def check_free(target: Path) -> None:
    """Refuse a target that is there.

    Raises:
        StepRefused: it exists.
    """
    if os.path.lexists(target):
        raise StepRefused(f"{target} exists; nothing was overwritten: pass a directory that is not there")


def remove_staging(staging: Path) -> None:
    """Delete a save's own staging directory; a failed OCDBT write may still be adding files for a moment."""
    for pause in (0.0, 0.01, 0.05, 0.2, 0.5, 1.0):
        time.sleep(pause)
        shutil.rmtree(staging, ignore_errors=True)
        if not staging.exists():
            return


def remove_leftovers(directory: Path) -> None:
    """Delete what killed saves and deletions left; only for who knows that no other process is saving here."""
    for entry in [*directory.iterdir()] if directory.is_dir() else []:
        if entry.name.startswith((STAGING, TRASH)):
            with contextlib.suppress(OSError):
                shutil.rmtree(entry)
