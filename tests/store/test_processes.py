"""Two real JAX processes over loopback save and restore together, and with one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pdlib
from pdlib.testing import assert_bit_equal
from tests.store.two_processes import ANY, host_state

ROOT = Path(__file__).resolve().parents[2]


def two_processes(action: str, folder: Path, layout: str = "raw") -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), action, str(folder), str(port)]
    workers = [
        subprocess.Popen(
            [*command, str(i), layout], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    outputs = [worker.communicate(timeout=240) for worker in workers]
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-4000:]
    return [out.splitlines()[-1] for out, _ in outputs]  # Gloo writes to stdout too


@pytest.mark.parametrize(("action", "layout"), [("save", "raw"), ("background", "raw"), ("save", "ocdbt")])
def test_what_two_processes_save_one_process_restores(tmp_path, action, layout):
    assert two_processes(action, tmp_path, layout) == ["saved", "saved"]
    with pdlib.Manager(tmp_path / "steps", registry=ANY, read_only=True) as manager:
        assert manager.verify(3), manager.verify(3)
        assert_bit_equal(
            manager.restore_to_host(3, "anything"), {k: v if v.ndim else v[()] for k, v in host_state().items()}
        )
    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == ["3"]


@pytest.mark.parametrize("layout", ["raw", "ocdbt"])
def test_what_one_process_saves_two_processes_restore(tmp_path, layout):
    with pdlib.Manager(tmp_path / "steps", registry=ANY, layout=layout) as manager:
        manager.save(3, {"anything": host_state()})
    assert two_processes("restore", tmp_path) == ["restored", "restored"]


@pytest.mark.parametrize("action", ["break-1", "limit-0", "limit-1", "closed-0"])
def test_a_write_that_fails_in_one_process_fails_the_save_in_both_and_leaves_nothing(tmp_path, action):
    """`break` fails each `os.write`; `limit` every file, those by which the processes tell each other included;
    `closed` the folder that all write to."""
    lead, other = two_processes(action, tmp_path)
    assert lead.startswith("SaveFailed: step 3 was not saved to ")
    assert other.startswith("SaveFailed: ")
    assert "process 1" in lead or action.endswith("0")
    assert "No space left on device" in lead or "File too large" in lead or action == "limit-1"
    assert not (tmp_path / "steps").exists() or not list((tmp_path / "steps").iterdir())


def test_a_step_of_other_values_is_refused_in_both_processes_and_stays(tmp_path):
    other = {**host_state(), "step": np.int32(8)}
    with pdlib.Manager(tmp_path / "steps", registry=ANY) as manager:
        manager.save(3, {"anything": other})
        before = manager.content_digest(3, "anything")
    lead, second = two_processes("other values", tmp_path)
    assert lead.startswith("StepRefused: step 3 of ")
    assert "holds another anything: the values differ" in lead
    assert second.startswith("SaveFailed: step 3 was not committed by the first process")
    with pdlib.Manager(tmp_path / "steps", registry=ANY, read_only=True) as manager:
        assert manager.content_digest(3, "anything") == before
        assert manager.verify(3)
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["3"]
