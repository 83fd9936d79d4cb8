"""What retention keeps: random histories under every pair of policies, and what holds after each step of them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pdlib
from pdlib.errors import NoCheckpoint, StepRefused
from pdlib.store import (
    KeepAll,
    KeepMarked,
    KeepNewest,
    Manager,
    Retention,
    restore_latest,
    restore_step,
    save_state,
)
from pdlib.testing import assert_bit_equal
from tests.store.crash import state_of

ROWS = [pdlib.LeafSpec(path="**")]
PAIR = pdlib.Registry(
    (pdlib.ItemSpec(name="result", leaves=ROWS), pdlib.ItemSpec(name="rest", role="process", leaves=ROWS))
)
POLICIES = [KeepAll(), KeepNewest(1), KeepNewest(3), KeepMarked()]
BOTH = {"result", "rest"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: these tests write many small steps."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def shown(manager: Manager) -> dict[int, set[str]]:
    return {step: set(manager.items(step)) for step in manager.steps()}


def kept_by(policy: object, holding: list[int]) -> set[int]:
    if isinstance(policy, KeepNewest):
        return set(holding[-policy.count :])
    return set(holding) if isinstance(policy, KeepAll) else set()


def check_step(before: dict[int, set[str]], after: dict[int, set[str]], marked: set[int], keep: Retention) -> None:
    """What holds of a directory after retention has run, from what it held before."""
    newest = max(before)
    resumable = [step for step, items in before.items() if items == BOTH]
    safe = marked | {newest, *([max(resumable)] if resumable else [])}
    for step in safe & set(before):
        assert after[step] == before[step], f"step {step} is marked, the newest, or the newest resumable"
    for step, items in after.items():
        assert items <= before[step]
        assert items
        assert items != {"rest"} or before[step] == {"rest"}, "a process outlived its product"
    products = {s for s, items in before.items() if "result" in items}
    wanted = kept_by(keep.product, sorted(products)) | (safe & products)
    assert {s for s, items in after.items() if "result" in items} == wanted
    processes = sorted(s for s, items in before.items() if "rest" in items)
    for step in kept_by(keep.process, processes) & wanted:
        assert "rest" in after[step]
    for step in set(processes) - kept_by(keep.process, processes) - safe:
        assert "rest" not in after.get(step, ())


@pytest.mark.parametrize("process", POLICIES, ids=str)
@pytest.mark.parametrize("product", POLICIES, ids=str)
def test_any_history_keeps_what_its_policies_say(folder, product, process):
    choose = random.Random(f"{product}{process}")
    keep = Retention(product=product, process=process)
    with Manager(folder / "kept", registry=PAIR, retention=keep) as manager:
        state: dict[int, set[str]] = {}
        marked: set[int] = set()
        for step in range(24):
            items = choose.choice([BOTH, BOTH, {"result"}])
            tree = {"x": np.full(2, step)}
            manager.save(step, dict.fromkeys(items, tree), background=choose.random() < 0.3)
            before, after = {**state, step: set(items)}, shown(manager)
            check_step(before, after, marked, keep)
            assert manager.prune() == [], "what a save kept, a prune keeps"
            for held in after:
                assert manager.verify(held)
                assert manager.restore_to_host(held, "result")["x"][0] == held
            state = after
            if choose.random() < 0.4:
                one = choose.choice(sorted(state))
                manager.keep(one, keep=one not in marked)
                marked ^= {one}
        assert not [p for p in (folder / "kept").iterdir() if p.name.startswith(".")]


def test_marks_survive_their_manager_and_are_taken_back(folder):
    with Manager(folder, registry=PAIR) as manager:
        for step in range(4):
            manager.save(step, {"result": np.ones(1), "rest": np.ones(1)})
        manager.keep(1)
        manager.keep(1)
    keep = Retention(product=KeepNewest(1), process=KeepNewest(1))
    with Manager(folder, registry=PAIR, retention=keep) as manager:
        assert manager.prune() == [(0, "rest"), (0, "result"), (2, "rest"), (2, "result")]
        assert shown(manager) == {1: BOTH, 3: BOTH}
        assert manager.verify(1), "a mark is no stray file"
        manager.keep(1, keep=False)
        manager.keep(1, keep=False)
        assert manager.prune() == [(1, "rest"), (1, "result")]
        with pytest.raises(NoCheckpoint):
            manager.keep(1)


def test_what_is_not_registered_is_left_alone(folder):
    keep = Retention(product=KeepNewest(1), process=KeepNewest(1))
    with Manager(folder, registry=PAIR, retention=keep) as manager:
        manager.save(0, {"result": np.ones(1), "rest": np.ones(1)})
        shutil.copytree(folder / "0" / "rest", folder / "0" / "mine")
        (folder / "notes").mkdir()
        (folder / "notes.txt").touch()
        manager.save(1, {"result": np.ones(1), "rest": np.ones(1)})
    assert {p.name for p in folder.iterdir()} == {"0", "1", "notes", "notes.txt"}
    assert {p.name for p in (folder / "0").iterdir() if p.is_dir()} == {"mine"}


@pytest.mark.parametrize("role", ["product", "process"])
def test_a_registry_of_one_role_is_kept_by_the_policy_of_that_role(folder, role):
    registry = pdlib.Registry((pdlib.ItemSpec(name="only", role=role, leaves=ROWS),))
    keep = Retention(**{role: KeepNewest(2)})
    with Manager(folder, registry=registry, retention=keep) as manager:
        for step in range(5):
            manager.save(step, {"only": np.ones(1)})
        assert manager.steps() == [3, 4]


# Resuming below later steps


def test_resuming_takes_the_newest_step_with_both_and_completes_what_is_above(folder):
    with Manager(folder) as manager:
        save_state(manager, 10, state_of(10))
        for step in (12, 14, 16):
            save_state(manager, step, state_of(step), process=False)
    products = {p: p.stat().st_mtime_ns for p in folder.rglob("decomposition/**/*")}
    with Manager(folder) as manager:
        with pytest.raises(StepRefused, match="step 12 is not above 16"):
            save_state(manager, 12, state_of(12))
        step, state = restore_latest(manager, state_of(0))
        assert step == 10
        assert_bit_equal(state, state_of(10))
        with pytest.raises(StepRefused, match="step 10 is not above 10"):
            save_state(manager, 10, state_of(10))
        save_state(manager, 12, state_of(12))
        assert manager.items(12) == ["decomposition", "training"]
        with pytest.raises(StepRefused, match="step 12 is not above 12"):
            save_state(manager, 12, state_of(12))
        save_state(manager, 13, state_of(13), background=True)
        save_state(manager, 14, state_of(14), process=False)  # equal, and nothing to add
        save_state(manager, 16, state_of(16), background=True)
        assert {s: len(manager.items(s)) for s in manager.steps()} == {10: 2, 12: 2, 13: 2, 14: 1, 16: 2}
        for s in (10, 12, 13, 16):
            assert_bit_equal(restore_step(manager, s, state_of(0)), state_of(s))
    assert {p: p.stat().st_mtime_ns for p in products} == products, "a product was written again"
    assert sorted(p.name for p in folder.iterdir()) == ["10", "12", "13", "14", "16"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("change", ["value", "shape", "sign of zero", "leaf"])
def test_a_later_step_of_other_bits_is_refused_and_stays(folder, background, change):
    product = state_of(20).decomposition
    product = product._replace(ci_fn={"m": {"w": np.zeros(3, np.float32)}})
    other = {
        "value": {"m": {"w": np.ones(3, np.float32)}},
        "shape": {"m": {"w": np.zeros((3, 1), np.float32)}},
        "sign of zero": {"m": {"w": -np.zeros(3, np.float32)}},
        "leaf": {"m": {"v": np.zeros(3, np.float32)}},
    }[change]
    with Manager(folder) as manager:
        save_state(manager, 10, state_of(10))
        manager.save(20, {"decomposition": product})
        manager.resume_at(10)
        digest = manager.content_digest(20, "decomposition")
        wrong = state_of(20)._replace(decomposition=product._replace(ci_fn=other))

        def save() -> None:
            save_state(manager, 20, wrong, background=background)
            manager.wait()

        with pytest.raises(pdlib.PdlibError, match=r"step 20 of .* holds another decomposition: the values differ"):
            save()
        assert manager.items(20) == ["decomposition"]
        assert manager.content_digest(20, "decomposition") == digest
        save_state(manager, 20, state_of(20)._replace(decomposition=product))
        assert manager.items(20) == ["decomposition", "training"]
