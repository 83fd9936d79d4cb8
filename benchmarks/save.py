"""What a save costs: pdlib beside orbax and beside plain parallel writes of the same bytes, in one run.

    uv run python benchmarks/save.py [--scale small | half | full]

1.07, 4.3 or 10 GB of normal float32 numbers in leaves of 33 MB. Each contender writes the same arrays of JAX from
memory to a fresh directory, in a process of its own, after a sync; `flushed` means fsynced, as pdlib does.
Without digests, pdlib's save is timed with its hash function replaced by none. The stall of a background save is the
time until it returns; its rival is one copy of the same bytes by NumPy.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from harness import Result, bars, keep, machine, measure, megabytes, table

LEAVES = {"small": 32, "half": 128, "full": 298}

PREPARE = """
import os, shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import jax, numpy as np, orbax.checkpoint as ocp, pdlib
random = np.random.default_rng(0)
arrays = {f"x{i}": jax.device_put(random.standard_normal((1024, 8192), np.float32)) for i in range(LEAVES)}
shutil.rmtree(OUT, ignore_errors=True)
os.sync()
def plain(flush):
    def write(name):
        with open(f"{OUT}/{name}", "wb", buffering=0) as file:
            file.write(np.asarray(arrays[name]).data)
            if flush:
                os.fsync(file.fileno())
    os.mkdir(OUT)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, arrays))
def orbax(**options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(OUT, args=ocp.args.PyTreeSave(arrays))
registry = pdlib.Registry((pdlib.ItemSpec(name="item", leaves=[pdlib.LeafSpec(path="**")]),))
manager = pdlib.Manager(OUT, registry=registry)
"""
NO_DIGESTS = """
import pdlib.store.files
class Nothing:
    update = lambda self, data: None
    hexdigest = lambda self: "0" * 64
pdlib.store.files.blake3 = Nothing
import pdlib.store.stored
pdlib.store.stored.StoredItem.check_whole = lambda self: None
"""

WRITES = {
    "plain parallel writes": ("", "plain(False)"),
    "plain parallel writes, flushed": ("", "plain(True)"),
    "pdlib": ("", "manager.save(0, {'item': arrays})"),
    "pdlib, without digests": (NO_DIGESTS, "manager.save(0, {'item': arrays})"),
    "orbax, raw": ("", "orbax(use_ocdbt=False, use_compression=False)"),
    "orbax, default": ("", "orbax()"),
    "pdlib in the background: stall": ("", "manager.save(0, {'item': arrays}, background=True)"),
    "one copy in memory": ("", "copied = [np.array(array) for array in arrays.values()]"),
}
GOALS = (  # what is asked: contender, rival, and how many times faster it has to be
    ("pdlib", "orbax, default", 3.0),
    ("pdlib", "orbax, raw", 1.0),
    ("pdlib", "plain parallel writes, flushed", 0.8),
    ("pdlib", "plain parallel writes", 0.8),
    ("pdlib", "pdlib, without digests", 1 / 1.15),
    ("pdlib in the background: stall", "one copy in memory", 1 / 1.2),
)


def report(found: dict[str, Result], total: float, scale: str) -> str:
    """The tables: ratios, then what each contender took."""
    rows = [["pdlib", "rival", "times as fast", "goal"]]
    for ours, rival, goal in GOALS:
        rows.append([ours, rival, f"{found[rival].seconds / found[ours].seconds:.2f}", f"≥ {goal:.2g}"])
    details = [["contender", "seconds", "GB/s", "peak anonymous MB"]]
    for name, result in found.items():
        speed = f"{total / 1e9 / result.seconds:.2f}"
        details.append([name, f"{result.seconds:.3f}", speed, megabytes(result.peak_anonymous)])
    head = f"{machine()}\n\n{total / 1e9:.2f} GB in {LEAVES[scale]} leaves, scale {scale}"
    return f"{head}\n\n{table(rows)}\n\n{table(details)}"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=LEAVES, default="small")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    leaves = LEAVES[asked.scale]
    home = Path(tempfile.mkdtemp())
    prepare = f"LEAVES, OUT = {leaves}, {str(home / 'out')!r}\n{PREPARE}"
    found: dict[str, Result] = {}
    try:
        for _ in range(asked.repeats):  # in turns, so that a noisy minute is nobody's alone
            for name, (more, work) in WRITES.items():
                result = measure(prepare + more, work, repeats=1)
                if name not in found or result.seconds < found[name].seconds:
                    found[name] = result
    finally:
        shutil.rmtree(home, ignore_errors=True)
    text = report(found, leaves * 1024 * 8192 * 4, asked.scale)
    print(text)
    name = f"save_{asked.scale}"
    keep(name, {"report": text, **found})
    bars(name, {name: result.seconds for name, result in found.items()}, f"saving, {asked.scale}")


if __name__ == "__main__":
    main()
