"""Whether decomposition finds the parts that are known: success over seeds, for every toy target.

    uv run python benchmarks/toys.py [--seeds 20] [--targets tms_5-2 …] [--set table.key=value …] [--workers 2]

Each seed is a run of its own, from pre-training to its last step, by the real command `pdlib train`. What is complete
is not run again, what was stopped is resumed; so a study can be stopped at any time, and a table printed of what there
is with `--seeds 0`. A TMS run succeeds where MMCS ≥ 0.999, ML2R is within 0.97–1.03 and the identity error is 0 on
linear1 and linear2; a residual MLP where the mlp_in of each layer has one component a feature: identity error 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import keep, machine, table

GOALS = {  # target → seeds, and the share of them that has to succeed
    "tms_5-2": (20, 0.95),
    "tms_5-2-id": (20, 0.95),
    "tms_40-10": (10, 0.9),
    "tms_40-10-id": (10, 0.9),
    "resid_mlp_1": (1, 1.0),
    "resid_mlp_2": (1, 1.0),
    "resid_mlp_3": (1, 1.0),
}
ONE_CORE = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"


def train(target: str, seed: int, home: Path, changes: Sequence[str]) -> None:
    """Run one seed to its end, unless it is there; what it prints goes to a file beside it."""
    out = home / f"{target}-{seed}"
    if (out / "results.json").exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = [part for change in (f"seed={seed}", *changes) for part in ("--set", change)]
    command = [sys.executable, "-m", "pdlib", "train", target, "--out", str(out), *settings]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ONE_CORE}
    with (home / f"{out.name}.log").open("a") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    print(f"{out.name}: exit {code}", file=sys.stderr, flush=True)


def succeeded(found: dict[str, Any]) -> bool:
    """Whether one run found what is known."""
    if "mmcs" in found and not (found["mmcs"] >= 0.999 and 0.97 <= found["ml2r"] <= 1.03):
        return False
    return not any(found["identity_error"].values())


def gather(home: Path, target: str) -> dict[int, dict[str, Any]]:
    """Seed → what its run found, of all runs that are complete."""
    found: dict[int, dict[str, Any]] = {}
    for path in home.glob(f"{target}-*/results.json"):
        seed = path.parent.name.removeprefix(f"{target}-")
        if seed.isdigit():
            found[int(seed)] = json.loads(path.read_text("utf-8"))
    return dict(sorted(found.items()))


def report(study: dict[str, dict[int, dict[str, Any]]]) -> str:
    """The tables: success, then every seed that failed or missed."""
    rows = [["target", "seeds", "succeed", "goal", "MMCS, least", "ML2R, from – to", "identity errors", "dense errors"]]
    for target, runs in study.items():
        wanted, share = GOALS[target]
        results = list(runs.values())
        if not results:
            rows.append([target, "0", "not run", f"≥ {share:.0%} of {wanted}", "–", "–", "–", "–"])
            continue
        good = sum(map(succeeded, results))
        mmcs, ml2r = [[r[name] for r in results if name in r] for name in ("mmcs", "ml2r")]
        least = f"{min(mmcs):.5f}" if mmcs else "–"
        span = f"{min(ml2r):.3f} – {max(ml2r):.3f}" if ml2r else "–"
        rows.append(
            [
                target,
                str(len(results)),
                f"{good} ({good / len(results):.0%})",
                f"≥ {share:.0%} of {wanted}",
                least,
                span,
                _totals(results, "identity_error"),
                _totals(results, "dense_error"),
            ]
        )
    failures = [["target", "seed", "MMCS", "ML2R", "identity errors"]]
    for target, runs in study.items():
        for seed, found in runs.items():
            if not succeeded(found):
                numbers = [f"{found[name]:.5f}" if name in found else "–" for name in ("mmcs", "ml2r")]
                failures.append([target, str(seed), *numbers, json.dumps(found["identity_error"])])
    listed = table(failures) if len(failures) > 1 else "No seed failed."
    return f"{machine()}\n\n{table(rows)}\n\n{listed}"


def _totals(results: list[dict[str, Any]], kind: str) -> str:
    sites = list(results[0].get(kind, {}))
    return ", ".join(f"{site} {sum(r[kind][site] for r in results)}" for site in sites) or "–"


def figure(study: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Identity errors of each seed, a row of marks for each target: on the left line stand those that succeeded."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {target: runs for target, runs in study.items() if runs}
    size = (8, 0.5 * len(shown) + 1.2)
    drawing, axes = plt.subplots(figsize=size, layout="constrained")
    for row, runs in enumerate(shown.values()):
        errors = [sum(found["identity_error"].values()) for found in runs.values()]
        shifts = [row + 0.5 * ((i + 0.5) / len(errors) - 0.5) for i in range(len(errors))]
        colours = ["#4878a8" if succeeded(found) else "#c04848" for found in runs.values()]
        axes.scatter(errors, shifts, c=colours, s=14)
    axes.set(yticks=range(len(shown)), yticklabels=list(shown), xlabel="identity errors of a seed, all sites")
    axes.set_xscale("symlog", linthresh=1)
    axes.invert_yaxis()
    drawing.savefig(Path(__file__).parent / "results" / "toys.png", dpi=120)


def main() -> None:
    """Run what is missing, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="of each target; as many as its goal names, if left out")
    parser.add_argument("--targets", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--set", nargs="+", action="extend", default=[], dest="changes", help="as of `pdlib train`")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", type=Path, default=Path("runs/toys"), help="where the runs are kept")
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.workers) as pool:
        for target in asked.targets:
            seeds = GOALS[target][0] if asked.seeds is None else asked.seeds
            for seed in range(seeds):
                pool.submit(train, target, seed, asked.out, asked.changes)
    study = {target: gather(asked.out, target) for target in asked.targets}
    text = report(study)
    print(text)
    if not asked.changes and set(asked.targets) == set(GOALS):
        keep("toys", {"report": text, "runs": study})
        figure(study)


if __name__ == "__main__":
    main()
