"""Where steps are: a path of this machine, or a place in an object store that reads like one; touches no file itself.

A place with a scheme (`s3://…`, `gs://…`, all that fsspec speaks) is a `upath.UPath`, which reads as a `Path` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from pdlib.errors import ContractError, PdlibError, Unreachable

P = ParamSpec("P")
R = TypeVar("R")
Place = TypeVar("Place")

_EXTRAS = {"s3": "pdlib[s3]", "s3a": "pdlib[s3]", "gs": "pdlib[gcs]", "gcs": "pdlib[gcs]"}


def locate(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, absolute, or a place in an object store that reads like one.

    Raises:
        ContractError: nothing is installed that speaks the scheme.
    """
    text = path if isinstance(path, str) else str(path)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(path).expanduser().absolute()
    if scheme in ("file", "local"):
        return Path(rest).absolute()
    import fsspec
    import upath

    try:
        fsspec.get_filesystem_class(scheme)
        return cast(Path, upath.UPath(text, use_listings_cache=False))  # a live run has new steps at every look
    except (ImportError, ValueError) as error:
        need = f"pip install '{_EXTRAS[scheme]}'" if scheme in _EXTRAS else "install the fsspec package that speaks it"
        raise ContractError(f"{text} cannot be read here: {error}\nTo read {scheme}:// paths, {need}.") from error


def is_remote(path: Any) -> bool:
    """Whether a path is a place in an object store."""
    return not isinstance(path, Path)


@contextmanager
def reaching(path: Any) -> Generator[None]:
    """Turn what a store's driver raises into an error of ours; does nothing for local paths.

    Raises:
        Unreachable: the store did not answer or refused; names it and the cause.
    """
    if not is_remote(path):
        yield
        return
    try:
        yield
    except PdlibError:
        raise
    except Exception as error:
        raise Unreachable(
            f"{path} cannot be read: {type(error).__name__}: {error}\n"
            "Check the address, the credentials and the network; nothing was changed."
        ) from error


def anywhere(function: Callable[Concatenate[Place, P], R]) -> Callable[Concatenate[Place, P], R]:
    """Mark a function as one that reads a place (its first argument, or that one's `directory`), near or far."""

    @wraps(function)
    def reading(place: Place, *args: P.args, **kwargs: P.kwargs) -> R:
        with reaching(getattr(place, "directory", place)):
            return function(place, *args, **kwargs)

    return reading
