"""What migrating an older step costs, beside `cp` of the bytes kept and a restore and save in orbax, in one run.

    uv run python benchmarks/migrate.py [--width 1024]

An older step (layout era-c, one OCDBT item) is written with its product alone: d = width, ff = 3.5 width, C = 4 width,
an importance transformer of that width with 4 blocks; at 2048 it is 1.9 GB. Peak memory is anonymous, over what
imports take.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import orbax.checkpoint as ocp
from harness import keep, machine, measure, megabytes, table

PREPARE = """
from pdlib.items.contracts import default_registry
from pdlib.store.migrate import apply_migration, plan_migration
plan = plan_migration(SOURCE, TARGET, registry=default_registry())
"""
READ = "import orbax.checkpoint as ocp\nck = ocp.PyTreeCheckpointer()\n"


def older(width: int) -> dict:
    """The tree of an older step, without its process but for the step that every layout has."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    d, ff, C, m = width, 7 * width // 2, 4 * width, width
    sites = {"gate": (d, ff), "up": (d, ff), "down": (ff, d)}
    factors = {f"layers.18.mlp.{site}_proj": [draw(i, C), draw(C, o)] for site, (i, o) in sites.items()}
    shapes = {"wq": (m, m), "wk": (m, m), "wv": (m, m), "wo": (m, m)}
    shapes |= {"w1": (m, 4 * m), "b1": (4 * m,), "w2": (4 * m, m), "b2": (m,)}
    blocks = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(4)]
    ends = {"in_proj_w": draw(d, m), "in_proj_b": draw(m), "out_w": draw(m, 3 * C), "out_b": draw(3 * C)}
    ci_fn = {**ends, "blocks": blocks, "inv_freq": draw(32)}
    return {"components": {"vu": factors}, "ci_fn": ci_fn, "step": np.int32(7)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp())
    try:
        tree = older(asked.width)
        ocp.PyTreeCheckpointer().save(home / "old" / "7" / "default", tree)
        largest = max(4 * max(x.size for x in tree["ci_fn"]["blocks"][0].values()), tree["ci_fn"]["out_w"].size // 3)
        largest = 4 * max(largest, *(x.size for pair in tree["components"]["vu"].values() for x in pair))
        del tree
        names = f"SOURCE, TARGET = {str(home / 'old')!r}, {str(home / 'run')!r}\n"
        ours = measure(names + PREPARE, "apply_migration(plan)", repeats=1)
        kept = sum(p.stat().st_size for p in (home / "run").rglob("*") if p.is_file())
        read = f"ck.save({str(home / 'again')!r}, ck.restore({str(home / 'old' / '7' / 'default')!r}))"
        rival = measure(READ, read, repeats=1)
        start = time.perf_counter()
        subprocess.run(["cp", "-r", str(home / "run"), str(home / "copy")], check=True)
        copied = time.perf_counter() - start
        subprocess.run(["sync", "-f", str(home / "copy")], check=True)
        flushed = time.perf_counter() - start
        text = f"{machine()}\n\nkept {kept / 1e9:.2f} GB, largest leaf {megabytes(largest)} MB, width {asked.width}\n\n"
        rows = [
            ["", "seconds", "GB/s", "× the speed of cp, flushed", "peak anonymous MB"],
            *(
                [name, f"{s:.2f}", f"{kept / 1e9 / s:.2f}", f"{flushed / s:.2f}", peak]
                for name, s, peak in (
                    ("pdlib migrate, flushed and compared", ours.seconds, megabytes(ours.peak_anonymous)),
                    ("orbax: restore and save", rival.seconds, megabytes(rival.peak_anonymous)),
                    ("cp, into the page cache", copied, "–"),
                    ("cp, flushed", flushed, "–"),
                )
            ),
        ]
        text += table(rows) + f"\n\nallowed: two of the largest leaves and 300 MB, {megabytes(2 * largest + 300e6)} MB"
        print(text)
        keep(
            "migrate",
            {"report": text, "kept_bytes": kept, "largest_leaf": largest, "pdlib": ours, "orbax": rival, "cp": flushed},
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
