"""The frozen corpus: a tiny checkpoint of every layout and version that was ever written opens for ever, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import pdlib
from pdlib.items.contracts import default_registry
from pdlib.store import Manager
from pdlib.store.ledger import describe_run
from pdlib.store.migrate import apply_migration, plan_migration
from pdlib.store.verify import verify_path
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS, ENTRIES, STEP, process, product

OLDER = ("era-a", "era-b", "era-c", "split")
SITES = ("layers.18.mlp.gate_proj", "layers.18.mlp.up_proj", "layers.18.mlp.down_proj")
BLOCK = {"query": "wq", "key": "wk", "value": "wv", "output": "wo", "hidden_w": "w1", "hidden_b": "b1", "out_w": "w2",
         "out_b": "b2"}  # fmt: skip


def expected(layout: str) -> dict[str, np.ndarray]:
    """The product that the independent writer says it wrote."""
    with np.load(CORPUS / layout / "expected.npz") as file:
        return dict(file)


def want(layout: str) -> tuple[dict[str, pdlib.Factors], dict[str, np.ndarray]]:
    """The same as today's items have it."""
    old = expected(layout)
    blocks = sum(name.endswith("/wq") for name in old)
    stacked = {
        new: np.stack([old[f"ci/blocks/{i}/{was}"] for i in range(blocks)])[:, None] for new, was in BLOCK.items()
    }
    module = stacked | {"input_w": old["ci/in_proj_w"][None], "input_b": old["ci/in_proj_b"][None]}
    module["frequencies"] = old["ci/inv_freq"]
    start = 0
    for site in SITES:
        stop = start + old[f"V/{site}"].shape[1]
        module[f"head_w.{site}"], module[f"head_b.{site}"] = old["ci/out_w"][:, start:stop], old["ci/out_b"][start:stop]
        start = stop
    return {site: pdlib.Factors(old[f"V/{site}"], old[f"U/{site}"]) for site in SITES}, module


def test_the_corpus_holds_every_layout_and_nothing_unknown():
    assert {path.name for path in CORPUS.iterdir()} == {*OLDER, *ENTRIES}
    newest = {f"{item.name}.v{item.version}" for item in default_registry().items}
    assert newest == {"decomposition.v1", "training.v1"}, "freeze a checkpoint of the new version: tests/data/freeze.py"


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_pdlib_wrote_opens(name):
    run = CORPUS / name
    assert_bit_equal(tuple(pdlib.open_run(run, verify=True).decomposition), tuple(product()))
    assert_bit_equal(tuple(pdlib.open_run(run, host=True).decomposition), tuple(product()))
    assert verify_path(run), verify_path(run).render()
    with Manager(run / "ckpts", read_only=True) as manager:
        if name.startswith(("stripped", "consolidated")):
            assert manager.items(STEP) == ["decomposition"]
        else:
            abstract = jax.eval_shape(process)
            assert_bit_equal(manager.restore(STEP, {"training": abstract})["training"], process())


@pytest.mark.parametrize("layout", OLDER)
def test_what_older_programs_wrote_is_migrated(layout, tmp_path):
    before = {path: path.read_bytes() for path in (CORPUS / layout).rglob("*") if path.is_file()}
    plan = plan_migration(CORPUS / layout, tmp_path / "run", registry=default_registry(), with_training=True)
    apply_migration(plan)
    opened = pdlib.open_run(tmp_path / "run", verify=True, host=True)
    components, module = want(layout)
    assert_bit_equal(opened.components, components)
    assert_bit_equal(opened.ci_fn, {"chunkwise_transformer": module})
    assert verify_path(tmp_path / "run")
    assert {path: path.read_bytes() for path in (CORPUS / layout).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("layout", OLDER)
def test_what_older_programs_wrote_is_named(layout):
    report = describe_run(CORPUS / layout)
    assert [step.step for step in report.steps] == [STEP]
    assert f"older layout {layout}: " in report.render()
    found = verify_path(CORPUS / layout)
    assert not found
    assert all(f"older layout {layout}" in line for line in found.files.unverifiable)


def test_the_corpus_is_small():
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1_500_000


def test_a_copy_of_the_corpus_opens_where_it_is(tmp_path):
    """Nothing in it names the place or the machine that wrote it."""
    for name in ENTRIES:
        shutil.copytree(CORPUS / name, tmp_path / "elsewhere" / name)
        text = b"".join(p.read_bytes() for p in (tmp_path / "elsewhere" / name).rglob("*.json"))
        assert str(Path(CORPUS)).encode() not in text
        assert pdlib.open_run(tmp_path / "elsewhere" / name).step == STEP
