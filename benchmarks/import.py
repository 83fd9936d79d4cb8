"""What starting pdlib costs: seconds, modules and peak memory of each, in fresh processes, the best of several.

    uv run python benchmarks/import.py

`python -c pass` is the rival of the imports, and `import jax` of the 8B description: neither can be faster.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import keep, machine, table

REPEATS = 7

DESCRIBE = """
import time
import jax
from pdlib.items.state import Site, init_decomposition
from pdlib.method.importance import per_component_mlp
C = 24576
sites = {"gate_proj": Site(4096, 14336, C), "up_proj": Site(4096, 14336, C), "down_proj": Site(14336, 4096, C)}
init = per_component_mlp(16).init
start = time.perf_counter()
product = jax.eval_shape(lambda key: init_decomposition(key, sites, init), jax.random.key(0))
print(time.perf_counter() - start)
"""

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import pdlib": ["-c", "import pdlib"],
    "pdlib --help": ["-m", "pdlib", "--help"],
    "pdlib inspect": ["-m", "pdlib", "inspect", "RUN"],
    "import jax": ["-c", "import jax"],
    "8B product described": ["-c", DESCRIBE],
}

PEAK = (
    "import resource as r, sys; sys.stderr.write(f'{r.getrusage(r.RUSAGE_SELF).ru_maxrss / 1024} {len(sys.modules)}')"
)


def measure(arguments: list[str]) -> tuple[float, float, int, str]:
    """The best wall time in seconds, peak resident MB, modules loaded, and what was printed."""
    best, text, facts = float("inf"), "", ""
    for _ in range(REPEATS):
        program = f"import atexit\natexit.register(lambda: exec({PEAK!r}))\n"
        if arguments[0] == "-c":
            command = ["-c", program + arguments[1]]
        else:
            run = f"import sys, runpy\nsys.argv = {arguments[1:]!r}\nrunpy.run_module('pdlib', run_name='__main__')"
            command = ["-c", program + run]
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        elapsed = time.perf_counter() - start
        if elapsed < best:
            best, text, facts = elapsed, done.stdout, done.stderr
    peak, modules = facts.split()[-2:]
    return best, float(peak), int(modules), text


def make_run(folder: Path) -> Path:
    """A small run to inspect."""
    code = f"""
import numpy as np, pdlib
product = pdlib.Decomposition({{"s": pdlib.Factors(np.ones((8, 4), "f4"), np.ones((4, 8), "f4"))}}, {{}})
with pdlib.Manager({str(folder / "run" / "ckpts")!r}) as manager:
    manager.save(1, {{"decomposition": product}})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder / "run"


def main() -> None:
    """Print the table."""
    rows = [["", "seconds", "over python", "modules", "peak MB"]]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        plain = 0.0
        for name, arguments in COMMANDS.items():
            best, peak, modules, text = measure([str(run) if word == "RUN" else word for word in arguments])
            plain = plain or best
            rows.append([name, f"{best:.3f}", f"{best - plain:.3f}", str(modules), f"{peak:.0f}"])
            found[name] = {"seconds": best, "modules": modules, "peak_mb": peak}
    described = f"eval_shape(init_decomposition) at the 8B layer-18 size, inside its process: {float(text):.3f} s"
    report = f"{machine()}\n\nbest of {REPEATS}\n\n{table(rows)}\n\n{described}"
    print(report)
    keep("import", {"report": report, **found})


if __name__ == "__main__":
    main()
