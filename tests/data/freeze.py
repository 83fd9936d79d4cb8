"""Adds a checkpoint of today's layout to the frozen corpus; what is there is never written again.

    uv run python -m tests.data.freeze

The entries `era-a`, `era-b`, `era-c` and `split` came from programs that are not pdlib, and cannot be made here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CORPUS = Path(__file__).parent / "corpus"
STEP = 7


def product() -> Any:
    """A small decomposition: random bits, NaN payloads and subnormals among them."""
    from pdlib.items.state import Decomposition, Factors

    random = np.random.default_rng(7)

    def bits(*shape: int) -> np.ndarray:
        return random.integers(0, 2**32, shape, np.uint32).view(np.float32)

    components = {site: Factors(bits(6, 4), bits(4, 10)) for site in ("layers.0.mlp.up", "layers.0.mlp/~/down")}
    return Decomposition(components, {"importance/~/layer": {"w": bits(3, 4), "b": bits(4)}})


def process() -> Any:
    """A process that continues it."""
    import jax
    import jax.numpy as jnp
    import optax

    from pdlib.items.state import TrainingItem

    found = product()
    optimizer = optax.adamw(1e-3)
    return TrainingItem(
        optimizer.init(jax.tree.map(jnp.zeros_like, found.components)),
        optimizer.init(jax.tree.map(jnp.zeros_like, found.ci_fn)),
        {},
        np.asarray(STEP, np.int32),
    )


def _saved(run: Path, layout: Any, *, devices: int = 1) -> None:
    import jax

    from pdlib.items.state import TrainState
    from pdlib.store import Manager, save_state

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("fsdp",))

    def place(leaf: Any) -> Any:
        split = devices > 1 and np.ndim(leaf) == 2 and np.shape(leaf)[1] == 4
        return jax.device_put(
            leaf, jax.NamedSharding(mesh, jax.P(None, "fsdp" if split else None) if split else jax.P())
        )

    with Manager(run / "ckpts", layout=layout) as manager:
        save_state(manager, STEP, jax.tree.map(place, TrainState(product(), process())))


def _stripped(run: Path, *, consolidate: bool) -> None:
    from pdlib.store.strip import apply_strip, plan_strip

    _saved(run, "raw", devices=4)
    apply_strip(plan_strip(run, keep_newest=0, consolidate=consolidate))


ENTRIES: dict[str, Callable[[Path], None]] = {
    "raw.v1": lambda run: _saved(run, "raw"),
    "raw-shards.v1": lambda run: _saved(run, "raw", devices=4),
    "ocdbt.v1": lambda run: _saved(run, "ocdbt"),
    "stripped.v1": lambda run: _stripped(run, consolidate=False),
    "consolidated.v1": lambda run: _stripped(run, consolidate=True),
}


def main() -> None:
    """Make the entries that are not there yet."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    for name, make in ENTRIES.items():
        if not (CORPUS / name).exists():
            with tempfile.TemporaryDirectory(dir=CORPUS) as folder:
                make(Path(folder) / name)
                (Path(folder) / name / ".lock").unlink(missing_ok=True)
                shutil.move(Path(folder) / name, CORPUS / name)


if __name__ == "__main__":
    main()
