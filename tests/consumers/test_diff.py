"""Comparing products: by digests, then by what their components do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pdlib
from pdlib.consumers import diff
from pdlib.consumers.diff import compare_runs, match_components
from pdlib.errors import NoCheckpoint
from pdlib.store import Manager
from tests.data.freeze import CORPUS

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
    rows, columns, cosines = match_components((V, U), (W, T))
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    np.testing.assert_array_equal(order[columns], rows)


def test_the_cosine_is_that_of_the_rank_one_matrices():
    one, other = factors(C=1), factors(C=1)
    a, b = (np.asarray(V, np.float64) @ np.asarray(U, np.float64) for V, U in (one, other))
    want = abs(np.sum(a * b)) / (np.linalg.norm(a) * np.linalg.norm(b))
    assert match_components(one, other)[2][0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("limit", [diff.BEST_UP_TO, 2])
def test_components_without_a_partner_are_left_over_and_zero_ones_count_nothing(monkeypatch, limit):
    monkeypatch.setattr(diff, "BEST_UP_TO", limit)
    V, U = factors(C=6)
    W, T, _ = disguised(V, U)
    W[:, 0] = 0
    rows, columns, cosines = match_components((V, U), (W[:, :4], T[:4]))
    assert len(rows) == len(set(rows)) == len(set(columns)) == 4
    np.testing.assert_allclose(cosines[:3], 1, atol=1e-5)
    assert cosines[3] == 0


def test_the_matching_is_the_best_one_and_the_greedy_one_where_it_must_be(monkeypatch):
    cosines = np.array([[0.9, 0.8], [0.85, 0.1]], np.float32)
    monkeypatch.setattr(diff, "_cosines", lambda *_: cosines)
    assert match_components(factors(), factors())[2].sum() == pytest.approx(1.65)
    monkeypatch.setattr(diff, "BEST_UP_TO", 1)
    assert match_components(factors(), factors())[2].sum() == pytest.approx(1.0)


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


def test_the_command_prints_and_draws(tmp_path):
    V, U = factors()
    a, b = saved(tmp_path / "a", s=(V, U)), saved(tmp_path / "b", s=disguised(V, U)[:2])
    picture = tmp_path / "figures" / "diff.png"
    command = [sys.executable, "-m", "pdlib", "diff", str(a), str(b), "--json", "--figure", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["sites"][0]["same"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
