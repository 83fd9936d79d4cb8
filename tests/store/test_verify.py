"""`verify_path`: every kind of damage, at every level of a run, and nothing changed by looking."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

import pdlib
from pdlib.errors import ForeignLayout, NotARun, PdlibError, TornStep
from pdlib.store import Manager
from pdlib.store.ledger import describe_run
from pdlib.store.verify import verify_path
from tests.data.freeze import CORPUS
from tests.store.test_cases import listing


def describe(home: Path, record: dict) -> None:
    """Give an item a description, and a manifest that agrees with it."""
    text = json.dumps(record).encode()
    (home / "pdlib.json").write_bytes(text)
    manifest = json.loads((home / "manifest.json").read_text("utf-8"))
    manifest["files"]["pdlib.json"] = {"size": len(text), "blake3": blake3(text).hexdigest()}
    (home / "manifest.json").write_text(json.dumps(manifest), "utf-8")


@pytest.fixture
def run(tmp_path) -> Path:
    shutil.copytree(CORPUS / "raw.v1", tmp_path / "run")
    return tmp_path / "run"


def test_every_level_of_a_run_is_verified(run):
    before = listing(run)
    for path, items in ((run, 2), (run / "ckpts", 2), (run / "ckpts" / "7", 2), (run / "ckpts" / "7" / "training", 1)):
        report = verify_path(path)
        assert report, report.render()
        assert report.items == items
    assert (
        verify_path(run)
        .render()
        .endswith(": 2 items: every file is as it was written, every leaf as its contract says")
    )
    assert listing(run) == before


def test_each_kind_of_damage_has_its_word(run):
    home = run / "ckpts" / "7" / "decomposition"
    leaf = "components.layers.0.mlp.up.V"
    (home / leaf / "0.0").write_bytes(bytes(96))
    (home / leaf / ".zarray").unlink()
    (home / "extra.bin").write_bytes(b"x")
    (run / "ckpts" / "7" / "training" / "manifest.json").unlink()
    (run / "ckpts" / ".trash-abc").mkdir()
    report = verify_path(run)
    assert not report
    found = report.as_dict()
    assert found["changed"] == [f"7/decomposition/{leaf}/0.0"]
    assert found["missing"] == [f"7/decomposition/{leaf}/.zarray"]
    assert found["extra"] == ["7/decomposition/extra.bin"]
    assert "manifest.json is missing" in found["unverifiable"][0]
    assert found["leftovers"] == [f"{run}/ckpts/.trash-abc"]
    assert report.render().endswith("2 items: not whole")


def test_leaves_are_held_to_the_contract_that_they_name(run):
    home = run / "ckpts" / "7" / "decomposition"
    record = json.loads((home / "pdlib.json").read_text("utf-8"))
    for change, text in (
        (lambda r: r.update(digest="blake3:0"), "was written under a contract blake3:0"),
        (lambda r: r.update(version=99), "no contract 'decomposition' with version 99"),
        (lambda r: r["leaves"][0].update(shape=[6, 5]), "C bound by"),
    ):
        broken = json.loads(json.dumps(record))
        change(broken)
        describe(home, broken)
        report = verify_path(run)
        assert any(text in line for line in report.contracts), report.render()
        assert report.files


def test_any_bit_flipped_in_a_description_is_damage_to_every_tool_and_never_a_bug(run):
    path = run / "ckpts" / "7" / "decomposition" / "pdlib.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        report = verify_path(run)
        assert report.files.changed or report.files.unverifiable, place
        assert not report.contracts, place
        with pytest.raises((TornStep, ForeignLayout)):
            pdlib.open_run(run)
        with suppress(PdlibError):
            describe_run(run)


def test_items_of_a_user_are_held_to_their_manifest_alone(tmp_path):
    registry = pdlib.Registry((pdlib.ItemSpec(name="params", leaves=[pdlib.LeafSpec(path="**")]),))
    with Manager(tmp_path / "steps", registry=registry) as manager:
        manager.save(0, {"params": {"w": np.ones(3)}})
    assert verify_path(tmp_path / "steps")


def test_what_holds_nothing_is_refused(tmp_path):
    (tmp_path / "run" / "ckpts").mkdir(parents=True)
    with pytest.raises(NotARun, match="holds no step and no item to verify"):
        verify_path(tmp_path / "run")
    with pytest.raises(NotARun, match="does not exist"):
        verify_path(tmp_path / "nowhere")
