"""Every way in which the store refuses, one test a class of error, the whole text of each asserted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import pdlib
from pdlib.errors import (
    ContractError,
    CorruptItem,
    ForeignLayout,
    NameCollision,
    NoCheckpoint,
    NotARun,
    ReadOnly,
    SaveFailed,
    SpecMismatch,
    StepRefused,
    TornStep,
    UnstorableLeaf,
)
from pdlib.store import (
    KeepNewest,
    Manager,
    init_from_parent,
    restore_decomposition,
    restore_decomposition_to_host,
    restore_factors,
    restore_latest,
    save_state,
)
from tests.store.crash import state_of
from tests.store.test_cases import ANY

Refuse = Callable[[Path], Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with both items at 1 and the product alone at 2."""
    with Manager(tmp_path / "run" / "ckpts") as manager:
        save_state(manager, 1, state_of(1))
        save_state(manager, 2, state_of(2), process=False)
    return tmp_path / "run"


def reader(run: Path) -> Manager:
    return Manager(run / "ckpts", read_only=True)


def check(error: type[Exception], text: str, refuse: Refuse, run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    with pytest.raises(error) as caught:
        refuse(run)
    assert type(caught.value) is error
    assert str(caught.value) == text.format(run=run, ckpts=run / "ckpts")
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before


def cases(*rows: tuple[str, Refuse]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("text", "refuse"), rows, ids=[str(index) for index in range(len(rows))])


def any_save(tree: Any) -> Refuse:
    return lambda run: Manager(run.parent / "other", registry=ANY).save(0, {"anything": tree})


@cases(
    ("{run}/ckptz does not exist; did you mean 'ckpts'?", lambda run: Manager(run / "ckptz", read_only=True)),
    ("{run}/zzz does not exist; check the path", lambda run: Manager(run / "zzz", read_only=True)),
    ("{run}/a/b/c does not exist; check the path", lambda run: Manager(run / "a" / "b" / "c", read_only=True)),
    ("{run} is a run, a level too shallow; open {ckpts}", Manager),
    ("{ckpts}/1 is one step, a level too deep; open {ckpts}", lambda run: Manager(run / "ckpts" / "1")),
    (
        "{ckpts}/1/training is one item of a step, two levels too deep; open {ckpts}",
        lambda run: Manager(run / "ckpts" / "1" / "training"),
    ),
    (
        "{ckpts}/1/training/pdlib.json is a file, not a directory of steps",
        lambda run: Manager(run / "ckpts" / "1" / "training" / "pdlib.json"),
    ),
    ("{ckpts} lies inside a run; open {run}", lambda run: pdlib.open_run(run / "ckpts")),
    (
        "{ckpts}/2/decomposition lies inside a run; open {run}",
        lambda run: init_from_parent(run / "ckpts" / "2" / "decomposition", state_of(1).decomposition),
    ),
    ("{run}z does not exist; did you mean 'run'?", lambda run: pdlib.open_run(f"{run}z")),
    (
        "{ckpts}/1/training/pdlib.json lies inside a run; open {run}",
        lambda run: pdlib.open_run(run / "ckpts/1/training/pdlib.json"),
    ),
)
def test_not_a_run(run, text, refuse):
    check(NotARun, text, refuse, run)


def test_not_a_run_beside_runs_and_outside_them(run):
    parent = run.parent
    with pytest.raises(NotARun) as caught:
        pdlib.open_run(parent)
    assert str(caught.value) == f"{parent} holds runs, it is none itself; open one of them: run"
    shutil.move(run / "ckpts", parent / "steps")
    with pytest.raises(NotARun) as caught:
        pdlib.open_run(run)
    assert str(caught.value) == f"{run} is no run: it has no folder ckpts"
    with pytest.raises(NotARun) as caught:
        pdlib.open_run(parent / "steps")
    assert str(caught.value) == (
        f"{parent / 'steps'} holds steps outside a run; open them with pdlib.Manager, or move them to RUN/ckpts"
    )


@cases(
    ("{ckpts} holds no step 3; it holds 1, 2", lambda run: pdlib.open_run(run, step=3)),
    ("{ckpts} holds no step '1'; it holds 1, 2", lambda run: pdlib.open_run(run, step="1")),
    ("{ckpts} holds no step -1; it holds 1, 2", lambda run: reader(run).restore_to_host(-1, "training")),
    (
        "{ckpts}/2 holds no item 'training'; it holds decomposition",
        lambda run: reader(run).restore_to_host(2, "training"),
    ),
    ("{ckpts} holds no step 3; it holds 1, 2", lambda run: Manager(run / "ckpts").keep(3)),
    ("{ckpts} holds no step 3; it holds 1, 2", lambda run: reader(run).content_digest(3, "training")),
    ("step 2 of {ckpts} has no site 'z'; did you mean s?", lambda run: pdlib.open_run(run, sites="z")),
    ("step 2 of {ckpts} has no site 'ss'; did you mean s?", lambda run: restore_factors(reader(run), ["s", "ss"])),
    (
        "step 1 of {ckpts} has no site 'z'; did you mean s?",
        lambda run: restore_decomposition_to_host(reader(run), 1, sites=["z"]),
    ),
)
def test_no_checkpoint(run, text, refuse):
    check(NoCheckpoint, text, refuse, run)


def test_no_checkpoint_where_there_is_none_of_the_kind(tmp_path):
    ckpts = tmp_path / "ckpts"
    ckpts.mkdir()
    nothing: list[tuple[str, Callable[[], Any]]] = [
        (f"{tmp_path} holds no product yet; let it train to its first save", lambda: pdlib.open_run(tmp_path)),
        (
            f"{ckpts} holds no step with a decomposition; train first, or check the path",
            lambda: restore_decomposition(Manager(ckpts)),
        ),
        (
            f"{ckpts} holds no step with both decomposition and training; steps: none. "
            "Start anew in another directory, or from a product with init_from_parent.",
            lambda: restore_latest(Manager(ckpts), state_of(1)),
        ),
        (f"{ckpts} holds no step 1; it holds no step", lambda: Manager(ckpts).describe(1, "training")),
    ]
    for text, attempt in nothing:
        with pytest.raises(NoCheckpoint) as caught:
            attempt()
        assert str(caught.value) == text
    save_state(Manager(ckpts), 7, state_of(7), process=False)
    with pytest.raises(NoCheckpoint, match="and training; steps: 7"):
        restore_latest(Manager(ckpts), state_of(1))


SMALL = "components.s.V/0.0"


def damaged(run: Path, file: str, change: Callable[[bytes], bytes | None], attempt: Refuse) -> Any:
    path = run / "ckpts" / "2" / "decomposition" / file
    data = change(path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    return attempt(run)


def at_2(run: Path) -> Any:
    return pdlib.open_run(run, step=2)


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        (
            SMALL,
            lambda data: data[:-1],
            f"{{ckpts}}/2/decomposition is not whole: {SMALL} has 47 bytes, want 48\n"
            "Restore the files from a copy, or open an earlier step.",
        ),
        (
            SMALL,
            lambda _: None,
            f"{{ckpts}}/2/decomposition is not whole: {SMALL} is missing\n"
            "Restore the files from a copy, or open an earlier step.",
        ),
        (
            "manifest.json",
            lambda _: None,
            "{ckpts}/2/decomposition/manifest.json is missing; restore it from a copy, or open an earlier step",
        ),
        (
            "manifest.json",
            lambda _: b"",
            "{ckpts}/2/decomposition/manifest.json is unreadable (Expecting value: line 1 column 1 (char 0)); "
            "restore it from a copy, or open an earlier step",
        ),
        (
            "pdlib.json",
            lambda _: None,
            "{ckpts}/2/decomposition: pdlib.json is missing; restore it from a copy, or open an earlier step",
        ),
        (
            "pdlib.json",
            lambda _: b'{"format": 1}',
            "{ckpts}/2/decomposition/pdlib.json is not a whole item description (KeyError('item')); "
            "open an earlier step",
        ),
    ],
)
def test_torn_step(run, file, change, text):
    text = text.replace("{ckpts}", str(run / "ckpts"))
    with pytest.raises(TornStep) as caught:
        damaged(run, file, change, at_2)
    assert str(caught.value) == text
    with pytest.raises(TornStep) as caught:
        pdlib.open_run(run)
    assert str(caught.value) == (
        f"the newest step, 2, of {run / 'ckpts'} is torn: {text}\n"
        "The last whole one is 1; pass fallback=True to take it."
    )
    with reader(run) as manager:
        assert manager.latest(fallback=True) == 1
        assert manager.latest(items=("training",)) == 1  # what is not asked for hides nothing


