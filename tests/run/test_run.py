"""The life of the thin run, through the functions that the command line calls."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdlib
from pdlib.errors import Diverged, RunConflict, RunSpecError
from pdlib.run.loop import train
from pdlib.run.metrics import append_row, read_rows
from pdlib.run.spec import RunSpec, load_run_spec, to_toml
from pdlib.store.lock import locked
from pdlib.testing import assert_bit_equal

SMALL = (
    "target.pretraining.steps=50",
    "target.pretraining.batch=32",
    "training.batch=32",
    "training.steps=24",
    "decomposition.C=6",
    "importance.hidden=4",
    "saving.product_every=4",
    "saving.process_every=8",
    "saving.metrics_every=5",
)


class Silent:
    """A reporter that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[int] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def training(self, total: int, done: int) -> Any:
        del total, done
        return nullcontext()

    def at(self, step: int, metrics: Any) -> None:
        assert metrics["total"] > 0
        self.steps.append(step)


def spec_of(*overrides: str) -> RunSpec:
    return load_run_spec("tms_5-2", overrides=[*SMALL, *overrides])


def both_items(run: Path, step: int) -> dict[str, Any]:
    with pdlib.Manager(run / "ckpts", read_only=True) as manager:
        return {item: manager.restore_to_host(step, item) for item in ("decomposition", "training")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    outcome = train(spec_of(), run, Silent())
    assert outcome.step == 24
    return run


@pytest.mark.parametrize("stops", [[12], [8, 13, 19], [1, 2, 3]])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_to_the_bit(finished, tmp_path, stops):
    for stop in stops:
        assert train(spec_of(), tmp_path / "run", Silent(), stop_after=stop).results is None
    outcome = train(spec_of(), tmp_path / "run", Silent())
    assert_bit_equal(both_items(outcome.run, 24), both_items(finished, 24))
    assert read_rows(outcome.run / "metrics.jsonl")[24] == read_rows(finished / "metrics.jsonl")[24]


def test_a_run_killed_after_a_product_without_process_resumes_before_it_and_meets_it_again(finished, tmp_path):
    run = tmp_path / "run"
    train(spec_of(), run, Silent(), stop_after=8)
    train(spec_of(), run, Silent(), stop_after=14)
    shutil.rmtree(run / "ckpts" / "14")  # as if the kill came before it: the product of 12 has no process
    reporter = Silent()
    train(spec_of(), run, reporter)
    assert any("at step 8" in line for line in reporter.lines)
    assert_bit_equal(both_items(run, 24), both_items(finished, 24))


def test_the_saves_follow_their_cadence_and_retention(finished):
    with pdlib.Manager(finished / "ckpts", read_only=True) as manager:
        assert manager.steps() == [0, 4, 8, 12, 16, 20, 24]
        held = {step: manager.items(step) for step in manager.steps()}
    both, product = ["decomposition", "training"], ["decomposition"]
    assert held == {0: product, 4: product, 8: product, 12: product, 16: both, 20: product, 24: both}
    assert list(read_rows(finished / "metrics.jsonl")) == [5, 10, 15, 20, 24]


def test_a_complete_run_says_so_again_and_writes_no_step(finished):
    before = {p: p.stat().st_mtime_ns for p in (finished / "ckpts").rglob("*")}
    outcome = train(spec_of(), finished, Silent())
    assert outcome.results == json.loads((finished / "results.json").read_text())
    assert {p: p.stat().st_mtime_ns for p in (finished / "ckpts").rglob("*")} == before
    assert set(outcome.results) == {"features", "features_recovered", "mmcs", "ml2r", "identity_error"}
    assert (finished / "figures" / "ci_permuted.png").read_bytes().startswith(b"\x89PNG")


def test_the_product_of_a_run_opens_alone(finished):
    opened = pdlib.open_run(finished)
    assert opened.step == 24
    assert opened.sites == ("linear1", "linear2")
    assert opened.spec["training"]["steps"] == 24
    assert opened.components["linear1"].V.shape == (5, 6)
    assert "linear2  V [2, 6]  U [6, 5]  float32" in repr(opened)


def test_other_values_are_refused_by_name_and_leave_the_run_alone(finished):
    with pytest.raises(RunConflict) as caught:
        train(spec_of("seed=1", "terms.minimality.coefficient=0.5"), finished, Silent())
    assert str(caught.value) == (
        f"{finished} was started with other values\n"
        "  seed: 0 in the run, 1 now\n  terms.minimality.coefficient: 0.0001 in the run, 0.5 now\n"
        f"Pass another --out, or the values of {finished / 'run.toml'}."
    )


def test_a_second_trainer_is_refused(finished):
    with locked(finished), pytest.raises(RunConflict, match="another process is at work in"):
        train(spec_of(), finished, Silent())


def test_a_changed_target_is_noticed(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    bias = run / "target" / "0" / "target" / "linear2.b" / "0"
    bias.write_bytes(np.ones(5, np.float32).tobytes())
    manifest = bias.parent.parent / "manifest.json"
    record = json.loads(manifest.read_text())
    record["files"]["linear2.b/0"]["blake3"] = "0" * 64
    manifest.write_text(json.dumps(record))
    with pytest.raises(RunConflict, match=r"the target in .* has digest"):
        train(spec_of(), run, Silent())


def test_a_signal_stops_the_run_at_the_next_step_with_both_items(tmp_path):
    class Signalling(Silent):
        def at(self, step: int, metrics: Any) -> None:
            super().at(step, metrics)
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    outcome = train(spec_of(), tmp_path / "run", Signalling())
    assert outcome.results is None
    assert outcome.step == 5
    assert set(both_items(tmp_path / "run", 5)) == {"decomposition", "training"}
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_step(tmp_path):
    with pytest.raises(Diverged, match="faithfulness"):
        train(
            spec_of("optimizers.components.learning_rate=1e30", "terms.faithfulness.coefficient=1e30"),
            tmp_path / "run",
            Silent(),
        )
    with pdlib.Manager(tmp_path / "run" / "ckpts", read_only=True) as manager:
        assert manager.verify(manager.steps()[-1])


def test_metrics_rows_are_superseded_by_step_and_a_torn_line_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_row(path, 5, {"total": 2.0})
    append_row(path, 5, {"total": 1.0, "l0/x": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 6, "tot')
    assert read_rows(path) == {5: {"total": 1.0, "l0/x": None}}


def test_a_spec_reads_back_from_its_own_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(spec_of("seed=7")))
    assert load_run_spec(path) == spec_of("seed=7")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("training.stepz=3", "training.stepz: unknown key; did you mean 'steps'?"),
        ("training.steps=0", "training.steps: Input should be greater than or equal to 1"),
        ("training.steps=many", "training.steps: Input should be a valid integer"),
        ("decomposition.init=best", "decomposition.init: Input should be 'normal' or 'spread'"),
        ("saving.process_every=7", "process_every must be a multiple of product_every"),
        ("importance.kind=layerwise", "importance.kind: 'layerwise' is none of 'per_component_mlp', 'layerwise_mlp'"),
        ("importance={}", "importance.kind: missing; one of 'per_component_mlp', "),
        ("importance.hiden=3", "importance.hiden: unknown key; did you mean 'hidden'?"),
        ("terms.layerwise.pln='all'", "terms.layerwise.pln: unknown key; did you mean 'plan'?"),
        ("terms.layerwise.group_size=1", "terms.layerwise: plan = 'groups' and group_size belong together"),
        ("terms.layerwise.routing=bernoulli", "routing = 'bernoulli' and routing_probability belong together"),
        ("terms.layerwise.fraction=0.5", "give an adversary"),
        ("terms.minimality.coefficient=nan", "terms.minimality.coefficient: Input should be a finite number"),
        ("terms.other.kind=faithfulness", "one term of kind 'faithfulness', this has 2"),
        ("terms.total.kind=reconstruction", "total: the name is taken"),
        ("target.pretraining.stepz=3", "target.pretraining.stepz: unknown key; did you mean 'steps'?"),
        ("seed", "write table.key=value"),
        ("seed.x=1", "'seed' is a value, not a table"),
    ],
)
def test_bad_values_name_the_key_and_the_near_match(override, text):
    with pytest.raises(RunSpecError) as caught:
        spec_of(override)
    assert text in str(caught.value)


def test_an_unknown_spec_names_the_near_one():
    with pytest.raises(RunSpecError, match=r"'tms_5_2' is neither .* did you mean 'tms_5-2'\?"):
        load_run_spec("tms_5_2")
