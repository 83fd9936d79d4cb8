"""pdlib: decompose any Haiku model into rank-one components, and keep the result in checkpoints that open at once.

The names below are the whole public surface of the top level; each is imported when first used, so that
`import pdlib` loads neither jax nor orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlib.consumers.open import OpenedRun as OpenedRun
    from pdlib.consumers.open import open_run as open_run
    from pdlib.errors import PdlibError as PdlibError
    from pdlib.items.contracts import load_contract as load_contract
    from pdlib.items.registry import Registry as Registry
    from pdlib.items.specs import ItemSpec as ItemSpec
    from pdlib.items.specs import LeafSpec as LeafSpec
    from pdlib.items.state import Decomposition as Decomposition
    from pdlib.items.state import Factors as Factors
    from pdlib.items.state import Site as Site
    from pdlib.items.state import TrainingItem as TrainingItem
    from pdlib.items.state import TrainState as TrainState
    from pdlib.items.state import init_decomposition as init_decomposition
    from pdlib.store.checkpoint import Manager as Manager
    from pdlib.targets.target import Target as Target
    from pdlib.targets.task import Task as Task

_HOMES = {
    "Decomposition": "pdlib.items.state",
    "Factors": "pdlib.items.state",
    "ItemSpec": "pdlib.items.specs",
    "LeafSpec": "pdlib.items.specs",
    "Manager": "pdlib.store.checkpoint",
    "OpenedRun": "pdlib.consumers.open",
    "PdlibError": "pdlib.errors",
    "Registry": "pdlib.items.registry",
    "Site": "pdlib.items.state",
    "Target": "pdlib.targets.target",
    "Task": "pdlib.targets.task",
    "TrainState": "pdlib.items.state",
    "TrainingItem": "pdlib.items.state",
    "init_decomposition": "pdlib.items.state",
    "load_contract": "pdlib.items.contracts",
    "open_run": "pdlib.consumers.open",
}
__all__ = [
    "Decomposition",
    "Factors",
    "ItemSpec",
    "LeafSpec",
    "Manager",
    "OpenedRun",
    "PdlibError",
    "Registry",
    "Site",
    "Target",
    "Task",
    "TrainState",
    "TrainingItem",
    "init_decomposition",
    "load_contract",
    "open_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdlib' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
