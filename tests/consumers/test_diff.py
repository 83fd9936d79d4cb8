"""Comparing products: by digests, then by what their components do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pdlib
from pdlib.consumers import diff, matching
from pdlib.consumers.diff import compare_runs
from pdlib.consumers.matching import match_components
from pdlib.errors import NoCheckpoint, RunSpecError
from pdlib.store import Manager
from tests.data.freeze import CORPUS
from tests.test_cli import pdlib as pdlib_command

RANDOM = np.random.default_rng(5)


def factors(d_in: int = 12, C: int = 6, d_out: int = 9) -> tuple[np.ndarray, np.ndarray]:
    return RANDOM.standard_normal((d_in, C)).astype(np.float32), RANDOM.standard_normal((C, d_out)).astype(np.float32)


def disguised(V: np.ndarray, U: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same components in another order, each with other scales and signs of V and U."""
    order = RANDOM.permutation(V.shape[1])
    scale = RANDOM.uniform(0.1, 9, V.shape[1]) * RANDOM.choice([-1, 1], V.shape[1])
    return (V * scale)[:, order].astype(np.float32), (U / scale[:, None] * 3)[order].astype(np.float32), order


def saved(run: Path, name: str = "x", **sites: tuple[np.ndarray, np.ndarray]) -> Path:
    with Manager(run / "ckpts") as manager:
        product = pdlib.Decomposition({site: pdlib.Factors(*pair) for site, pair in sites.items()}, {})
        manager.save(0, {"decomposition": product})
    (run / "run.toml").write_text(f'name = "{name}"\n[training]\nsteps = {len(name)}\n', "utf-8")
    return run


def test_order_sign_and_scale_make_no_difference():
    V, U = factors()
    W, T, order = disguised(V, U)
    rows, columns, cosines, *_ = match_components((V, U), (W, T))
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    np.testing.assert_array_equal(order[columns], rows)


