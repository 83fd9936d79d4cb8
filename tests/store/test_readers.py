"""Many at one directory: readers, who never write, and savers, of whom one wins and the others say why they did not."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pdlib
from pdlib.errors import PdlibError, SaveFailed, StepRefused
from pdlib.store import KeepAll, KeepNewest, Manager, Retention, restore_latest, save_state
from pdlib.testing import assert_bit_equal
from tests.store.crash import state_of
from tests.store.test_cases import ANY, LAYOUTS, listing, python

WATCHED = """
    import os, sys
    run, layout = sys.argv[1:]
    asked = []
    def watch(event, args):
        writing = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        changing = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.utime",
                             "os.link", "os.symlink", "os.truncate", "os.setxattr", "shutil.rmtree", "shutil.move")
        if (writing or changing) and str(args[0]).startswith(run):
            asked.append((event, args))
    sys.addaudithook(watch)
    import jax, pdlib
    import pdlib.store as store
    from tests.store.crash import state_of
    keep = store.Retention(store.KeepNewest(1), store.KeepNewest(1))
    with pdlib.Manager(run + "/ckpts", read_only=True, retention=keep, layout=layout) as manager:
        for step in (*manager.steps(), 99):
            for item in (*manager.items(step), "training", "decomposition"):
                for look in (manager.describe, manager.content_digest, manager.restore_to_host, manager.open):
                    try: look(step, item)
                    except pdlib.PdlibError: pass
            manager.verify(step)
        manager.latest(), manager.latest(items=("training",), fallback=True), manager.wait()
        assert store.restore_latest(manager, state_of(0))[0] == 1
        store.restore_factors(manager, "s")
        writes = manager.prune, lambda: manager.keep(1), lambda: manager.save(9, {}), lambda: manager.resume_at(1)
        for refused in writes:
            try: refused()
            except pdlib.PdlibError: pass
            else: raise AssertionError
    assert not asked, asked
    pdlib.open_run(run), pdlib.open_run(run, verify=True, host=True), pdlib.open_run(run, sites="s", dtype="bfloat16")
    store.init_from_parent(run, state_of(0).decomposition)
    from pdlib.store.ledger import describe_run
    describe_run(run).render()
    assert not asked, asked
    open(run + "/proof", "w").close()
    print(len(asked))
