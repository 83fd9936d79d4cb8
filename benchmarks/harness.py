"""Measures contenders, each in a process of its own: time, anonymous memory at its peak, mapped pages; makes tables.

A contender is Python source: `prepare` runs before the clock starts (imports, what is not the point), `work` is timed.
Anonymous memory is the kernel's RssAnon, sampled every few milliseconds; mapped file pages, RssFile, stand beside it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "tensorstore", "safetensors")

CHILD = """
import gc, json, sys, threading, time

def memory():
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file if line.startswith("Rss"))
    return {name: int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.anon, self.file, self.over = 0, 0, threading.Event()
    def run(self):
        while not self.over.wait(0.003):
            self.look()
    def look(self):
        now = memory()
        self.anon, self.file = max(self.anon, now["RssAnon"]), max(self.file, now["RssFile"])

arguments = json.loads(sys.argv[1])
exec(compile(arguments["prepare"], "prepare", "exec"))
gc.collect()
before, peak = memory(), Peak()
peak.start()
start = time.perf_counter()
exec(compile(arguments["work"], "work", "exec"))
seconds = time.perf_counter() - start
peak.over.set(); peak.join(); peak.look()
after = memory()
print("RESULT" + json.dumps({
    "seconds": seconds,
    "peak_anonymous": peak.anon - before["RssAnon"],
    "kept_anonymous": after["RssAnon"] - before["RssAnon"],
    "mapped_pages": peak.file - before["RssFile"],
}))
"""


@dataclass(frozen=True)
class Result:
    """What one contender took: seconds, and bytes over what its process had before the clock started."""

    seconds: float
    peak_anonymous: int
    kept_anonymous: int
    mapped_pages: int


def measure(
    prepare: str,
    work: str,
    *,
    devices: int = 1,
    cold: Iterable[Path] = (),
    repeats: int = 3,
    environment: Mapping[str, str] | None = None,
    memory: int = 0,
) -> Result:
    """The fastest of several runs, each in a fresh process; before each, files under `cold` leave the page cache.

    A virtual machine may hand free memory back to its host, and get it again slowly: whoever allocates first would pay
    for all. So before each run `memory` bytes are touched and freed.
    """
    environment = {
        **os.environ,
        **(environment or {}),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    found: list[Result] = []
    for _ in range(repeats):
        for root in cold:
            forget(root)
        touch(memory)
        command = [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps({"prepare": prepare, "work": work})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if "RESULT" not in done.stdout:
            raise RuntimeError(f"a contender failed:\n{work}\n{done.stderr[-3000:]}")
        found.append(Result(**json.loads(done.stdout.rpartition("RESULT")[2])))
    return min(found, key=lambda result: result.seconds)


def touch(nbytes: int) -> None:
    """Write to this much fresh memory and free it."""
    if nbytes:
        np.full(nbytes, 1, np.uint8)


def forget(root: Path) -> None:
    """Let every file below a directory leave the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def machine() -> str:
    """The machine by its kind, and the versions that were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    kind = f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    return f"{kind}; Python {platform.python_version()}, {versions}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def megabytes(nbytes: float) -> str:
    """Bytes as MB, for tables."""
    return f"{nbytes / 1e6:,.0f}"


def keep(name: str, results: Mapping[str, Any]) -> Path:
    """Write results as JSON beside the benchmarks' other output, for `benchmarks/report.py` and for the curious."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    plain = {key: asdict(value) if isinstance(value, Result) else value for key, value in results.items()}
    path.write_text(json.dumps({"machine": machine(), **plain}, indent=2) + "\n", "utf-8")
    return path


def bars(name: str, seconds: Mapping[str, float], title: str) -> Path:
    """A figure of seconds, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.35 * len(seconds) + 1), layout="constrained")
    axes.barh(list(seconds)[::-1], list(seconds.values())[::-1], color="#4878a8")
    axes.set(xscale="log", xlabel="seconds", title=title)
    path = Path(__file__).parent / "results" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