def test_torn_step_of_a_single_step_names_none_as_the_last_whole_one(run):
    shutil.rmtree(run / "ckpts" / "1")
    (run / "ckpts" / "2" / "decomposition" / SMALL).unlink()
    with pytest.raises(TornStep, match="The last whole one is None"):
        pdlib.open_run(run)
    with pytest.raises(NoCheckpoint, match="steps: 2"), reader(run) as manager:
        restore_latest(manager, state_of(1), fallback=True)


def test_foreign_layout(run):
    item = run / "ckpts" / "2" / "decomposition"
    description = json.loads((item / "pdlib.json").read_text())
    (item / "pdlib.json").write_text(json.dumps({**description, "format": 2}))
    with pytest.raises(ForeignLayout) as caught:
        at_2(run)
    assert str(caught.value) == f"{item / 'pdlib.json'}: format 2, this pdlib reads 1; use a newer pdlib"
    shutil.rmtree(item)
    ocp.PyTreeCheckpointer().save(item, {"V": np.ones(3)})
    with pytest.raises(ForeignLayout) as caught:
        at_2(run)
    assert str(caught.value) == (
        f"{item} was not written by pdlib: it has no pdlib.json\n"
        "Open it with the program that wrote it, for example orbax.checkpoint.PyTreeCheckpointer().restore(…)."
    )


