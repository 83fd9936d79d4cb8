"""Where it is kept: two-item steps, written atomically, opened by mapping. Only this room writes checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlib.store.checkpoint import Manager as Manager
    from pdlib.store.decomposition import init_from_parent as init_from_parent
    from pdlib.store.decomposition import restore_decomposition as restore_decomposition
    from pdlib.store.decomposition import restore_decomposition_to_host as restore_decomposition_to_host
    from pdlib.store.decomposition import restore_factors as restore_factors
    from pdlib.store.decomposition import restore_latest as restore_latest
    from pdlib.store.decomposition import restore_step as restore_step
    from pdlib.store.decomposition import save_state as save_state
    from pdlib.store.digest import Verification as Verification
    from pdlib.store.files import remove_leftovers as remove_leftovers
    from pdlib.store.retention import KeepAll as KeepAll
    from pdlib.store.retention import KeepMarked as KeepMarked
    from pdlib.store.retention import KeepNewest as KeepNewest
    from pdlib.store.retention import Retention as Retention

_HOMES = {
    "KeepAll": "retention",
    "KeepMarked": "retention",
    "KeepNewest": "retention",
    "Manager": "checkpoint",
    "Retention": "retention",
    "Verification": "digest",
    "init_from_parent": "decomposition",
    "remove_leftovers": "files",
    "restore_decomposition": "decomposition",
    "restore_decomposition_to_host": "decomposition",
    "restore_factors": "decomposition",
    "restore_latest": "decomposition",
    "restore_step": "decomposition",
    "save_state": "decomposition",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdlib.store' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pdlib.store.{_HOMES[name]}"), name)