def test_the_cosine_is_that_of_the_rank_one_matrices():
    one, other = factors(C=1), factors(C=1)
    a, b = (np.asarray(V, np.float64) @ np.asarray(U, np.float64) for V, U in (one, other))
    want = abs(np.sum(a * b)) / (np.linalg.norm(a) * np.linalg.norm(b))
    assert match_components(one, other)[2][0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("limit", [matching.BEST_UP_TO, 2])
def test_components_without_a_partner_are_left_over_and_zero_ones_count_nothing(monkeypatch, limit):
    monkeypatch.setattr(matching, "BEST_UP_TO", limit)
    V, U = factors(C=6)
    W, T, order = disguised(V, U)
    W, T = W[:, :4].copy(), T[:4].copy()
    W[:, 0], T[1] = 0, np.inf
    found = match_components((V, U), (W, T))
    assert sorted(zip(found.rows, found.columns, strict=True)) == sorted(zip(order[2:4], (2, 3), strict=True))
    np.testing.assert_allclose(found.cosines, 1, atol=1e-5)
    assert found.dead == (0, 2)
    none = match_components((V * 0, U), (W, T))
    assert (len(none.rows), none.dead) == (0, (6, 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float64"])
def test_components_of_any_dtype_and_size_are_matched(dtype):
    V, U = (array.astype(getattr(ml_dtypes, dtype, dtype)) for array in factors())
    scale = 1e200 if dtype == "float64" else 1
    other = V.astype(np.float64) * -scale, U.astype(np.float64) / scale
    np.testing.assert_allclose(match_components((V, U), other).cosines, 1, atol=1e-5)


def test_the_matching_is_the_best_one_and_the_greedy_one_where_it_must_be(monkeypatch):
    cosines = np.array([[0.9, 0.8], [0.85, 0.1]], np.float32)
    monkeypatch.setattr(matching, "_cosines", lambda *_: cosines)
    assert match_components(factors(C=2), factors(C=2)).cosines.sum() == pytest.approx(1.65)
    monkeypatch.setattr(matching, "BEST_UP_TO", 1)
    found = match_components(factors(C=2), factors(C=2))
    assert found.cosines.sum() == pytest.approx(1.0)
    assert not found.best


@pytest.mark.parametrize("rounds", [64, 0])
@pytest.mark.parametrize("shape", [(40, 40), (70, 30), (30, 70), (1, 5)])
def test_large_sites_are_matched_by_their_largest_entries_one_to_one(monkeypatch, shape, rounds):
    cosines = RANDOM.random(shape, np.float32)
    monkeypatch.setattr(matching, "_cosines", lambda *_: cosines.copy())
    monkeypatch.setattr(matching, "BEST_UP_TO", 0)
    monkeypatch.setattr(matching, "_ROUNDS", rounds)
    monkeypatch.setattr(matching, "_ROWS", 7)
    found = match_components(factors(C=shape[0]), factors(C=shape[1]))
    assert len({*found.rows}) == len({*found.columns}) == len(found.rows) == min(shape)
    if rounds:
        left, want = cosines.copy(), []
        for _ in range(min(shape)):
            row, column = np.unravel_index(left.argmax(), shape)
            want.append((row, column))
            left[row], left[:, column] = -1, -1
        assert list(zip(found.rows, found.columns, strict=True)) == want


def test_a_small_site_s_matrix_has_partners_on_its_diagonal():
    one, other = factors(C=6), factors(C=4)
    found = match_components(one, other)
    assert found.matrix is not None
    assert found.matrix.shape == (6, 4)
    np.testing.assert_array_equal(np.diag(found.matrix), found.cosines)
    assert match_components(factors(C=65), factors(C=65)).matrix is None


def test_the_same_product_is_the_same_whatever_its_layout():
    found = compare_runs(CORPUS / "raw.v1", CORPUS / "ocdbt.v1")
    assert found.same
    assert found.sites == ()
    assert "the products are the same to the bit" in found.render()


def test_what_differs_is_told_at_each_level(tmp_path):
    V, U = factors()
    W, T, _ = disguised(V, U)
    other = factors(C=4)
    a = saved(tmp_path / "a", "one", same=(V, U), moved=(V, U), wider=factors(C=6), gone=factors())
    b = saved(tmp_path / "b", "three", same=(V, U), moved=(W, T), wider=other, new=factors())
    found = compare_runs(a, b)
    assert found.spec == {"name": ("one", "three"), "training.steps": (3, 5)}
    words = {"/".join(keys[1:]): word for keys, word in found.leaves.items()}
    assert words["same/V"] == "same"
    assert words["moved/U"] == words["wider/V"] == "changed"
    assert (words["gone/V"], words["new/V"]) == ("only in A", "only in B")
    assert [site.site for site in found.sites] == ["moved", "wider"]
    moved, wider = (site.as_dict() for site in found.sites)
    assert moved["same"] == 6
    assert moved["matching"] == "best"
    assert moved["min"] == moved["quantiles"]["0"] > 0.999
    assert wider["unmatched"] == [2, 0]
    text = found.render()
    assert "components/wider/V  changed: float32[12, 6] in A, float32[12, 4] in B" in text
    assert "components of moved: 6 matched (best), mean |cos| 1.0000" in text
    assert not found.same


def test_leaves_that_are_the_same_are_not_read(tmp_path, monkeypatch):
    V, U = factors()
    a, b = saved(tmp_path / "a", s=(V, U)), saved(tmp_path / "b", s=(V, U))
    monkeypatch.setattr(diff, "map_leaf", None)
    assert compare_runs(a, b).same


def test_steps_of_one_run_and_missing_ones(tmp_path):
    shutil.copytree(CORPUS / "raw.v1", tmp_path / "run")
    assert compare_runs(tmp_path / "run", tmp_path / "run", step_a=7, step_b=7).same
    with pytest.raises(NoCheckpoint, match="holds no step 1"):
        compare_runs(tmp_path / "run", tmp_path / "run", step_b=1)
    (tmp_path / "empty" / "ckpts").mkdir(parents=True)
    with pytest.raises(NoCheckpoint, match="holds no product yet"):
        compare_runs(tmp_path / "run", tmp_path / "empty")


def test_contracts_containers_and_lineage_are_compared(tmp_path):
    V, U = factors()
    a, b = saved(tmp_path / "a", s=(V, U)), tmp_path / "b"
    loose = pdlib.Registry((pdlib.ItemSpec(name="decomposition", leaves=[pdlib.LeafSpec(path="**")]),))
    with Manager(b / "ckpts", registry=loose) as manager:
        manager.save(0, {"decomposition": {"components": {"s": {"V": V, "U": U}}, "ci_fn": {}}})
    (b / "lineage.json").write_text('{"target": "blake3:abc", "parent": {"step": 3}}', "utf-8")
    found = compare_runs(a, b)
    assert found.same
    assert found.differs
    assert found.spec["lineage.target"] == (None, "blake3:abc")
    assert found.spec["lineage.parent.step"] == (None, 3)
    assert set(found.contract) == {"container (the whole item)", "container components/s", "digest"}
    assert found.contract["container components/s"] == ("pdlib.items.state:Factors", "dict")
    assert "contract  container components/s: 'pdlib.items.state:Factors' in A, 'dict' in B" in found.render()
    (b / "lineage.json").write_text("{", "utf-8")
    with pytest.raises(RunSpecError, match=r"lineage\.json is unreadable"):
        compare_runs(a, b)


def test_sites_of_other_sizes_are_not_matched(tmp_path):
    a, b = saved(tmp_path / "a", s=factors(d_in=12)), saved(tmp_path / "b", s=factors(d_in=13))
    (site,) = compare_runs(a, b).sites
    assert (site.matching, site.unmatched) == (None, (6, 6))
    assert "components of s: 0 matched (none: other d_in or d_out), mean |cos| –, 0 above" in site.render()


def test_comparing_imports_no_jax_and_exits_with_1_only_when_asked(tmp_path):
    V, U = factors()
    a, b = saved(tmp_path / "a", s=(V, U)), saved(tmp_path / "b", s=disguised(V, U)[:2])
    for args, code in (((a, b), 0), ((a, b, "--exit-code"), 1), ((a, a, "--exit-code"), 0)):
        done = pdlib_command("diff", *args, cwd=tmp_path, without_jax=True)
        assert (done.returncode, done.stderr) == (code, ""), args
        assert ("components of s: 6 matched (best), mean |cos| 1.0000" in done.stdout) == (b in args)


def test_the_command_prints_and_draws(tmp_path):
    V, U = factors()
    a, b = saved(tmp_path / "a", s=(V, U)), saved(tmp_path / "b", s=disguised(V, U)[:2])
    picture = tmp_path / "figures" / "diff.png"
    command = [sys.executable, "-m", "pdlib", "diff", str(a), str(b), "--json", "--figure", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["sites"][0]["same"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
