"""What one training step costs: time beside a reference in PyTorch, where it goes, FLOPs, memory, and how it grows.

    uv run python benchmarks/step.py [--scale small | full]

Times are the least of several short repeats, on one core but where devices grow; each target has a process of its own.
FLOPs are those of matrix products, in XLA's program and as needed (see flops.py); memory is what XLA assigns to
arguments, results and temporaries, beside the live set: state, target, the product's gradient, and the activations that
autodiff keeps of the importance function and of the largest term, some of which XLA computes again instead. Parts are
programs of their own, so their times are not quite a step's. `full` adds the step of layer 18 of Llama-3.1-8B at 512
tokens, compiled and never run, in float32 and in bfloat16, which this backend widens, and more points of growth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flops import of_program
from harness import keep, machine, megabytes, table
from jax._src.ad_checkpoint import saved_residuals
from steps import LANGUAGE, draw, needed, parts_of, problem_of, step_of

from pdlib.method.step import make_loop
from pdlib.run.problem import Inputs

TORCH = {"tms_5-2": 0.089, "tms_40-10": 1.98, "resid_mlp_1": 0.62}  # seconds a step, float32, one core of this kind
PGD = 'terms.pgd={{kind="reconstruction",adversary={{kind="fresh",scope="bc",steps={}}}}}'
GROWTH: dict[str, tuple[str, Callable[[int], list[str]], dict[str, Sequence[int]]]] = {
    "C of each site": (
        "tms_40-10",
        lambda C: [f"decomposition.C={C}", "training.batch=1024"],
        {"small": (50, 100, 200, 400), "full": (50, 100, 200, 400, 800, 1600)},
    ),
    "sites, layerwise": (
        "resid_mlp_1",
        lambda sites: [f"target.layers={sites // 2}", "target.neurons=24", "training.batch=512"],
        {"small": (2, 4, 8), "full": (2, 4, 8, 16)},
    ),
    "ascents of a fresh adversary": (
        "tms_40-10",
        lambda steps: ["training.batch=1024", PGD.format(steps)],
        {"small": (1, 4, 16), "full": (1, 2, 4, 8, 16, 32)},
    ),
    "devices, simulated": (
        "tms_40-10",
        lambda _: ["training.batch=4096"],
        {"small": (1, 2, 4, 8), "full": (1, 2, 4, 8)},
    ),
}
ONE_CORE = "--xla_cpu_multi_thread_eigen=false"


# each in a process of its own


def least(run: Callable[[], Any], *, repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    found: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def measure_speed(name: str, changes: Sequence[str] = (), *, dispatched: bool = True) -> dict[str, float]:
    """Seconds a step, K steps in one call and, in turns with it, one call each."""
    problem = problem_of(name, changes)
    state = problem.initial_state(problem.initial_product())
    inputs = Inputs(problem.placed_params)

    def advance(count: int) -> None:
        nonlocal state
        state, _ = jax.block_until_ready(problem.loop(state, inputs, count))

    K = enough(advance)
    scanned, alone = [], []
    for _ in range(5):
        scanned.append(least(lambda: advance(K), repeats=1) / K)
        if dispatched:
            alone.append(least(lambda: [advance(1) for _ in range(K)], repeats=1) / K)
    return {"K": K, "scanned": min(scanned), **({"dispatched": min(alone)} if dispatched else {})}


def measure_parts(name: str) -> dict[str, float]:
    """Seconds of each part of a step, each in a program of its own, and of a whole step."""
    problem = problem_of(name)
    state = problem.initial_state(problem.initial_product())
    batch = draw(problem)(problem.key)
    share, parts = parts_of(problem)
    shared = jax.jit(share)(state.decomposition, problem.params, batch)
    found: dict[str, float] = {}
    for part, function in parts.items():
        run = jax.jit(function)
        found[part] = least(lambda run=run: jax.block_until_ready(run(shared, state, batch)), repeats=6)
    loop = make_loop(step_of(problem))

    def advance(count: int) -> None:
        nonlocal state
        state, _ = jax.block_until_ready(loop(state, problem.params, count))

    K = enough(advance)
    found["step"] = least(lambda: advance(K), repeats=4) / K
    return found


def enough(advance: Callable[[int], None]) -> int:
    """The number of steps that takes about 0.4 s, at least two; compiles the step first."""
    advance(1)
    return max(2, round(0.4 / least(lambda: advance(1), repeats=2)))


def measure_cost(name: str) -> dict[str, Any]:
    """FLOPs of a step and its parts, compile time and memory; nothing is run."""
    problem = problem_of(name, abstract=True)
    state, params, batch = problem.abstract_state(), problem.params, problem.abstract_batch
    start = time.perf_counter()
    compiled = jax.jit(step_of(problem), donate_argnums=0).lower(state, params).compile()
    seconds = time.perf_counter() - start
    memory, analysis = compiled.memory_analysis(), compiled.cost_analysis()
    nbytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    products = needed(problem)
    share, parts = parts_of(problem)
    shared = jax.eval_shape(share, state.decomposition, params, batch)
    dots = {part: of_program(jax.jit(f).lower(shared, state, batch).compile().as_text()) for part, f in parts.items()}
    wanted = {part: sum(found.values()) for part, found in products.items()}
    union = {key: flops for part, found in products.items() if "each" not in part for key, flops in found.items()}

    length = jax.tree.leaves(batch)[0].shape[-1 if name in LANGUAGE else 0]

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    def saved(function: Callable[..., Any], *arguments: Any) -> int:
        kept = [value for value, source in saved_residuals(function, *arguments) if "argument" not in source]
        return size([value for value in kept if length in value.shape])  # others are weights, turned or cast

    def value(name: str) -> Callable[..., Any]:
        term = problem.terms[name]

        def of(learned: Any, shared: Any, state: Any) -> Any:
            drawn = None
            if term.adversary is not None:
                leaves = term.adversary.leaves(state.training.adversaries[name])
                drawn = term.adversary.drawn(leaves, shared.positions)
            return term.value(problem.model, shared._replace(learned=learned), problem.key, drawn)

        return of

    terms = {term: saved(value(term), shared.learned, shared, state) for term in problem.terms}
    learned = saved(lambda *arguments: share(*arguments).learned, state.decomposition, params, batch)
    live = size((state, params, state.decomposition)) + learned + max(terms.values())
    return {
        "compile": seconds,
        "flops": analysis["flops"],
        "dots": of_program(compiled.as_text()),
        "needed": sum(union.values()),
        "parts": {part: {"dots": dots[part], "needed": wanted.get(part, 0.0)} for part in dots},
        "memory": nbytes + memory.temp_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "live": live,
        "kept": {"importance": learned, **terms},
        "state": size(state),
        "params": size(params),
    }


MEASURES = {"speed": measure_speed, "parts": measure_parts, "cost": measure_cost}


def child(measure: str, name: str, *, devices: int = 0, **arguments: Any) -> Any:
    """What a measure finds in a fresh process: on one core, or with so many simulated devices on all of them."""
    task = {"measure": measure, "name": name, "devices": devices, "arguments": arguments}
    flags = f"--xla_force_host_platform_device_count={devices}" if devices else ONE_CORE
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if measure == "parts":  # a part's buffers are kept from call to call, as a step's are within one call
        tunables = ("mmap_max=0", "trim_threshold=99999999999", "hugetlb=1")
        environment["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{tunable}" for tunable in tunables)
    command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "RESULT" not in done.stdout:
        raise RuntimeError(f"{measure} of {name} failed:\n{done.stderr[-3000:]}")
    print(f"{measure} of {name} {arguments or ''}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.rpartition("RESULT")[2])


# the report


def gather(scale: str) -> dict[str, Any]:
    """Everything that is measured."""
    compiled = [*TORCH, "pile_4", *(["llama_8b", "llama_8b_half"] if scale == "full" else [])]
    found: dict[str, Any] = {
        "speed": {name: child("speed", name) for name in TORCH},
        "parts": {name: child("parts", name) for name in (*TORCH, "pile_4")},
        "cost": {name: child("cost", name) for name in compiled},
        "growth": {},
    }
    for title, (name, changes, sizes) in GROWTH.items():
        many = "devices" in title
        found["growth"][title] = {
            size: child("speed", name, devices=size * many, changes=changes(size), dispatched=False)["scanned"]
            for size in sizes[scale]
        }
    return found


def report(found: Mapping[str, Any]) -> str:
    """The tables: ratios, time by part, FLOPs by part, whole steps, growth."""
    speed = [["target", "times as fast as PyTorch", "goal", "steps a second: scanned", "one call each", "PyTorch"]]
    for name, seconds in found["speed"].items():
        rates = [f"{1 / s:,.1f}" for s in (seconds["scanned"], seconds["dispatched"], TORCH[name])]
        speed.append([name, f"{TORCH[name] / seconds['scanned']:.1f}", "≥ 4", *rates])
    parts = [["target", "part", "ms", "of the step", "MFLOP in XLA's products", "needed", "ratio, goal ≤ 1.10"]]
    for name, cost in found["cost"].items():
        times = found["parts"].get(name, {})
        whole = {"dots": cost["dots"], "needed": cost["needed"]}
        for part, flops in {"step": whole, **cost["parts"]}.items():
            took = [f"{times[part] * 1e3:,.2f}", f"{times[part] / times['step']:.0%}"] if part in times else ["–", "–"]
            ratio = f"{flops['dots'] / flops['needed']:.3f}" if flops["needed"] else "–"
            parts.append([name, part, *took, *(f"{flops[k] / 1e6:,.1f}" for k in ("dots", "needed")), ratio])
    steps = [
        ["target", "memory / live set", "MB", "live set", "state", "weights", "activations and gradient", "compile, s"]
    ]
    for name, cost in found["cost"].items():
        kept = cost["live"] - cost["state"] - cost["params"]
        sizes = [megabytes(cost[k]) for k in ("memory", "live", "state", "params")]
        row = [f"{cost['memory'] / cost['live']:.2f}", *sizes, megabytes(kept), f"{cost['compile']:.1f}"]
        steps.append([name, *row])
    growth = [["what grows", "from", "to", "ms a step, from", "to", "times"]]
    for title, times in found["growth"].items():
        (first, least), (last, most) = list(times.items())[0], list(times.items())[-1]  # noqa: RUF015
        row = [str(first), str(last), f"{least * 1e3:,.1f}", f"{most * 1e3:,.1f}", f"{most / least:.2f}"]
        growth.append([title, *row])
    return "\n\n".join([machine(), *map(table, (speed, parts, steps, growth))])


def figure(growth: Mapping[str, Mapping[Any, float]], name: str) -> None:
    """A panel for each thing that grows; the dashed line is in proportion to it, from the first point on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawing, panels = plt.subplots(1, len(growth), figsize=(13, 3), layout="constrained")
    for axes, (title, times) in zip(panels, growth.items(), strict=True):
        sizes, seconds = [int(size) for size in times], list(times.values())
        axes.plot(sizes, [1e3 * s for s in seconds], "o-", color="#4878a8")
        top = 1.15e3 * max(seconds)
        axes.plot(sizes, [1e3 * seconds[0] * size / sizes[0] for size in sizes], "--", color="#999999")
        axes.set(xlabel=title, xticks=sizes, ylim=(0, top))
    panels[0].set_ylabel("ms a step")
    drawing.savefig(Path(__file__).parent / "results" / f"{name}.png", dpi=120)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("small", "full"), default="small")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("RESULT" + json.dumps(work(json.loads(asked.child))))
        return
    found = gather(asked.scale)
    text = report(found)
    print(text)
    name = "step" if asked.scale == "small" else "step_full"
    keep(name, {"report": text, **found})
    figure(found["growth"], name)


def work(task: dict[str, Any]) -> Any:
    """What a child does."""
    if not task["devices"] and task["measure"] != "cost":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return MEASURES[task["measure"]](task["name"], **task["arguments"])


if __name__ == "__main__":
    main()
