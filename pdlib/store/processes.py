"""What several JAX processes must agree on during one save; with one process every function here costs nothing."""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any

import jax
import numpy as np

_TIMEOUT_MS = 600_000


def is_lead() -> bool:
    """Whether this process writes what only one process may write."""
    return jax.process_index() == 0


def agreed_token() -> str:
    """A random name that every process gets alike; a collective operation, to be called from the main thread."""
    token = secrets.randbits(48)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        halves = np.array([token >> 24, token & 0xFFFFFF], np.int32)
        high, low = (int(half) for half in multihost_utils.broadcast_one_to_all(halves))
        token = high << 24 | low
    return f"{token:012x}"


def barrier(name: str) -> None:
    """Wait until every process is here; uses no device, so that a background thread may wait."""
    if jax.process_count() > 1:
        _sync()(key=f"pdlib-{name}", timeout_ms=_TIMEOUT_MS)


@cache
def _sync() -> Any:
    import orbax.checkpoint as ocp

    return ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