def test_corrupt_item(run):
    chunk = run / "ckpts" / "2" / "decomposition" / SMALL
    chunk.write_bytes(bytes(48))
    (run / "ckpts" / "2" / "decomposition" / "stray").touch()
    assert at_2(run).step == 2
    with pytest.raises(CorruptItem) as caught:
        pdlib.open_run(run, verify=True)
    assert str(caught.value) == (
        f"changed: 2/decomposition/{SMALL}\nextra: 2/decomposition/stray\n"
        "Restore these files from a copy, or open another step."
    )
    with reader(run) as manager:
        assert str(manager.verify(1)) == "every file is as it was written"
        assert str(manager.verify(9)) == f"missing: step 9 of {run / 'ckpts'}"
        assert str(manager.verify(2, items=("training",))) == (
            f"unverifiable: 2/training: {run / 'ckpts' / '2'} holds no item 'training'; it holds decomposition"
        )


@cases(
    (
        "step 2 is not above 2, the newest of {ckpts}; "
        "restore the newest step and go on from it, or save to a new directory",
        lambda run: save_state(Manager(run / "ckpts"), 2, state_of(2)),
    ),
    ("step -1 is not a whole number from 0 up", lambda run: save_state(Manager(run / "ckpts"), -1, state_of(2))),
    ("step 3.0 is not a whole number from 0 up", lambda run: save_state(Manager(run / "ckpts"), 3.0, state_of(2))),  # pyright: ignore
    ("step '3' is not a whole number from 0 up", lambda run: Manager(run / "ckpts").resume_at("3")),  # pyright: ignore
    (
        "step 3: no item was given; name at least one of decomposition, training",
        lambda run: Manager(run / "ckpts").save(3, {}),
    ),
)
def test_step_refused(run, text, refuse):
    check(StepRefused, text, refuse, run)


def test_step_refused_where_a_later_product_has_other_values(run):
    with Manager(run / "ckpts") as manager:
        assert restore_latest(manager, state_of(0))[0] == 1
        with pytest.raises(StepRefused) as caught:
            save_state(manager, 2, state_of(3))
    assert str(caught.value) == (
        f"step 2 of {run / 'ckpts'} holds another decomposition: the values differ\n"
        "Nothing was overwritten; save to a new directory, or delete that step yourself."
    )


@cases(
    ("save: {ckpts} was opened with read_only=True; open it without to write", lambda run: reader(run).save(3, {})),
    ("prune: {ckpts} was opened with read_only=True; open it without to write", lambda run: reader(run).prune()),
    ("keep: {ckpts} was opened with read_only=True; open it without to write", lambda run: reader(run).keep(1)),
    (
        "resume_at: {ckpts} was opened with read_only=True; open it without to write",
        lambda run: reader(run).resume_at(1),
    ),
)
def test_read_only(run, text, refuse):
    check(ReadOnly, text, refuse, run)


