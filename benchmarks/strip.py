"""What stripping costs: letting the process of a step go, beside copying the product that is kept, in one run.

    uv run python benchmarks/strip.py [--scale small | half | full]

A step as `restore_8b.py` has it at that scale is stripped; `cp` copies its product; orbax restores the product and
saves it again. The bytes are given back by a process of their own, whose time stands apart.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from harness import keep, machine, table
from restore_8b import SCALES, write


def timed(work) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="small")
    asked = parser.parse_args()
    home = Path(tempfile.mkdtemp())
    try:
        write(home, SCALES[asked.scale], whole=False)
        run, step = home / "one", home / "one" / "ckpts" / "1"
        kept, freed = (sum(p.stat().st_size for p in (step / i).rglob("*")) for i in ("decomposition", "training"))

        def copy() -> None:
            subprocess.run(["cp", "-r", str(step / "decomposition"), str(home / "copy")], check=True)
            subprocess.run(["sync", "-f", str(home / "copy")], check=True)

        def again() -> None:
            import orbax.checkpoint as ocp

            checkpointer = ocp.PyTreeCheckpointer()
            checkpointer.save(home / "again", checkpointer.restore(home / "orbax_product"))

        from pdlib.store.strip import apply_strip, plan_strip

        seconds = {"cp of the product, flushed": timed(copy), "orbax: restore the product and save it": timed(again)}
        plan: list = []
        seconds["pdlib: plan"] = timed(lambda: plan.append(plan_strip(run, keep_newest=0)))
        seconds["pdlib: strip"] = timed(lambda: apply_strip(plan[0], wait=False))
        seconds["giving the bytes back, in a process of its own"] = timed(lambda: wait(run / "ckpts"))
        whole = seconds["pdlib: plan"] + seconds["pdlib: strip"]
        rows = [["", "seconds", "times the plan and the strip"]]
        text = f"{machine()}\n\nkept {kept / 1e9:.2f} GB, freed {freed / 1e9:.2f} GB, scale {asked.scale}\n\n"
        text += table([*rows, *([name, f"{s:.4f}", f"{s / whole:,.1f}"] for name, s in seconds.items())])
        print(text)
        keep(f"strip_{asked.scale}", {"report": text, "kept_bytes": kept, "freed_bytes": freed, **seconds})
    finally:
        shutil.rmtree(home, ignore_errors=True)


def wait(directory: Path) -> None:
    """Until nothing that was set aside is left."""
    while any(entry.name.startswith(".") for entry in directory.iterdir()):
        time.sleep(0.005)


if __name__ == "__main__":
    main()
