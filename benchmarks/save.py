"""What a save costs: pdlib beside orbax and beside plain parallel writes of the same bytes, in one run.

    uv run python benchmarks/save.py [--gigabytes 1.07] [--leaves 32]

Ratios come first, of each contender's best of three to plain writes; every contender writes the same arrays from memory
to a fresh directory beside the others, after a sync. `flushed` means that each file is fsynced, as pdlib does.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp

import pdlib

REPEATS = 3
Arrays = dict[str, jax.Array]


def plain(folder: Path, arrays: Arrays, *, flush: bool) -> None:
    """Write each array's bytes to a file of its own, four at a time."""

    def write(name: str) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            file.write(np.asarray(arrays[name]).data)
            if flush:
                os.fsync(file.fileno())

    folder.mkdir()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, arrays))


def orbax(folder: Path, arrays: Arrays, **options: bool) -> None:
    """Save through stock orbax."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))


def ours(folder: Path, arrays: Arrays) -> None:
    """Save through pdlib, manifest included."""
    registry = pdlib.Registry((pdlib.ItemSpec(name="item", leaves=[pdlib.LeafSpec(path="**")]),))
    with pdlib.Manager(folder, registry=registry) as manager:
        manager.save(0, {"item": arrays})


CONTENDERS: dict[str, Callable[[Path, Arrays], None]] = {
    "plain parallel writes": lambda folder, arrays: plain(folder, arrays, flush=False),
    "plain, flushed": lambda folder, arrays: plain(folder, arrays, flush=True),
    "pdlib raw, flushed": ours,
    "orbax raw": lambda folder, arrays: orbax(folder, arrays, use_ocdbt=False, use_compression=False),
    "orbax default": lambda folder, arrays: orbax(folder, arrays),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.07)
    parser.add_argument("--leaves", type=int, default=32)
    asked = parser.parse_args()
    width = int(asked.gigabytes * 1e9 / asked.leaves / 4 / 1024)
    random = np.random.default_rng(0)
    arrays = {f"x{i}": jax.device_put(random.standard_normal((1024, width), np.float32)) for i in range(asked.leaves)}
    total = sum(array.nbytes for array in arrays.values())
    best = dict.fromkeys(CONTENDERS, float("inf"))
    with tempfile.TemporaryDirectory() as home:
        for _ in range(REPEATS):
            for name, save in CONTENDERS.items():
                folder = Path(home) / "out"
                os.sync()
                start = time.perf_counter()
                save(folder, arrays)
                best[name] = min(best[name], time.perf_counter() - start)
                shutil.rmtree(folder)
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, orbax {ocp.__version__}")
    print(f"{total / 1e9:.2f} GB of float32 in {asked.leaves} leaves, best of {REPEATS}")
    print(f"{'':<24}{'× plain':>9}{'seconds':>9}{'GB/s':>7}")
    for name, seconds in best.items():
        ratio = seconds / best["plain parallel writes"]
        print(f"{name:<24}{ratio:>9.2f}{seconds:>9.3f}{total / 1e9 / seconds:>7.2f}")


if __name__ == "__main__":
    main()
