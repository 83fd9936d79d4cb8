"""What is built installs whole, and finds its own specs whatever lies in the working directory or beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
OWN_CATALOG = (ROOT / "specs" / "catalog.toml").read_text("utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [UV, "build", "--quiet", "--out-dir", str(out), str(ROOT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel in a folder of its own; what it depends on comes from this environment."""
    site = tmp_path_factory.mktemp("installed") / "site"
    command = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", sys.executable]
    done = subprocess.run([*command, "--target", str(site), str(built[1])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return site


def test_the_wheel_holds_the_specs_and_the_types_and_no_tests(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    specs = {p.relative_to(ROOT / "specs").as_posix() for p in (ROOT / "specs").rglob("*") if p.is_file()}
    assert {name.removeprefix("pdlib/_specs/") for name in names if name.startswith("pdlib/_specs/")} == specs
    assert "pdlib/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"pdlib"}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pdlib").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_the_source_distribution_holds_the_tests_and_documents(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"SPEC.md", "README.md", "LICENSE", "specs/catalog.toml", "tests/test_wheel.py"} <= names


DECOYS = {
    "somebody's folder": {
        "specs/catalog.toml": 'owner = "somebody"\n[items]\n',
        "specs/items/decomposition.v1.toml": "item = 'decoy'",
    },
    "a folder with our own mark": {
        "specs/catalog.toml": OWN_CATALOG.replace("blake3:", "blake3:0"),
        "specs/runs/tms_5-2.toml": "seed = 'decoy'",
    },
    "a package": {"specs/__init__.py": "raise RuntimeError('decoy imported')"},
    "a module": {"specs.py": "raise RuntimeError('decoy imported')"},
    "a module of the package's own name for it": {"_specs.py": "raise RuntimeError('decoy imported')"},
    "a plain file": {"specs": "not a folder"},
}

READ_SPECS = """
import pathlib, sys, pdlib
from pdlib.items.contracts import specs_dir
from pdlib.run.spec import load_run_spec
print(pathlib.Path(pdlib.__file__).parent)
print(specs_dir())
print(pdlib.load_contract("decomposition").title, load_run_spec("tms_5-2").training.steps)
assert not {"specs", "_specs"} & set(sys.modules)
"""


def lay_out(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def run_python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    cwd.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(site)]), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("place", ["the working directory", "site-packages"])
@pytest.mark.parametrize("decoy", DECOYS)
def test_an_installed_wheel_reads_its_own_specs_beside_a_decoy(installed, tmp_path, decoy, place):
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    shutil.copytree(installed, site)
    cwd.mkdir()
    lay_out(DECOYS[decoy], cwd if place == "the working directory" else site)
    done = run_python(site, cwd, "-c", READ_SPECS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [str(site / "pdlib"), str(site / "pdlib" / "_specs"), "decomposition v1 8000"]


def test_an_installation_without_its_specs_says_so_and_takes_nobody_else_s(installed, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    shutil.rmtree(site / "pdlib" / "_specs")
    lay_out(DECOYS["somebody's folder"], site)
    lay_out(DECOYS["a folder with our own mark"], tmp_path / "cwd")
    done = run_python(site, tmp_path / "cwd", "-c", "import pdlib; pdlib.load_contract('decomposition')")
    assert "ContractError: pdlib's specs are in neither" in done.stderr
    assert "the installation is incomplete; install pdlib again" in done.stderr


def test_the_installed_command_runs(installed, tmp_path):
    done = run_python(installed, tmp_path / "cwd", str(installed / "bin" / "pdlib"), "train", "tms_5_2")
    assert done.returncode == 1
    assert "did you mean 'tms_5-2'?" in done.stderr
