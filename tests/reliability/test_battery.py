"""The reliability battery: a short form in every run, the long one with `-m deep`; `tests.reliability.table` counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pdlib
from pdlib.store.ledger import describe_run
from pdlib.store.verify import verify_path
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS, product
from tests.reliability import battery, table
from tests.store.test_atomic import ask, place

__all__ = ["ask", "place"]  # fixtures

SHORT, LONG = 3, 15


@pytest.mark.parametrize("fault", battery.FAULTS)
@pytest.mark.parametrize("tool", battery.CASES)
def test_an_interrupted_tool_loses_nothing_and_can_be_run_again(ask, place, tool, fault):
    assert battery.interrupt(ask, place, tool, fault, SHORT, seed=0) == SHORT


@pytest.mark.deep
@pytest.mark.parametrize("fault", battery.FAULTS)
@pytest.mark.parametrize("tool", battery.CASES)
def test_an_interrupted_tool_loses_nothing_many_times(ask, place, tool, fault):
    assert battery.interrupt(ask, place, tool, fault, LONG, seed=1) == LONG


@pytest.mark.parametrize("action", battery.SAVING)
def test_an_interrupted_save_loses_nothing(ask, place, action):
    assert battery.interrupt_saves(ask, place, action, SHORT, seed=2) == SHORT


@pytest.mark.parametrize("name", ["raw.v1", "ocdbt.v1"])
def test_damage_to_any_file_is_found_and_never_read_as_zeros(tmp_path, name):
    assert battery.damage_every_file(tmp_path, name, most=12).total() >= 24


@pytest.mark.deep
@pytest.mark.parametrize("name", ["raw.v1", "raw-shards.v1", "ocdbt.v1"])
def test_damage_to_every_file_is_found(tmp_path, name):
    assert battery.damage_every_file(tmp_path, name, most=10_000)


def test_a_run_opens_while_it_is_training(place):
    assert battery.open_while_training(place, 200) == 200


@pytest.mark.deep
def test_a_run_opens_ten_thousand_times_while_it_is_training(place):
    assert battery.open_while_training(place, 10_000) == 10_000


@pytest.mark.parametrize("times", [60, pytest.param(200, marks=pytest.mark.deep)])
def test_memory_and_descriptors_stay_flat_over_many_saves(place, times):
    grown, opened = battery.save_many(place, times)
    assert grown < 4 << 20
    assert opened <= 0


@pytest.fixture(params=["moved", "symlinked", "odd name", "read-only", "foreign"])
def elsewhere(request, tmp_path) -> Path:
    run = tmp_path / {"odd name": "ü n i/~ 'x'\n"}.get(request.param, "run")
    shutil.copytree(CORPUS / "raw-shards.v1", run)
    match request.param:
        case "moved":
            run.rename(tmp_path / "moved")
            return tmp_path / "moved"
        case "symlinked":
            (tmp_path / "link").symlink_to(run, target_is_directory=True)
            return tmp_path / "link"
        case "read-only":
            for path in [run, *run.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
        case "foreign" if os.getuid() == 0:
            for path in [run, *run.rglob("*")]:
                os.chown(path, 12345, 12345)
        case _:
            pass
    return run


def test_wherever_a_run_is_it_opens_verifies_and_is_described(elsewhere):
    before = battery.files(elsewhere)
    assert_bit_equal(tuple(pdlib.open_run(elsewhere, verify=True).decomposition), tuple(product()))
    assert verify_path(elsewhere)
    assert str(elsewhere) in describe_run(elsewhere).render()
    for command in (["inspect"], ["verify"], ["strip", "--keep-newest", "0"], ["prune", "--processes", "1"]):
        words = [sys.executable, "-m", "pdlib", command[0], str(elsewhere), *command[1:]]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert battery.files(elsewhere) == before


def test_the_table_names_every_case_of_the_battery():
    text = (Path(__file__).parents[2] / "SPEC.md").read_text("utf-8")
    part = text.partition(table.START)[2].partition(table.END)[0]
    rows = [line.split("|")[1:3] for line in part.splitlines()[2:] if line.startswith("|")]
    named = {(fault.strip(), tool.strip()) for fault, tool in rows}
    assert named == set(table.rows_wanted()), f"run: {table.COMMAND}"
