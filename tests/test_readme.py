"""Every Python block of README.md runs, in order, in one process; the two commands stand there as CI runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pdlib.run.loop import train
from pdlib.run.spec import load_run_spec
from tests.run.test_run import SMALL, Silent

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_blocks_run(tmp_path):
    train(load_run_spec("tms_5-2", overrides=SMALL), tmp_path / "runs" / "tms_5-2", Silent())
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(
        [*blocks, "from hypothesis import settings", "settings(max_examples=5, deadline=None)(test_round_trip)()"]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = tmp_path / "checkpoints"
    assert {p.name for p in written.iterdir()} == {"100", "200"}


def test_the_commands_of_the_readme_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "\npip install uv && uv run pdlib train tms_5-2\n" in README
    assert "\npip install uv && uv run pytest\n" in README
    assert "\npip install uv && uv run pytest\n" in ci
    for part in ("ruff format --check", "ruff check", "basedpyright"):
        assert f"uv run {part}" in ci
        assert f"uv run {part}" in README
