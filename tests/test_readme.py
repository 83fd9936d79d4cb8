"""README.md is executed: its Python blocks run, its commands are those of CI, what it shows is what there is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import pdlib
from pdlib.run.loop import train
from pdlib.run.spec import load_run_spec, parse_run_spec
from tests.data.freeze import CORPUS
from tests.run.test_run import SMALL, Silent

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small run where README's is."""
    folder = tmp_path_factory.mktemp("home")
    train(load_run_spec("tms_5-2", overrides=SMALL), folder / "runs" / "tms_5-2", Silent())
    return folder


def test_the_python_blocks_run(home):
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert len(blocks) == 4
    code = "\n".join(
        [*blocks, "from hypothesis import settings", "settings(max_examples=5, deadline=None)(test_round_trip)()"]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {p.name for p in (home / "checkpoints").iterdir()} == {"100", "200"}
    assert {p.name for p in (home / "checkpoints" / "200").iterdir() if p.is_dir()} == {"params"}


def test_the_tools_do_what_is_shown(home):
    shutil.copytree(CORPUS / "era-c", home / "old" / "checkpoints")
    (lines,) = (text.splitlines() for kind, text in BLOCKS if kind == "bash")
    for line in lines:
        words = shlex.split(line, comments=True)
        command = [sys.executable, "-m", "pdlib", *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
        assert (words[0], done.returncode) == ("pdlib", 0), done.stderr
    assert pdlib.open_run(home / "runs" / "migrated").step == 7
    assert pdlib.open_run(home / "runs" / "tms_5-2", verify=True).sites == ("linear1", "linear2")


def test_the_refusal_that_is_shown_is_the_one_that_comes(tmp_path):
    def array(*shape: int, dtype: str = "float32") -> np.ndarray:
        return np.zeros(shape, dtype)

    components = {
        "mlp": pdlib.Factors(array(64, 8), array(16, 32)),
        "out": pdlib.Factors(array(32, 16), array(16, 64, dtype="bfloat16")),
    }
    tree = pdlib.Decomposition(components, {"mlp": {"w": array(4), "b": array(1)}})
    with pytest.raises(pdlib.PdlibError) as caught:
        pdlib.Manager(tmp_path / "ckpts").save(100, {"decomposition": tree})
    shown = [text for _, text in BLOCKS if text.startswith("SpecMismatch: ")]
    assert shown == [f"{type(caught.value).__name__}: {caught.value}\n"]
    assert not (tmp_path / "ckpts").exists()


def test_the_directory_that_is_shown_is_the_one_that_is_written(home):
    (shown,) = [text for _, text in BLOCKS if text.startswith("runs/")]
    named = {name.rstrip("/") for line in shown.splitlines()[1:] for name in re.findall(r"[\w.]+[./]\w*", line)}
    run = home / "runs" / "tms_5-2"
    item = run / "ckpts" / "24" / "decomposition"
    top = {name for name in named if (run / name).exists()}
    assert {p.name for p in run.iterdir() if not p.name.startswith(".")} == top | {"ckpts"}
    assert {"pdlib.json", "manifest.json", "components.linear1.V"} <= named & {p.name for p in item.iterdir()}
    assert (item / "components.linear1.V" / "0.0").stat().st_size == 5 * 6 * 4


def test_the_specification_that_is_shown_is_one():
    (shown,) = [text for kind, text in BLOCKS if kind == "toml"]
    spec = parse_run_spec({"name": "shown", **tomllib.loads(shown)}, source="README.md")
    assert [term.kind for term in spec.terms.values()] == ["faithfulness", "minimality", "reconstruction"]
    runs = {path.stem for path in (ROOT / "specs" / "runs").glob("*.toml")}
    assert {load_run_spec(name).name for name in runs} == runs


def test_the_commands_of_the_readme_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    shell = [text for kind, text in BLOCKS if kind == "sh"]
    assert shell == ["pip install uv && uv run pdlib train tms_5-2\n", "pip install uv && uv run pytest\n"]
    assert f"\n{shell[1]}" in ci
    for part in ("ruff format --check", "ruff check", "basedpyright"):
        assert f"\nuv run {part}\n" in ci
        assert f"`uv run {part}`" in README


def test_the_parts_and_extras_that_are_named_are_there():
    names = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    markers = {marker.split(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]}
    parts = re.findall(r"`uv run pytest ([^`]+)`", README)
    assert parts
    for part in parts:
        for option, value in re.findall(r"(-\w )?([\w/]+)", part):
            assert option != "-k " or any(re.search(rf"def test_\w*{value}", text) for text in names), part
            assert option != "-m " or value in markers, part
            assert option or (ROOT / value).exists(), part
    extras = project["project"]["optional-dependencies"]
    assert set(re.findall(r"pdlib\[(\w+)\]", README)) == set(extras)
