"""The command line as its user sees it, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.test_run import SMALL

WITHOUT_JAX = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "haiku", "optax", "orbax", "tensorstore"):
            raise RuntimeError("imported " + name)
sys.meta_path.insert(0, Refuse())
from pdlib.cli import main
main()
"""


def pdlib(*args: str | Path, cwd: Path, without_jax: bool = False) -> subprocess.CompletedProcess[str]:
    program = ["-c", WITHOUT_JAX] if without_jax else ["-m", "pdlib"]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, *program, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


SETS = [word for value in SMALL for word in ("--set", value)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("cwd")
    first = pdlib("train", "tms_5-2", *SETS, cwd=cwd)
    assert first.returncode == 0, first.stderr
    return cwd, first.stdout


def test_train_ends_with_a_table_and_a_figure(trained):
    cwd, text = trained
    for word in (
        "preparing the target",
        "step 24/24",
        "features recovered",
        "MMCS",
        "ML2R",
        "identity error, linear2",
    ):
        assert word in text
    assert (cwd / "runs" / "tms_5-2" / "figures" / "ci_permuted.png").exists()


def test_train_again_says_that_it_is_complete(trained):
    cwd, _ = trained
    again = pdlib("train", "tms_5-2", *SETS, cwd=cwd)
    assert again.returncode == 0
    assert "complete at step 24" in again.stdout
    assert "step 24/24" not in again.stdout


def test_help_and_inspect_import_no_jax(trained):
    cwd, _ = trained
    shown = pdlib("--help", cwd=cwd, without_jax=True)
    assert shown.returncode == 0, shown.stderr
    assert "Exit codes" in shown.stdout
    report = pdlib("inspect", "runs/tms_5-2", cwd=cwd, without_jax=True)
    assert report.returncode == 0, report.stderr
    assert "components/linear1/V  float32[5, 6]  120 B" in report.stdout
    assert "opening   the newest product maps" in report.stdout
    assert "stripping would keep" in report.stdout


def test_inspect_prints_json(trained):
    cwd, _ = trained
    report = json.loads(pdlib("inspect", "runs/tms_5-2", "--json", cwd=cwd).stdout)
    assert [step["step"] for step in report["steps"]] == [0, 4, 8, 12, 16, 20, 24]
    newest = {item["item"]: item for item in report["steps"][-1]["items"]}
    files = [
        p for p in (cwd / "runs/tms_5-2/ckpts/24/training").rglob("*") if p.is_file() and p.name != "manifest.json"
    ]
    assert newest["training"]["bytes"] == sum(p.stat().st_size for p in files)


def test_a_run_is_laid_out_before_it_runs_and_a_spec_is_printed_to_be_changed(tmp_path):
    listed = pdlib("specs", cwd=tmp_path, without_jax=True)
    assert "Five features in two hidden units" in listed.stdout
    (tmp_path / "mine.toml").write_text(pdlib("specs", "tms_5-2", cwd=tmp_path, without_jax=True).stdout)
    planned = pdlib("train", "mine.toml", "--plan", "--set", "seed=3", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    values = json.loads(planned.stdout)["values"]
    assert values["seed"] == {"value": 3, "origin": "--set"}
    assert values["decomposition.C"] == {"value": 20, "origin": "mine.toml"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["inspect", "nowhere"], 1, "NotARun: "),
        (["train", "tms_5_2"], 1, "did you mean 'tms_5-2'?"),
        (["train", "tms_5-2", "--set", "training.stepz=1"], 1, "unknown key; did you mean 'steps'?"),
        (["train"], 2, "Missing argument"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_errors_take_one_screen_and_their_exit_code(args, code, text, tmp_path):
    result = pdlib(*args, cwd=tmp_path)
    assert result.returncode == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in pdlib("--debug", "inspect", "nowhere", cwd=tmp_path).stderr


def test_sigterm_stops_with_its_own_exit_code_and_the_run_continues(tmp_path):
    import signal
    import time

    command = [sys.executable, "-m", "pdlib", "train", "tms_5-2", *SETS, "--set", "training.steps=1000000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    steps = tmp_path / "runs" / "tms_5-2" / "ckpts"
    deadline = time.monotonic() + 120
    while not (steps / "8").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    last = max(int(p.name) for p in steps.iterdir() if p.name.isdigit())
    assert f"the last durable step is {last} of 1000000" in text
    assert (steps / str(last) / "training").is_dir()
