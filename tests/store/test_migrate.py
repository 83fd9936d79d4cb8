"""Migration of older layouts: every leaf accounted for, values held to the source, and the same function at the end."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import pdlib
from pdlib.errors import ContractError, CorruptItem, ForeignLayout, NoCheckpoint, NotARun, StepRefused, TornStep
from pdlib.items.contracts import default_registry
from pdlib.items.layouts import layouts, read_layout
from pdlib.items.state import TrainingItem
from pdlib.method.transformer import Chunk, chunkwise_transformer, sizes_of
from pdlib.store import Manager, transcribe
from pdlib.store.migrate import apply_migration, plan_migration
from pdlib.testing import assert_bit_equal
from tests.data.freeze import CORPUS
from tests.method.test_transformer import older_forward
from tests.store.test_corpus import OLDER, SITES, expected, want

each_layout = pytest.mark.parametrize("layout", OLDER)


def migrated(layout: str, tmp_path: Path, **options) -> Path:
    apply_migration(plan(CORPUS / layout, tmp_path / "run", **options))
    return tmp_path / "run"


def plan(source, destination, **options):
    return plan_migration(source, destination, registry=default_registry(), **options)


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@each_layout
def test_every_stored_leaf_is_mapped_left_behind_or_dropped_by_name(layout, tmp_path):
    items = [CORPUS / layout / "7" / name for name in ("default", "decomposition", "training")]
    from pdlib.store.foreign import read_foreign

    stored = {f"{home.name}/{'/'.join(keys)}" for home in items if home.is_dir() for keys in read_foreign(home).leaves}
    for with_training in (False, True):
        (step,) = plan(CORPUS / layout, tmp_path / "run", with_training=with_training).steps
        mapped = {part.text for leaves in step.leaves.values() for leaf in leaves for part in leaf.parts}
        assert mapped | set(step.left) | set(step.dropped) == stored
        assert not mapped & set(step.left)
        assert bool(step.left) is not with_training


@each_layout
def test_the_importance_function_computes_what_the_older_one_did(layout, tmp_path):
    run = pdlib.open_run(migrated(layout, tmp_path))
    old, gate = expected(layout), SITES[0]
    # Random bits are no parameters to compute with: the same leaves, of a sensible size, go through both.
    random = np.random.default_rng(0)
    tame = {name: 0.5 * random.standard_normal(x.shape).astype(np.float32) for name, x in old.items()}
    tame["ci/inv_freq"] = np.abs(tame["ci/inv_freq"])
    module = {name: 0 * x for name, x in run.ci_fn["chunkwise_transformer"].items()}
    for new, was in _sources(old).items():
        module[new] = jnp.asarray(was(tame))
    taps = random.standard_normal((2, 5, old["ci/in_proj_w"].shape[0])).astype(np.float32)
    function = chunkwise_transformer([Chunk((gate,), SITES)], sizes_of(run.ci_fn))
    got = function.apply({"chunkwise_transformer": module}, {}, {gate: jnp.asarray(taps)})
    wanted = older_forward({name[3:]: x for name, x in tame.items() if name.startswith("ci/")}, taps)
    widths = [tame[f"V/{site}"].shape[1] for site in SITES]
    for site, part in zip(SITES, np.split(wanted, np.cumsum(widths)[:-1], axis=-1), strict=True):
        np.testing.assert_allclose(np.asarray(got[site]), part, rtol=2e-4, atol=2e-5)


def _sources(old):
    """New parameter → how it comes of the older ones; that migration does just this, test_corpus holds it to."""
    from tests.store.test_corpus import BLOCK

    blocks = sum(name.endswith("/wq") for name in old)
    found = {
        new: lambda x, was=was: np.stack([x[f"ci/blocks/{i}/{was}"] for i in range(blocks)])[:, None]
        for new, was in BLOCK.items()
    }
    found |= {"input_w": lambda x: x["ci/in_proj_w"][None], "input_b": lambda x: x["ci/in_proj_b"][None]}
    found["frequencies"] = lambda x: x["ci/inv_freq"]
    width = old[f"V/{SITES[0]}"].shape[1]
    for place, site in enumerate(SITES):
        part = slice(place * width, (place + 1) * width)
        found[f"head_w.{site}"] = lambda x, part=part: x["ci/out_w"][:, part]
        found[f"head_b.{site}"] = lambda x, part=part: x["ci/out_b"][part]
    return found


@each_layout
def test_with_training_a_run_can_resume(layout, tmp_path):
    run = migrated(layout, tmp_path, with_training=True)
    components, module = want(layout)
    ci_fn = {"chunkwise_transformer": module}
    schedule = optax.cosine_decay_schedule(1e-4, 400_000)
    first = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(schedule, weight_decay=0.0))
    second = optax.adamw(schedule, weight_decay=0.0)
    sources = {site: jax.ShapeDtypeStruct((1, 2, 5), np.float32) for site in SITES}
    adversary = {"sources": sources, "m": sources, "v": sources, "count": jax.ShapeDtypeStruct((), np.float32)}
    abstract = TrainingItem(
        jax.eval_shape(first.init, components),
        jax.eval_shape(second.init, ci_fn),
        {"PersistentPGDReconLoss": adversary},
        jax.ShapeDtypeStruct((), np.int32),
    )
    with Manager(run / "ckpts", read_only=True) as manager:
        assert manager.latest(items=("decomposition", "training")) == 7
        state = manager.restore(7, {"training": abstract})["training"]
    assert int(state.step) == 7
    assert float(state.adversaries["PersistentPGDReconLoss"]["count"]) == 21
    moments = state.components_opt_state[1][0].mu
    assert jax.tree.map(jnp.shape, moments) == jax.tree.map(jnp.shape, components)
    updates, _ = second.update(jax.tree.map(jnp.ones_like, ci_fn), state.ci_fn_opt_state, ci_fn)
    assert jax.tree.structure(updates) == jax.tree.structure(ci_fn)


@each_layout
def test_moments_go_where_their_parameters_go(layout, tmp_path):
    (step,) = plan(CORPUS / layout, tmp_path / "run", with_training=True).steps
    product = {leaf.keys: leaf for leaf in step.leaves["decomposition"]}
    moments = [leaf for leaf in step.leaves["training"] if {"mu", "nu"} & set(leaf.keys)]
    assert len(moments) == 2 * len(product)
    for leaf in moments:
        root = "components" if leaf.keys[0] == "components_opt_state" else "ci_fn"
        start = next(i for i, key in enumerate(leaf.keys) if key in ("mu", "nu")) + 1
        like = product[root, *leaf.keys[start:]]
        assert leaf.shape == like.shape
        for part, other in zip(leaf.parts, like.parts, strict=True):
            assert part.leaf.keys[start:] == other.leaf.keys[1:]  # the same stored parameter, of the moment's tree
            assert part.index == other.index


def test_what_stays_behind_and_what_is_dropped_is_printed(tmp_path):
    text = plan(CORPUS / "era-b", tmp_path / "run").render()
    assert "step 7         era-b: decomposition: 23 leaves" in text
    assert "leaves 69 leaves of the process behind; --with-training takes them along" in text


def test_an_unknown_leaf_is_refused_with_the_nearest_layout_and_the_difference(tmp_path):
    tree = {
        "components": {"vu": {"s": [np.ones((2, 3)), np.ones((3, 2))]}},
        "step": np.ones(()),
        "surprise": np.ones(2),
    }
    ocp.PyTreeCheckpointer().save(tmp_path / "old" / "3" / "default", tree)
    with pytest.raises(ForeignLayout) as refused:
        plan(tmp_path / "old", tmp_path / "run")
    text = str(refused.value)
    assert re.search(r"old/3 is of no known layout; the nearest is era-[bc], \d+ leaves differ from it:", text)
    assert "default/surprise  is stored, and not of this layout" in text
    assert "default/ci_fn/in_proj_w  is of this layout, and not stored" in text
    assert re.search(r"Copy era-[bc]\.toml, write down what differs, and pass it with --layout FILE\.$", text)
    assert not (tmp_path / "run").exists()


def test_a_layout_of_the_user_s_own_is_data(tmp_path):
    V, U = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, dtype=np.float32).reshape(3, 2)
    tree = {"factors": {"mlp": {"left": V, "right": U[None]}}, "junk": np.ones(3)}
    ocp.PyTreeCheckpointer().save(tmp_path / "old" / "3" / "mine", tree)
    (tmp_path / "mine.toml").write_text(
        'layout = "mine"\n'
        '[[leaf]]\nfrom = ["mine", "factors", "{site}", "left"]\nto = ["decomposition", "components", "{site}", "V"]\n'
        '[[leaf]]\nfrom = ["mine", "factors", "{site}", "right"]\nto = ["decomposition", "components", "{site}", "U"]\n'
        "squeeze = [0]\n"
        '[[leaf]]\nfrom = ["mine", "junk"]\ndrop = "nobody reads it"\n',
        "utf-8",
    )
    chosen = plan(tmp_path / "old", tmp_path / "run", known=(read_layout(tmp_path / "mine.toml"),))
    assert "drops mine/junk: nobody reads it" in chosen.render()
    apply_migration(chosen)
    assert_bit_equal(pdlib.open_run(tmp_path / "run").components, {"mlp": pdlib.Factors(V, U)})


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    for name, bad, text in (
        ("V", np.ones((2, 4), np.float32), "C bound by"),
        ("V", np.ones((2, 3), np.float64), "dtype float64, want float32"),
    ):
        tree = {"V": bad, "U": np.ones((3, 2), np.float32)}
        ocp.PyTreeCheckpointer().save(tmp_path / f"old{text[:3]}" / "3" / "mine", tree)
        (tmp_path / "mine.toml").write_text(
            'layout = "mine"\n'
            '[[leaf]]\nfrom = ["mine", "V"]\nto = ["decomposition", "components", "s", "V"]\n'
            '[[leaf]]\nfrom = ["mine", "U"]\nto = ["decomposition", "components", "s", "U"]\n'
        )
        with pytest.raises(pdlib.errors.SpecMismatch, match=re.escape(text)):
            plan(tmp_path / f"old{text[:3]}", tmp_path / "run", known=(read_layout(tmp_path / "mine.toml"),))
        assert name == "V"
    assert not (tmp_path / "run").exists()


def test_sites_of_another_order_are_refused_and_say_what_to_write(tmp_path):
    shutil.copytree(CORPUS / "era-b", tmp_path / "old")
    text = (layouts()[1].path).read_text("utf-8").replace("layers.18.mlp.up_proj", "layers.19.mlp.up_proj")
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    with pytest.raises(ForeignLayout, match=r"is divided among .*layers\.19.*\nCopy mine\.toml, name these sites"):
        plan(tmp_path / "old", tmp_path / "run", known=(read_layout(tmp_path / "mine.toml"),))


@each_layout
def test_the_source_is_untouched_and_twice_is_once(layout, tmp_path):
    shutil.copytree(CORPUS / layout, tmp_path / "old")
    before = files(tmp_path / "old")
    said: list[str] = []
    apply_migration(plan(tmp_path / "old", tmp_path / "run"))
    made = files(tmp_path / "run")
    apply_migration(plan(tmp_path / "old", tmp_path / "run"), say=said.append)
    assert said == [f"{tmp_path / 'run'} is there already"]
    assert files(tmp_path / "run") == made
    assert files(tmp_path / "old") == before
    with pytest.raises(StepRefused, match="exists; nothing was overwritten"):
        apply_migration(plan(tmp_path / "old", tmp_path / "run", with_training=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "run"]


def test_what_a_killed_migration_left_is_cleared_and_what_another_makes_is_not(tmp_path):
    from pdlib.store.lock import locked

    dead, alive = tmp_path / ".staging-run-dead", tmp_path / ".staging-run-alive"
    (dead / "ckpts" / "7").mkdir(parents=True)
    with locked(alive):
        apply_migration(plan(CORPUS / "era-c", tmp_path / "run"))
        assert not dead.exists()
        assert alive.exists()


def test_a_file_that_is_not_what_was_read_is_found_before_the_swap(tmp_path, monkeypatch):
    real = transcribe.write_entry

    def flip(home, file, data, entries):
        real(home, file, data, entries)
        if file.endswith("gate_proj.V/0.0"):
            broken = bytearray((home / file).read_bytes())
            broken[5] ^= 4
            (home / file).write_bytes(broken)

    monkeypatch.setattr(transcribe, "write_entry", flip)
    with pytest.raises(CorruptItem, match=r"gate_proj/V is not what was read; check the disk"):
        apply_migration(plan(CORPUS / "era-c", tmp_path / "run"))
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_source_is_named_and_nothing_is_made(tmp_path):
    shutil.copytree(CORPUS / "era-c", tmp_path / "old")
    for path in (tmp_path / "old" / "7" / "default" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises((TornStep, ForeignLayout)):
        apply_migration(plan(tmp_path / "old", tmp_path / "run"))
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_wrong_sources_are_named(tmp_path):
    with pytest.raises(NotARun, match="holds no steps: want a directory of numbered steps"):
        plan(tmp_path, tmp_path / "run")
    with pytest.raises(NoCheckpoint, match="holds no step 8; it holds 7"):
        plan(CORPUS / "era-a", tmp_path / "run", step=8)
    with pytest.raises(ForeignLayout, match="is of today's layout already"):
        plan(CORPUS / "raw.v1", tmp_path / "run")
    (tmp_path / "empty" / "3").mkdir(parents=True)
    with pytest.raises(NoCheckpoint, match="3 holds no item"):
        plan(tmp_path / "empty", tmp_path / "run")
    (tmp_path / "alien" / "3" / "x").mkdir(parents=True)
    with pytest.raises(ForeignLayout, match="is neither pdlib's nor an orbax item"):
        plan(tmp_path / "alien", tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nonsense", "a layout is a UTF-8 TOML file"),
        ('layout = "x"', r"`layout` or \[\[leaf\]\] is missing"),
        ('layout = "x"\nrules = 1\n[[leaf]]\nfrom = ["a", "b"]\ndrop = "y"', "unknown key 'rules'"),
        ('layout = "x"\n[[leaf]]\nfrom = ["a", "b"]', "write from = "),
        ('layout = "x"\n[[leaf]]\nfrom = ["a", "b"]\nto = ["a", "b"]\ndrop = "y"', "write from = "),
        ('layout = "x"\n[[leaf]]\nfrom = ["a", "b"]\nto = "b"', "are lists of keys, the item first"),
        ('layout = "x"\n[[leaf]]\nfrom = ["a", "b"]\nto = ["a", "b"]\nlike = ["a", "c"]', 'end in "\\*\\*"'),
        ('layout = "x"\n[[leaf]]\nfrom = ["a", "b"]\nto = ["a", "b"]\nturn = 3', "unknown key 'turn'"),
    ],
)
def test_a_layout_file_that_says_something_impossible_is_refused(text, error, tmp_path):
    (tmp_path / "x.toml").write_text(text, "utf-8")
    with pytest.raises(ContractError, match=error):
        read_layout(tmp_path / "x.toml")


def test_the_layouts_that_pdlib_knows():
    assert [layout.name for layout in layouts()] == list(OLDER)
    assert all(layout.about and layout.sites == SITES for layout in layouts())
