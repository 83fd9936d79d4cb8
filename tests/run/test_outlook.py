"""What a run would be: each value with its origin, and bytes that are those of the run that follows."""

from __future__ import annotations

import json

import jax
import pytest

import pdlib
from pdlib.errors import RunSpecError
from pdlib.run.loop import train
from pdlib.run.outlook import outlook
from pdlib.run.spec import flat, load_run_spec, summaries, to_toml
from pdlib.store.ledger import describe_run, leaf_bytes
from tests.run.test_run import SMALL, Silent


def test_each_value_has_its_origin(tmp_path):
    (tmp_path / "mine.toml").write_text(to_toml(load_run_spec("tms_5-2")).replace("C = 20\n", ""))
    with pytest.raises(RunSpecError, match=r"decomposition.C: Field required"):
        outlook(str(tmp_path / "mine.toml"))
    found = outlook("tms_5-2", overrides=["seed=3", "decomposition.C_of={linear1=5}"])
    wanted = {"seed": "--set", "decomposition.C_of.linear1": "--set", "target.features": "tms_5-2.toml"}
    assert wanted.items() <= found.origin.items()
    assert found.origin["training.fsdp"] == "default"
    assert found.origin.keys() == flat(found.spec).keys()
    assert [(name, site.C) for name, site in found.sites.items()] == [("linear1", 5), ("linear2", 20)]


def test_bytes_are_those_of_the_run(tmp_path):
    found = outlook("tms_5-2", overrides=SMALL, devices=jax.devices()[:1])
    train(load_run_spec("tms_5-2", overrides=SMALL), tmp_path, Silent(), devices=jax.devices()[:1])
    with pdlib.Manager(tmp_path / "ckpts", read_only=True) as manager:
        held = [manager.items(step) for step in manager.steps()]
    last = describe_run(tmp_path).steps[-1]
    assert {item.name: sum(leaf_bytes(item, leaf) for leaf in item.leaves) for item in last.items} == found.nbytes
    products, processes = (sum(name in items for items in held) for name in ("decomposition", "training"))
    assert found.disk == {
        f"{products} products": products * found.nbytes["decomposition"],
        f"{processes} processes": processes * found.nbytes["training"],
    }


def test_the_8b_run_is_laid_out_without_a_file_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = outlook("llama_8b_layer_18", overrides=["training.batch=8"])
    assert found.nbytes["decomposition"] == pytest.approx(9.9e9, rel=0.05)
    assert found.mesh == {"data": 8, "fsdp": 1}
    assert "101 products" in found.render()
    assert json.loads(json.dumps(found.as_dict()))["sites"]["layers.18.mlp.down_proj"]["d_in"] == 14_336
    assert list(tmp_path.iterdir()) == []


def test_the_runs_with_names_say_what_they_are():
    found = summaries()
    assert {"tms_5-2", "llama_8b_layer_18"} <= found.keys()
    assert all(len(text) > 20 for text in found.values())
    for name in found:
        assert load_run_spec(name).name == name
