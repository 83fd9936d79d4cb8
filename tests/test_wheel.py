"""The installed wheel finds its own specs, whatever lies in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_specs_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    specs = {p.relative_to(ROOT / "specs").as_posix() for p in (ROOT / "specs").rglob("*.toml")}
    assert {name.removeprefix("pdlib/_specs/") for name in names if name.startswith("pdlib/_specs/")} == specs
    assert "pdlib/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"pdlib"}


DECOYS = {
    "a folder": {
        "specs/catalog.toml": 'owner = "somebody"\n[items]\n',
        "specs/items/decomposition.v1.toml": "item = 'decoy'",
    },
    "a package": {"specs/__init__.py": "raise RuntimeError('decoy imported')"},
    "a module": {"specs.py": "raise RuntimeError('decoy imported')"},
    "our own mark": {
        "specs/catalog.toml": (ROOT / "specs" / "catalog.toml").read_text().replace("blake3:", "blake3:0")
    },
    "a plain file": {"specs": "not a folder"},
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_an_installed_wheel_reads_its_own_specs_beside_a_decoy(wheel, tmp_path, decoy):
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    zipfile.ZipFile(wheel).extractall(site)
    for name, text in DECOYS[decoy].items():
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(text)
    code = """
import pathlib, sys, pdlib
from pdlib.items.contracts import specs_dir
from pdlib.run.spec import load_run_spec
print(pathlib.Path(pdlib.__file__).parent)
print(specs_dir())
print(pdlib.load_contract("decomposition").title, load_run_spec("tms_5-2").training.steps)
assert "specs" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(site)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [str(site / "pdlib"), str(site / "pdlib" / "_specs"), "decomposition v1 8000"]
