"""Stripping and pruning: what goes, what must stay, and that a plan changes nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import pdlib
from pdlib.errors import ContractError, CorruptItem, NoCheckpoint, RunConflict, SaveFailed, StepRefused, TornStep
from pdlib.items.contracts import default_registry
from pdlib.store import KeepAll, KeepNewest, Manager, Retention, files, restore_latest, save_state
from pdlib.store.ledger import describe_run
from pdlib.store.lock import locked
from pdlib.store.notes import CONVERTED_FILE, note_converted, stripped
from pdlib.store.prune import apply_prune, plan_prune
from pdlib.store.strip import apply_strip, plan_strip
from pdlib.store.verify import verify_path
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS
from tests.store.crash import state_of
from tests.store.test_cases import LAYOUTS, listing
from tests.store.test_corpus import want


@pytest.fixture
def run(tmp_path) -> Path:
    with Manager(tmp_path / "run" / "ckpts") as manager:
        for step in (1, 2, 3):
            save_state(manager, step, state_of(step))
    return tmp_path / "run"


def held(run: Path) -> dict[int, list[str]]:
    with Manager(run / "ckpts", read_only=True) as manager:
        return {step: manager.items(step) for step in manager.steps()}


BOTH, PRODUCT = ["decomposition", "training"], ["decomposition"]


def test_a_plan_changes_nothing_and_says_what_would_go(run):
    before = listing(run)
    plan = plan_strip(run, keep_newest=0)
    freed = describe_run(run).process_bytes
    assert plan.freed > 0.9 * freed
    assert plan.render().splitlines()[0] == f"{run}: 3 steps, {plan.freed / 1000:.2f} kB to free"
    assert re.search(r"step 2 +keep decomposition; free training", plan.render())
    assert [step["frees"].keys() for step in plan.as_dict()["steps"]] == [{"training"}] * 3
    plan_prune(run, Retention(process=KeepNewest(1)))
    assert listing(run) == before


@LAYOUTS
def test_the_newest_process_is_spared_and_the_products_stay_to_the_bit(tmp_path, layout):
    run = tmp_path / "run"
    with Manager(run / "ckpts", layout=layout) as manager:
        for step in (1, 2):
            save_state(manager, step, state_of(step))
    apply_strip(plan_strip(run))
    assert held(run) == {1: PRODUCT, 2: BOTH}
    for step in (1, 2):
        assert_bit_equal(pdlib.open_run(run, step=step, verify=True).decomposition, state_of(step).decomposition)
    with Manager(run / "ckpts") as manager:
        assert restore_latest(manager, jax.eval_shape(lambda: state_of(0)))[0] == 2
    assert verify_path(run)


def test_one_step_is_stripped_alone_and_the_newest_only_when_told(run):
    apply_strip(plan_strip(run, step=2))
    assert held(run) == {1: BOTH, 2: PRODUCT, 3: BOTH}
    with pytest.raises(
        StepRefused, match=r"step 3 of .* was not stripped: its process is among the newest.*--keep-newest 0"
    ):
        plan_strip(run, step=3)
    apply_strip(plan_strip(run, step=3, keep_newest=0))
    assert held(run) == {1: BOTH, 2: PRODUCT, 3: PRODUCT}
    with pytest.raises(NoCheckpoint, match="holds no step 9; it holds 1, 2, 3"):
        plan_strip(run, step=9)


def test_a_stripped_run_says_that_it_cannot_resume_and_why(run):
    apply_strip(plan_strip(run, keep_newest=0))
    with (
        Manager(run / "ckpts") as manager,
        pytest.raises(
            NoCheckpoint, match=r"It cannot resume: training was stripped of 1 at 20\d\d-.*, 3 at .*\. Start anew"
        ),
    ):
        restore_latest(manager, jax.eval_shape(lambda: state_of(0)))
    assert describe_run(run).render().count("(training stripped: it cannot resume)") == 3
    assert describe_run(run).as_dict()["steps"][0]["stripped"]["training"] > 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_the_system_refuses_is_an_error_of_ours(run, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), "somewhere")

    monkeypatch.setattr(files, "set_aside", refuse)
    text = f"{os.strerror(number)}: 'somewhere'\nNothing that was there is lost: mend the cause"
    with pytest.raises(SaveFailed, match=text):
        apply_strip(plan_strip(run))
    assert held(run) == {1: BOTH, 2: BOTH, 3: BOTH}


def test_a_live_run_is_left_alone(run):
    code = (
        "import sys\nfrom pathlib import Path\nfrom pdlib.store.lock import locked\n"
        f"with locked(Path({str(run)!r})): print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "in\n"
        before = listing(run / "ckpts")
        plan, pruning = plan_strip(run, keep_newest=0), plan_prune(run, Retention(process=KeepNewest(1)))
        assert plan.live
        assert "another process is at work in this run: it cannot be stripped now" in plan.render()
        for apply, planned in ((apply_strip, plan), (apply_prune, pruning)):
            with pytest.raises(RunConflict, match="another process is at work in"):
                apply(planned)
        assert listing(run / "ckpts") == before
        trainer.communicate("")
    assert not plan_strip(run).live


def test_a_process_without_a_whole_product_stays(run):
    (run / "ckpts" / "1" / "decomposition" / "components.s.V" / "0.0").unlink()
    shutil.rmtree(run / "ckpts" / "2" / "decomposition")
    plan = plan_strip(run, keep_newest=0)
    assert "its product is not whole" in plan.steps[0].spared
    assert "it has no whole product: nothing would be left of it" in plan.steps[1].spared
    apply_strip(plan)
    assert held(run) == {1: BOTH, 2: ["training"], 3: PRODUCT}


def test_a_product_that_breaks_after_the_plan_is_noticed(run):
    plan = plan_strip(run, keep_newest=0)
    (run / "ckpts" / "1" / "decomposition" / "components.s.V" / "0.0").write_bytes(b"")
    with pytest.raises(TornStep):
        apply_strip(plan)
    assert held(run)[1] == BOTH


def test_a_marked_step_is_spared(run):
    with Manager(run / "ckpts") as manager:
        manager.keep(1)
    plan = plan_strip(run)
    assert "it is marked to keep" in plan.steps[0].spared
    apply_strip(plan)
    assert held(run) == {1: BOTH, 2: PRODUCT, 3: BOTH}


def test_the_process_is_gone_at_once_and_the_bytes_soon(run):
    apply_strip(plan_strip(run, keep_newest=0), wait=False)
    assert held(run) == {1: PRODUCT, 2: PRODUCT, 3: PRODUCT}
    for _ in range(200):
        if not [p for p in (run / "ckpts").iterdir() if p.name.startswith(".")]:
            break
        time.sleep(0.05)
    assert not [p for p in (run / "ckpts").iterdir() if p.name.startswith(".")]


def test_trash_of_a_killed_strip_goes_with_the_next(run):
    files.set_aside(run / "ckpts" / "1" / "training", home=run / "ckpts")
    apply_strip(plan_strip(run))
    assert not [p for p in (run / "ckpts").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("layout", ["raw", "ocdbt"])
def test_consolidated_products_open_without_a_copy_and_are_the_same_values(tmp_path, layout, mesh_of):
    run = tmp_path / "run"
    values = np.random.default_rng(0).integers(0, 2**32, (2, 8, 8), np.uint32).view(np.float32)
    state = state_of(1)
    state = state._replace(decomposition=state.decomposition._replace(components={"s": pdlib.Factors(*values)}))
    state = state._replace(training=state.training._replace(adversaries={}))
    placed = jax.device_put(state, jax.NamedSharding(mesh_of(4), jax.P()))
    split = jax.device_put(pdlib.Factors(*values), jax.NamedSharding(mesh_of(4), jax.P("fsdp")))
    placed = placed._replace(decomposition=placed.decomposition._replace(components={"s": split}))
    with Manager(run / "ckpts", layout=layout) as manager:
        save_state(manager, 1, placed)
        digest = manager.content_digest(1, "decomposition")
    held_open = pdlib.open_run(run)
    apply_strip(plan_strip(run, consolidate=True))
    assert held(run) == {1: BOTH}, "the newest process is spared; only the product is rewritten"
    with Manager(run / "ckpts", read_only=True) as manager:
        item = manager.describe(1, "decomposition")
        assert all(len(list(leaf.files())) == 1 for leaf in item.leaves)
        assert item.layout == "raw"
        assert manager.content_digest(1, "decomposition") == digest
        host = manager.restore_to_host(1, "decomposition", mapped=True)
    assert isinstance(host.components["s"].V.base, np.ndarray)
    assert_bit_equal(pdlib.open_run(run, verify=True).components, {"s": pdlib.Factors(*values)})
    assert_bit_equal(held_open.components, {"s": pdlib.Factors(*values)})
    assert plan_strip(run, consolidate=True).steps[0].rewritten == {}
    assert verify_path(run)


def test_a_corrupt_product_is_not_consolidated(tmp_path):
    shutil.copytree(CORPUS / "raw-shards.v1", tmp_path / "run")
    home = tmp_path / "run" / "ckpts" / "7" / "decomposition"
    file = next(p for p in home.rglob("0.0") if p.parent.name.endswith(".V"))
    file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    with pytest.raises(CorruptItem, match="changed: 7/decomposition"):
        apply_strip(plan_strip(tmp_path / "run", consolidate=True))
    assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == before


def test_a_file_system_that_cannot_exchange_is_named_and_nothing_changes(tmp_path, monkeypatch):
    shutil.copytree(CORPUS / "raw-shards.v1", tmp_path / "run")
    before = listing(tmp_path / "run" / "ckpts" / "7")

    def refuse(*_):
        raise OSError(22, "Invalid argument (exchanging two directories in one step)")

    monkeypatch.setattr(files, "exchange", refuse)
    with pytest.raises(StepRefused, match=r"was not rewritten: .*\nNothing was changed; export it"):
        apply_strip(plan_strip(tmp_path / "run", consolidate=True))
    assert listing(tmp_path / "run" / "ckpts" / "7") == before


@pytest.mark.parametrize("layout", ["era-a", "era-b", "era-c"])
def test_an_older_step_of_one_item_is_converted_in_place(tmp_path, layout):
    run = tmp_path / "run"
    shutil.copytree(CORPUS / layout / "7", run / "ckpts" / "7")
    with pytest.raises(StepRefused, match="among the newest"):
        plan_strip(run, step=7)
    plan = plan_strip(run, keep_newest=0)
    assert f"convert {layout}" in plan.render()
    apply_strip(plan)
    assert held(run) == {7: PRODUCT}
    components, module = want(layout)
    opened = pdlib.open_run(run, verify=True, host=True)
    assert_bit_equal(opened.components, components)
    assert_bit_equal(opened.ci_fn, {"chunkwise_transformer": module})
    note = stripped(run / "ckpts" / "7")
    assert note is not None
    assert note["items"].keys() == {"default"}
    assert plan_strip(run, keep_newest=0).freed == 0
    assert not [p for p in (run / "ckpts").iterdir() if p.name.startswith(".")]


def test_an_older_step_of_two_items_loses_its_process_alone(tmp_path):
    shutil.copytree(CORPUS / "split" / "7", tmp_path / "run" / "ckpts" / "7")
    before = listing(tmp_path / "run" / "ckpts" / "7" / "decomposition")
    apply_strip(plan_strip(tmp_path / "run", keep_newest=0))
    assert listing(tmp_path / "run" / "ckpts" / "7" / "decomposition") == before
    assert not (tmp_path / "run" / "ckpts" / "7" / "training").exists()


def test_a_conversion_that_was_interrupted_is_ended(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(CORPUS / "era-c" / "7", run / "ckpts" / "7")
    apply_strip(plan_strip(run, keep_newest=0))
    # as if it had been killed before the older item went
    shutil.copytree(CORPUS / "era-c" / "7" / "default", run / "ckpts" / "7" / "default")
    assert pdlib.open_run(run).step == 7
    plan = plan_strip(run, keep_newest=0)
    assert plan.steps[0].freed.keys() == {"default"}
    apply_strip(plan)
    assert held(run) == {7: PRODUCT}
    # and a note without what should have taken its place takes nothing away
    shutil.rmtree(run / "ckpts" / "7")
    shutil.copytree(CORPUS / "era-c" / "7", run / "ckpts" / "7")
    note_converted(run / "ckpts" / "7", "era-c", ["default"])
    assert plan_strip(run, keep_newest=0).steps[0].conversion is not None
    assert (run / "ckpts" / "7" / CONVERTED_FILE).exists()


def test_pruning_after_the_fact_deletes_by_role(run):
    plan = plan_prune(run, Retention(product=KeepAll(), process=KeepNewest(1)))
    assert list(plan.doomed) == [(1, "training"), (2, "training")]
    assert plan.as_dict()["deletes"][0]["item"] == "training"
    apply_prune(plan)
    assert held(run) == {1: PRODUCT, 2: PRODUCT, 3: BOTH}
    apply_prune(plan_prune(run, Retention(product=KeepNewest(1))))
    assert held(run) == {3: BOTH}


def test_pruning_leaves_what_pdlib_did_not_write(tmp_path):
    shutil.copytree(CORPUS / "split" / "7", tmp_path / "run" / "ckpts" / "7")
    assert plan_prune(tmp_path / "run", Retention(product=KeepNewest(1), process=KeepNewest(1))).doomed == {}


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pdlib", *map(str, args)], capture_output=True, text=True, check=False)


def test_the_commands_plan_first_and_act_when_told(run, tmp_path):
    done = command("strip", run, "--json")
    assert json.loads(done.stdout)["steps"][0]["frees"]
    assert done.stderr == "nothing was changed; pass --apply to do it\n"
    assert held(run) == {1: BOTH, 2: BOTH, 3: BOTH}
    assert "step 1: training is gone" in command("strip", run, "--apply", "--wait").stderr
    assert held(run) == {1: PRODUCT, 2: PRODUCT, 3: BOTH}
    assert command("prune", run, "--products", "1").returncode == 0
    assert command("prune", run, "--products", "1", "--apply").returncode == 0
    assert held(run) == {3: BOTH}
    refused = command("prune", run, "--products", "some")
    assert (refused.returncode, refused.stderr) == (
        1,
        "ContractError: 'some' is no policy; write all, marked, or how many of the newest to keep\n",
    )
    assert command("verify", run).returncode == 0
    (run / "ckpts" / "3" / "training" / "step" / "0").write_bytes(b"\1\0\0\0")
    broken = command("verify", run, "--json")
    assert broken.returncode == 1
    assert json.loads(broken.stdout)["changed"] == ["3/training/step/0"]
    made = command("migrate", CORPUS / "era-a", tmp_path / "made", "--apply")
    assert made.returncode == 0, made.stderr
    assert pdlib.open_run(tmp_path / "made").step == 7
    assert command("migrate", CORPUS / "era-b", tmp_path / "made", "--apply").returncode == 1


def test_planning_and_stripping_load_no_jax(run):
    code = (
        "import sys\nfrom pdlib.store.strip import plan_strip, apply_strip\n"
        f"apply_strip(plan_strip({str(run)!r}, keep_newest=0))\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_policies_of_the_command_line():
    from pdlib.store.retention import KeepMarked, parse_policy

    assert [parse_policy(text) for text in ("all", "marked", "3")] == [KeepAll(), KeepMarked(), KeepNewest(3)]
    with pytest.raises(ContractError, match="write how many steps to keep"):
        parse_policy("0")
    assert default_registry().names == ("decomposition", "training")


def test_the_lock_is_the_trainer_s(run):
    with locked(run):
        assert plan_strip(run).live
        with pytest.raises(RunConflict):
            apply_strip(plan_strip(run))