"""


@LAYOUTS
def test_case_31_no_way_of_reading_asks_for_a_write(tmp_path, layout):
    run = tmp_path / "run"
    with Manager(run / "ckpts", layout=layout) as manager:
        save_state(manager, 1, state_of(1))
        save_state(manager, 2, state_of(2), process=False)
        manager.keep(1)
    for leftover in (".staging-3-dead/decomposition", ".trash-dead/training", "3.orbax-checkpoint-tmp-7"):
        (run / "ckpts" / leftover).mkdir(parents=True)
    before = listing(run)
    assert python(WATCHED, run, layout) == "1\n", "only the proof that the watch sees writes"
    (run / "proof").unlink()
    after = listing(run)
    assert after == before


@pytest.mark.parametrize("equal", [True, False])
def test_case_39_many_who_save_one_step_leave_one_whole_step(tmp_path, equal):
    """Each from a manager of its own, all at once."""
    count = 8
    start = threading.Barrier(count)

    def save(index: int) -> str:
        with Manager(tmp_path / "run" / "ckpts") as manager:
            start.wait()
            try:
                save_state(manager, 1, state_of(0 if equal else index))
            except (StepRefused, SaveFailed) as refused:
                return str(refused)
        return ""

    with ThreadPoolExecutor(count) as pool:
        said = list(pool.map(save, range(count)))
    winners = [index for index, text in enumerate(said) if not text]
    assert winners
    assert [p.name for p in (tmp_path / "run" / "ckpts").iterdir()] == ["1"]
    with Manager(tmp_path / "run" / "ckpts", read_only=True) as manager:
        assert manager.verify(1), manager.verify(1)
        kept = restore_latest(manager, state_of(0))[1]
    if equal:
        assert_bit_equal(kept, state_of(0))
    else:
        assert len(winners) == 1, said
        assert_bit_equal(kept, state_of(winners[0]))


@pytest.mark.parametrize("layout", ["raw", "ocdbt"])
def test_case_39_who_comes_second_between_check_and_rename_changes_nothing(tmp_path, monkeypatch, layout):
    """The other commits at the last instant: just before the rename that would publish this step."""
    real = os.rename
    late: list[bool] = []

    def overtaken(source: Any, target: Any, **kwargs: Any) -> None:
        if not late and Path(target) == tmp_path / "2":
            late.append(True)
            with Manager(tmp_path) as other:
                save_state(other, 2, state_of(7))
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", overtaken)
    with Manager(tmp_path, layout=layout) as manager:
        save_state(manager, 1, state_of(1))
        with pytest.raises(SaveFailed, match="step 2 was not saved"):
            save_state(manager, 2, state_of(2))
        assert late
        assert_bit_equal(manager.restore_to_host(2, "decomposition"), state_of(7).decomposition)
        assert manager.verify(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("product", [KeepAll(), KeepNewest(2)], ids=str)
def test_a_reader_beside_a_run_that_saves_and_prunes_sees_whole_products_only(tmp_path, product):
    run, done, seen = tmp_path / "run", threading.Event(), set[int]()
    with Manager(run / "ckpts") as manager:
        save_state(manager, 0, state_of(0))

    def save() -> None:
        keep = Retention(product=product, process=KeepNewest(1))
        try:
            with Manager(run / "ckpts", retention=keep) as manager:
                for step in range(1, 20):
                    save_state(manager, step, state_of(step), background=step % 2 == 0)
        finally:
            done.set()

    writer = threading.Thread(target=save)
    writer.start()
    try:
        while not done.is_set():
            opened = pdlib.open_run(run, host=True)
            assert_bit_equal(opened.decomposition, state_of(opened.step).decomposition)
            seen.add(opened.step)
    finally:
        writer.join()
    assert len(seen) > 1
    assert pdlib.open_run(run).step == 19


def test_a_mapped_product_outlives_the_pruning_of_its_step(tmp_path):
    with Manager(tmp_path / "ckpts", retention=Retention(product=KeepNewest(1))) as manager:
        save_state(manager, 1, state_of(1))
        host, device = pdlib.open_run(tmp_path, host=True), pdlib.open_run(tmp_path)
        save_state(manager, 2, state_of(2))
        assert manager.steps() == [2]
    assert_bit_equal(host.decomposition, state_of(1).decomposition)
    assert np.asarray(device.components["s"].V).tobytes() == state_of(1).decomposition.components["s"].V.tobytes()


def test_case_15_metadata_product_and_process_in_every_order_give_the_same(tmp_path):
    with Manager(tmp_path) as manager:
        save_state(manager, 1, state_of(1))
    looks = {
        "metadata": lambda m: [str(m.describe(1, item).leaves) for item in ("training", "decomposition")],
        "product": lambda m: m.restore(1, {"decomposition": state_of(0).decomposition}),
        "process": lambda m: m.restore(1, {"training": state_of(0).training}),
        "host": lambda m: m.restore_to_host(1, "training"),
    }

    def text(value: Any) -> str:
        leaves = jax.tree.leaves(value)
        return str([np.asarray(x).tobytes() if hasattr(x, "dtype") else x for x in leaves])

    answers = set()
    for order in itertools.permutations(looks):
        with Manager(tmp_path, read_only=True) as manager:
            found = {name: text(looks[name](manager)) for name in (*order, *order)}
        answers.add(tuple(sorted(found.items())))
    assert len(answers) == 1


def test_case_29_one_leftover_of_this_very_name_is_no_obstacle(tmp_path):
    with Manager(tmp_path, registry=ANY) as manager:
        manager.save(1, {"anything": 1})
        for name in (".staging-2-x", ".trash-x", "2.orbax-checkpoint-tmp-1700000000", "tmp_2", "2.0", "02"):
            (tmp_path / name / "anything").mkdir(parents=True)
            (tmp_path / name / "anything" / "pdlib.json").write_text("{")
        manager.save(2, {"anything": 2})
        assert manager.steps() == [1, 2]
        assert manager.latest() == 2
        assert manager.verify(2)
        pdlib.store.remove_leftovers(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "02", "1", "2", "2.0", "2.orbax-checkpoint-tmp-1700000000", "tmp_2",
        ]  # fmt: skip
        with pytest.raises(PdlibError):
            manager.save(2, {"anything": 3})
