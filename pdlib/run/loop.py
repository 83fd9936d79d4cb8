"""Trains a run from wherever its directory stands to its end, or to a signal; prints nothing."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pdlib.errors import Diverged
from pdlib.items.contracts import default_registry
from pdlib.items.state import Decomposition, TrainState
from pdlib.run.build import task_of
from pdlib.run.directory import load_target, pin_spec, save_target
from pdlib.run.metrics import append_row
from pdlib.run.problem import Problem, pretrain
from pdlib.run.spec import RunSpec
from pdlib.store.checkpoint import Manager
from pdlib.store.decomposition import PRODUCT, restore_decomposition, restore_latest, save_state
from pdlib.store.files import remove_leftovers
from pdlib.store.lock import locked
from pdlib.store.retention import KeepAll, KeepNewest, Retention


class Reporter(Protocol):
    """What the loop tells while it runs; `pdlib.run.progress.Reporter` is one."""

    def say(self, text: str) -> None: ...
    def training(self, total: int, done: int) -> Any: ...
    def at(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """Where a run stands after `train`.

    Attributes:
        run: its directory.
        step: the last durable step.
        steps: the horizon.
        results: see `Problem.results`; None before the horizon.
    """

    run: Path
    step: int
    steps: int
    results: dict[str, Any] | None


def train(
    spec: RunSpec,
    run: Path,
    reporter: Reporter,
    *,
    stop_after: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Outcome:
    """Start a run, or continue it from its newest step that holds both items; bit for bit as if never interrupted.

    Args:
        spec: what the run is; the same as when it was started.
        run: its directory.
        reporter: told of progress.
        stop_after: stop at this step with both items saved, as a signal would.
        devices: to train on; all when None.

    Raises:
        RunConflict: the directory belongs to another specification, target or process.
        Diverged: a loss is not finite; the last good checkpoint stays.
        TornStep: the newest checkpoint is not whole.
    """
    with locked(run, hint="wait for it, or pass another --out"), _signals() as stop:
        pin_spec(run, spec)
        problem = Problem(spec, task_of(spec), _target(spec, run, reporter), devices)
        keep = Retention(product=KeepAll(), process=KeepNewest(spec.saving.keep_processes))
        remove_leftovers(run / "ckpts")
        with Manager(run / "ckpts", registry=default_registry(), retention=keep) as manager:
            step = manager.latest(items=(PRODUCT,)) or 0
            if step < spec.training.steps:  # a complete run needs no process, and may have been stripped of it
                step, state = _start(problem, manager, reporter)
                horizon = min(spec.training.steps, stop_after or spec.training.steps)
                with reporter.training(spec.training.steps, step):
                    step = _advance(problem, manager, state, horizon, run, reporter, stop)
            results = None
            if step >= spec.training.steps:
                results = _conclude(problem, restore_decomposition(manager, step), run)
        return Outcome(run, step, spec.training.steps, results)


def _target(spec: RunSpec, run: Path, reporter: Reporter) -> Any:
    """The parameters of the target as the run keeps them, made first if it is new."""
    if load_target(run) is None:
        reporter.say("preparing the target")
        save_target(run, pretrain(spec))
    found = load_target(run)
    assert found is not None
    return jax.tree.map(jnp.asarray, found[0])


def _start(problem: Problem, manager: Manager, reporter: Reporter) -> tuple[int, TrainState]:
    if manager.steps():
        step, state = restore_latest(manager, problem.abstract_state(), mesh=problem.mesh)
        reporter.say(f"resuming {manager.directory.parent} at step {step}")
        return step, state
    reporter.say(f"starting {manager.directory.parent}")
    state = problem.initial_state(problem.initial_product())
    save_state(manager, 0, state)
    return 0, state


def _advance(
    problem: Problem,
    manager: Manager,
    state: TrainState,
    horizon: int,
    run: Path,
    reporter: Reporter,
    stop: threading.Event,
) -> int:
    saving, step = problem.spec.saving, int(state.training.step)
    marks = (saving.product_every, saving.metrics_every)
    last = step >= horizon or stop.is_set()
    while not last:
        reached = min([horizon, *(step + every - step % every for every in marks)])
        state, metrics = problem.advance(state, step, reached - step)
        step = reached
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        _check_finite(step, values)
        if step % saving.metrics_every == 0 or step == horizon:
            append_row(run / "metrics.jsonl", step, values)
            reporter.at(step, values)
        last = step == horizon or stop.is_set()
        if last or step % saving.product_every == 0:
            save_state(manager, step, state, process=last or step % saving.process_every == 0)
    return step


def _check_finite(step: int, values: Mapping[str, float]) -> None:
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        terms = [name for name in bad if name != "total"] or bad
        raise Diverged(
            f"at step {step} these are not finite: {', '.join(terms)}\n"
            "The last good checkpoint is kept; lower optimizers.components.learning_rate, or ci_fn's, in a new run."
        )


def _conclude(problem: Problem, product: Decomposition, run: Path) -> dict[str, Any]:
    from pdlib.consumers.plots import permuted_importance

    results = problem.results(product)
    importance = problem.importance_on_probe(product)
    if importance:
        permuted_importance(importance, run / "figures" / "ci_permuted.png")
    partial = run / "results.json.partial"
    partial.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    partial.replace(run / "results.json")
    return results


@contextmanager
def _signals() -> Generator[threading.Event]:
    """Turn SIGTERM and SIGINT into a request to stop at the next possible point; a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
