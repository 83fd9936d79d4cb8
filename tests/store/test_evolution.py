"""Items of earlier versions open under today's contract, by changes that the contract declares; no byte is touched."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import pdlib
from pdlib.errors import ContractError, SpecMismatch
from pdlib.items.contracts import read_contract
from pdlib.items.specs import Change
from pdlib.store import Manager
from pdlib.testing import assert_bit_equal
from tests.store.test_cases import LAYOUTS, listing

ANY = (pdlib.LeafSpec(path="**"),)


def registry(version: int, *changes: Change, leaves=ANY) -> pdlib.Registry:
    return pdlib.Registry((pdlib.ItemSpec(name="params", version=version, leaves=leaves, changes=changes),))


OLD = {"mlp": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}, "buffer": np.zeros(2)}
CHANGES = (
    Change(before=2, path="{module}/w", to="{module}/kernel"),
    Change(before=2, path="buffer", drop="computed since then"),
    Change(before=3, path="mlp/{param}", to="layers/mlp/{param}"),
)


def saved(path: Path, version: int, tree, *changes, layout="raw"):
    with Manager(path, registry=registry(version, *changes), layout=layout) as manager:
        manager.save(version, {"params": tree})


@LAYOUTS
def test_each_earlier_version_opens_under_the_newest(tmp_path, layout):
    saved(tmp_path, 1, OLD, layout=layout)
    saved(tmp_path, 2, {"mlp": {"kernel": OLD["mlp"]["w"], "b": OLD["mlp"]["b"]}}, *CHANGES[:2], layout=layout)
    want = {"layers": {"mlp": {"kernel": OLD["mlp"]["w"], "b": OLD["mlp"]["b"]}}}
    saved(tmp_path, 3, want, *CHANGES, layout=layout)
    before = listing(tmp_path)
    with Manager(tmp_path, registry=registry(3, *CHANGES), read_only=True) as manager:
        for step in (1, 2, 3):
            assert_bit_equal(manager.restore_to_host(step, "params"), want)
            assert_bit_equal(manager.open(step, "params"), want)
            assert_bit_equal(manager.restore(step, {"params": jax.eval_shape(lambda: want)})["params"], want)
            assert manager.verify(step)
            part = manager.open(step, "params", where=lambda keys: keys[-1] == "b")
            assert_bit_equal(part, {"layers": {"mlp": {"b": OLD["mlp"]["b"]}}})
    assert listing(tmp_path) == before


def test_the_content_digest_is_of_what_is_stored_whoever_reads_it(tmp_path):
    saved(tmp_path, 1, OLD)
    digests = {Manager(tmp_path, registry=r, read_only=True).content_digest(1, "params")
               for r in (registry(1), registry(3, *CHANGES))}  # fmt: skip
    assert len(digests) == 1


def test_what_is_new_and_optional_is_absent_and_what_is_new_and_wanted_is_missed(tmp_path):
    saved(tmp_path, 1, {"mlp": {"w": OLD["mlp"]["w"]}})
    rows = (
        pdlib.LeafSpec(path="{module}/w"),
        pdlib.LeafSpec(path="{module}/scale", optional=True),
        pdlib.LeafSpec(path="{module}/shift"),
    )
    abstract = {"mlp": {"w": jax.ShapeDtypeStruct((2, 3), np.float32), "scale": jax.ShapeDtypeStruct((3,), np.float32)}}
    with Manager(tmp_path, registry=registry(2, leaves=rows), read_only=True) as manager:
        restored = manager.restore(1, {"params": abstract})["params"]
        assert restored["mlp"]["scale"] is None
        abstract["mlp"]["shift"] = abstract["mlp"]["scale"]
        with pytest.raises(SpecMismatch, match="mlp/shift  is asked for, but not stored"):
            manager.restore(1, {"params": abstract})


def test_changes_stand_in_the_contract_s_file_and_change_its_digest(tmp_path):
    text = 'item = "params"\nversion = 2\nrole = "product"\n[[leaf]]\npath = "**"\n'
    change = '[[change]]\nbefore = 2\npath = "{module}/w"\nto = "{module}/kernel"\n'
    (tmp_path / "a.toml").write_text(text, "utf-8")
    (tmp_path / "b.toml").write_text(text + change, "utf-8")
    plain, changed = read_contract(tmp_path / "a.toml"), read_contract(tmp_path / "b.toml")
    assert plain.digest != changed.digest
    assert changed.changes == CHANGES[:1]
    assert changed.moved(("mlp", "w"), version=1) == ("mlp", "kernel")
    assert changed.moved(("mlp", "w"), version=2) == ("mlp", "w")
    (tmp_path / "c.toml").write_text(text + change.replace("before", "since"), "utf-8")
    with pytest.raises(ContractError, match="unknown key 'since'"):
        read_contract(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Change(before=1, path="a", to="b"), "before=1; write the version that made it"),
        (lambda: Change(before=2, path="a"), "write either to = its new path, or drop = why it went"),
        (lambda: Change(before=2, path="a", to="b", drop="c"), "write either to = its new path"),
        (lambda: registry(2, Change(before=3, path="a", to="b")), "v2: change of 'a' is of version 3"),
    ],
)
def test_an_impossible_change_is_refused(make, text):
    with pytest.raises(ContractError, match=text):
        make()