def test_save_failed(run):
    """The texts of a disk that is full are in test_atomic."""
    with Manager(run / "ckpts") as manager:
        pass
    with pytest.raises(SaveFailed) as caught:
        save_state(manager, 3, state_of(3), background=True)
    assert str(caught.value) == f"step 3: {run / 'ckpts'} was closed; open another Manager to save"
    blocked = run / "ckpts" / "1" / "training" / "pdlib.json" / "ckpts"
    with pytest.raises(SaveFailed) as caught:
        save_state(Manager(blocked), 3, state_of(3))
    assert str(caught.value) == (
        f"step 3 was not saved to {blocked}: [Errno 20] Not a directory: '{blocked}'\n"
        "Nothing was committed: mend the cause, save again."
    )


LONG = "x" * 256


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        (
            {"a.b": {"c": 1}, "a": {"b.c": 2}},
            ["['a', 'b.c'] and ['a.b', 'c'] would both be stored as 'a.b.c'"],
        ),
        ({"a": np.ones(2), "a/0": np.ones(2)}, ["['a/0'] would be stored inside the files of ['a']"]),
        ({"a": np.ones(2), "a/.zarray": np.ones(2)}, ["['a/.zarray'] would be stored inside the files of ['a']"]),
        (
            {"": 1, "..": 1, "/a": 1, "a/../b": 1},
            [
                "'': its name '' has an empty or dotted path part, which is no file name",
                "'..': its name '..' has an empty or dotted path part, which is no file name",
                "'/a': its name '/a' has an empty or dotted path part, which is no file name",
                "'a/../b': its name 'a/../b' has an empty or dotted path part, which is no file name",
            ],
        ),
        ({LONG: 1}, [f"'{LONG}': its name has a part longer than 255 bytes, which is no file name"]),
        ({"é" * 128: 1}, [f"'{'é' * 128}': its name has a part longer than 255 bytes, which is no file name"]),
        (
            {"a\\b": 1, "a\0b": 1},
            [
                "'a\\x00b': its name 'a\\x00b' has a NUL or a backslash, which orbax cannot have in a file name",
                "'a\\\\b': its name 'a\\\\b' has a NUL or a backslash, which orbax cannot have in a file name",
            ],
        ),
        ({"\ud800": 1}, ["'\\ud800': its name '\\ud800' has a lone surrogate, which is no file name"]),
        (
            {"manifest.json": 1, "_METADATA": 1, "_sharding/x": 1},
            [
                "'_METADATA': its name is one that the store uses itself",
                "'_sharding/x': its name is one that the store uses itself",
                "'manifest.json': its name is one that the store uses itself",
            ],
        ),
    ],
)
def test_name_collision(tmp_path, tree, lines):
    with pytest.raises(NameCollision) as caught:
        any_save(tree)(tmp_path / "run")
    body = "".join(f"  {line}\n" for line in lines)
    assert str(caught.value) == (
        f"item anything: the leaves cannot all be stored\n{body}Rename the keys; nothing was written."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("text", "is a builtins.str, not an array; store it as an array, or keep it out of the item"),
        (b"bytes", "is a builtins.bytes, not an array; store it as an array, or keep it out of the item"),
        (1j, "is a builtins.complex, not an array; store it as an array, or keep it out of the item"),
        (Path("x"), "is a pathlib.PosixPath, not an array; store it as an array, or keep it out of the item"),
        (max, "is a builtins.builtin_function_or_method, not an array; "
              "store it as an array, or keep it out of the item"),
        (np.array(["a"]), "has dtype <U1, which has no bit-exact form on disk; convert it first"),
        (np.array([None]), "has dtype object, which has no bit-exact form on disk; convert it first"),
        (np.zeros(2, "M8[s]"), "has dtype datetime64[s], which has no bit-exact form on disk; convert it first"),
        (np.zeros(2, "f4,i4"), "has dtype [('f0', '<f4'), ('f1', '<i4')], which has no bit-exact form on disk; "
                               "convert it first"),
        (2**70, f"is {2**70}, which 64 bits cannot hold; store it as an array"),
        (jax.ShapeDtypeStruct((2,), np.float32), "is abstract; save takes arrays, not their shapes"),
    ],
)  # fmt: skip
def test_unstorable_leaf(tmp_path, leaf, text):
    for layout in ("raw", "ocdbt"):
        manager = Manager(tmp_path / "new", registry=ANY, layout=layout)
        with pytest.raises(UnstorableLeaf) as caught:
            manager.save(0, {"anything": {"a": np.ones(1), "x": [leaf]}})
        assert str(caught.value) == f"anything:x/0 {text}"
        assert not (tmp_path / "new").exists()


