"""The benchmarks' page is made of their results, and their commands are there; nothing is timed here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOME = Path(__file__).parents[1] / "benchmarks"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", HOME / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = load()


def test_the_page_is_what_the_results_make():
    assert (HOME / "README.md").read_text("utf-8") == report.page(), "run `uv run python benchmarks/report.py`"


@pytest.mark.parametrize("script", sorted({command.split()[0] for command in report.SECTIONS.values()} - {"import.py"}))
def test_every_command_of_the_page_says_how_it_is_used(script):
    done = subprocess.run([sys.executable, HOME / script, "--help"], capture_output=True, text=True, check=True)
    scales = {command.partition("--scale ")[2] for command in report.SECTIONS.values() if command.startswith(script)}
    assert all(scale in done.stdout for scale in scales)