@cases(
    ("layout 'zarr'; write 'raw' or 'ocdbt'", lambda run: Manager(run / "ckpts", layout="zarr")),  # pyright: ignore
    (
        "memory://a/b is in an object store, where no save is atomic: pass read_only=True to read it, or save to a "
        "file system and copy the steps there",
        lambda _: Manager("memory://a/b"),
    ),
    (
        "no item 'nope' is registered; registered: decomposition, training",
        lambda run: Manager(run / "ckpts").save(3, {"nope": {}}),
    ),
    (
        "no item 'nope' is registered; registered: decomposition, training",
        lambda run: reader(run).restore(1, {"nope": {}}),
    ),
    (
        "dtype='int8': floating-point leaves are cast to a floating-point dtype, e.g. bfloat16",
        lambda run: pdlib.open_run(run, dtype="int8"),
    ),
    ("KeepNewest(0): write how many steps to keep, a whole number from 1 up", lambda _: KeepNewest(0)),
    ("KeepNewest(1.5): write how many steps to keep, a whole number from 1 up", lambda _: KeepNewest(1.5)),  # pyright: ignore
    ("KeepNewest(True): write how many steps to keep, a whole number from 1 up", lambda _: KeepNewest(True)),
)
def test_contract_error(run, text, refuse):
    check(ContractError, text, refuse, run)


def test_contract_error_of_a_newer_contract(tmp_path):
    def registry(version: int) -> pdlib.Registry:
        return pdlib.Registry((pdlib.ItemSpec(name="m", version=version, leaves=[pdlib.LeafSpec(path="**")]),))

    Manager(tmp_path, registry=registry(3)).save(0, {"m": {"w": np.ones(1)}})
    old = Manager(tmp_path, registry=registry(2), read_only=True)
    for attempt in (old.describe, old.content_digest, old.restore_to_host, old.open):
        with pytest.raises(ContractError) as caught:
            attempt(0, "m")
        assert str(caught.value) == (
            f"{tmp_path / '0' / 'm'} was written under m v3, the registry knows v2; "
            "open it with the pdlib that wrote it, or register the newer contract"
        )
    assert old.verify(0)


def test_spec_mismatch_at_save_lists_both_items(tmp_path):
    state = state_of(1)
    wrong = state._replace(
        decomposition=state.decomposition._replace(ci_fn={"m": {"w": np.ones(2, np.float64)}}),
        training=state.training._replace(step=np.ones(2, np.int32), adversaries={"t": {"sources": {"s": np.ones(3)}}}),
    )
    with pytest.raises(SpecMismatch) as caught:
        save_state(Manager(tmp_path / "new"), 4, wrong)
    assert str(caught.value) == (
        "save of step 4: decomposition v1 and training v1: 3 of 5 leaves differ\n"
        "  decomposition:ci_fn/m/w  dtype float64, want float32\n"
        "  training:adversaries/t/sources/s  shape (3,), want (C+1=4,); C bound by decomposition:components/s/U\n"
        "  training:adversaries/t/sources/s  dtype float64, want float32 or bfloat16\n"
        "  training:step  shape (2,), want ()\n"
        "Mend the tree, or register a contract that admits it."
    )
    assert not (tmp_path / "new").exists()


def test_spec_mismatch_at_restore_lists_every_leaf(run):
    want = {
        "components": {"s": {"V": jnp.ones((4, 3), jnp.bfloat16), "U": jnp.ones((5, 3))}, "t": {"V": jnp.ones(1)}},
        "ci_fn": {},
    }
    for attempt in (
        lambda: reader(run).restore(1, {"decomposition": want}),
        lambda: init_from_parent(run, want, step=1),  # pyright: ignore
    ):
        with pytest.raises(SpecMismatch) as caught:
            attempt()
        assert str(caught.value) == (
            "restore of decomposition v1, step 1: 3 leaves differ from the stored\n"
            "  components/s/U  shape (3, 5) stored, (5, 3) asked for\n"
            "  components/s/V  dtype float32 stored, bfloat16 asked for\n"
            "  components/t/V  is asked for, but not stored\n"
            "Ask for what is stored (Manager.describe lists it), or restore_to_host, which needs no template."
        )
