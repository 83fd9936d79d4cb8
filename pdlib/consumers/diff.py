"""Compares two products: specifications, leaves by digest, components by what they do; changes nothing.

Components are the same up to their order, and each up to a scale and two signs that cancel: `|cos|` of two rank-one
matrices `v ⊗ u` and `v' ⊗ u'` is `|v·v'| |u·u'| / (‖v‖ ‖v'‖ ‖u‖ ‖u'‖)`. Those of two sites are matched one to one, with
the largest sum.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from pdlib.errors import NoCheckpoint
from pdlib.store.checkpoint import Manager
from pdlib.store.decomposition import PRODUCT
from pdlib.store.digest import leaf_digest
from pdlib.store.find import find_run
from pdlib.store.mapped import map_leaf
from pdlib.store.places import locate
from pdlib.store.remote import bring
from pdlib.store.stored import StoredItem

BEST_UP_TO = 4096  # components of a site that are matched as a whole; above, each takes its best in turn
_ROWS = 1024
_TEXT_SAME = 0.999

Keys = tuple[str, ...]


@dataclass(frozen=True)
class SiteDiff:
    """How the components of one site compare.

    Attributes:
        site: its name.
        cosines: `|cos|` of each matched pair, descending, `[min(C, C')]`.
        unmatched: components of A, and of B, without a partner.
        dead: components of A, and of B, that are zero: their `|cos|` counts as 0.
        best: whether the matching is the best one, and not the greedy one of large sites.
    """

    site: str
    cosines: np.ndarray
    unmatched: tuple[int, int]
    dead: tuple[int, int]
    best: bool

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready values, quantiles for the cosines."""
        return {
            "site": self.site,
            "matched": len(self.cosines),
            "mean": float(self.cosines.mean()) if len(self.cosines) else None,
            "quantiles": {str(q): float(np.quantile(self.cosines, q)) for q in (0, 0.1, 0.5, 0.9, 1)}
            if len(self.cosines)
            else {},
            "same": int((self.cosines > _TEXT_SAME).sum()),
            "unmatched": list(self.unmatched),
            "dead": list(self.dead),
            "matching": "best" if self.best else "greedy",
        }


@dataclass(frozen=True)
class Diff:
    """How two products compare.

    Attributes:
        names: the two runs and steps, for people.
        spec: key → its value in A and in B, of the keys of `run.toml` that differ.
        leaves: path → `same`, `changed`, `only in A` or `only in B`.
        shapes: path → shape and dtype in A and in B, where these differ.
        sites: of the sites that both have and that are not the same to the bit.
    """

    names: tuple[str, str]
    spec: Mapping[str, tuple[Any, Any]]
    leaves: Mapping[Keys, str]
    shapes: Mapping[Keys, tuple[str, str]]
    sites: tuple[SiteDiff, ...]

    @property
    def same(self) -> bool:
        """Whether every leaf is the same to the bit."""
        return all(word == "same" for word in self.leaves.values())

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "same": self.same,
            "spec": {key: list(pair) for key, pair in self.spec.items()},
            "leaves": {"/".join(keys): word for keys, word in self.leaves.items()},
            "shapes": {"/".join(keys): list(pair) for keys, pair in self.shapes.items()},
            "sites": [site.as_dict() for site in self.sites],
        }

    def render(self) -> str:
        """The comparison as text."""
        lines = [f"A  {self.names[0]}", f"B  {self.names[1]}"]
        lines += [f"spec  {key}: {a!r} in A, {b!r} in B" for key, (a, b) in self.spec.items()]
        words = [*self.leaves.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("same", "changed", "only in A", "only in B"))
        lines.append(f"leaves  {counts}")
        for keys, word in self.leaves.items():
            if word != "same":
                shapes = self.shapes.get(keys)
                lines.append(f"  {'/'.join(keys)}  {word}{f': {shapes[0]} in A, {shapes[1]} in B' if shapes else ''}")
        for site in self.sites:
            row = site.as_dict()
            mean = "–" if row["mean"] is None else f"{row['mean']:.4f}"
            low = f", lowest {row['quantiles']['0']:.4f}" if row["quantiles"] else ""
            lines.append(
                f"components of {site.site}: {row['matched']} matched ({row['matching']}), mean |cos| {mean}{low}, "
                f"{row['same']} above {_TEXT_SAME}; unmatched {site.unmatched[0]} in A, {site.unmatched[1]} in B; "
                f"zero {site.dead[0]} in A, {site.dead[1]} in B"
            )
        return "\n".join([*lines, "the products are the same to the bit"] if self.same else lines)


def compare_runs(one: str | Path, other: str | Path, *, step_a: int | None = None, step_b: int | None = None) -> Diff:
    """Compare the products of two runs, or of two steps of one run.

    Leaves are compared by the digests of their manifests, without reading them; V and U of sites that differ are read.

    Raises:
        NotARun, NoCheckpoint, TornStep: there is no such product.
    """
    (a, run_a), (b, run_b) = _product(one, step_a), _product(other, step_b)
    spec_a, spec_b = _spec(run_a), _spec(run_b)
    keys = sorted(spec_a.keys() | spec_b.keys())
    spec = {key: (spec_a.get(key), spec_b.get(key)) for key in keys if spec_a.get(key) != spec_b.get(key)}
    leaves = {path: _word(a, b, path) for path in sorted(a.by_path.keys() | b.by_path.keys())}
    described = {path: (_shape(a, path), _shape(b, path)) for path, word in leaves.items() if word == "changed"}
    sites = [path[1] for path in leaves if path[0] == "components" and path[-1] == "V"]
    differing = [site for site in sites if _is_shared(leaves, site) and not _is_same(leaves, site)]
    names = tuple(f"{run}, step {item.directory.parent.name}" for item, run in ((a, run_a), (b, run_b)))
    return Diff(
        (names[0], names[1]),
        spec,
        leaves,
        {path: pair for path, pair in described.items() if pair[0] != pair[1]},
        tuple(_site(a, b, site) for site in differing),
    )


def match_components(
    one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Match the components of two sites by `|cos|` of their rank-one matrices.

    Args:
        one: V `[d_in, C]` and U `[C, d_out]`.
        other: the same, with a C of its own.

    Returns:
        the matched columns of each, `[min(C, C')]`, and their `|cos|`, in descending order of it. The matching with the
        largest sum up to `BEST_UP_TO` components; above, the largest entries in turn.
    """
    cosines = _cosines(one, other)
    if max(cosines.shape) <= BEST_UP_TO:
        rows, columns = linear_sum_assignment(-cosines)
    else:
        rows, columns = _greedy(cosines)
    order = np.argsort(-cosines[rows, columns], kind="stable")
    return rows[order], columns[order], cosines[rows, columns][order]


def _cosines(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """`[C, C']`, computed a block of rows at a time; zero for components that are zero."""
    (V, U), (W, T) = _unit(*one), _unit(*other)
    result = np.empty((V.shape[1], W.shape[1]), np.float32)
    for start in range(0, V.shape[1], _ROWS):
        part = slice(start, start + _ROWS)
        result[part] = np.abs(V[:, part].T @ W) * np.abs(U[part] @ T.T)
    return np.clip(result, 0, 1, out=result)


def _unit(V: np.ndarray, U: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns of V and rows of U of norm one; those of a norm of zero, or none, become zero."""
    v = np.sqrt(np.einsum("ij,ij->j", V, V, dtype=np.float64))[None]
    u = np.sqrt(np.einsum("ij,ij->i", U, U, dtype=np.float64))[:, None]
    parts: list[np.ndarray] = []
    for factor, norm in ((V, v), (U, u)):
        good = np.isfinite(norm) & (norm > 0)
        parts.append(np.divide(factor, norm, out=np.zeros(factor.shape, np.float32), where=good, casting="unsafe"))
    return parts[0], parts[1]


def _greedy(cosines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best partner of each row, rows with the best ones first; a partner that is taken is not offered again."""
    first = np.argsort(-cosines.max(axis=1), kind="stable")
    free = np.ones(cosines.shape[1], bool)
    rows: list[int] = []
    columns: list[int] = []
    for row in first[: cosines.shape[1]]:
        column = int(np.argmax(np.where(free, cosines[row], -1)))
        free[column] = False
        rows.append(int(row))
        columns.append(column)
    return np.array(rows, int), np.array(columns, int)


def _product(run: str | Path, step: int | None) -> tuple[StoredItem, Path]:
    home = find_run(locate(run))
    with Manager(home / "ckpts", read_only=True) as manager:
        newest = manager.latest(items=(PRODUCT,)) if step is None else step
        if newest is None:
            raise NoCheckpoint(f"{home} holds no product yet; let it train to its first save")
        return manager.describe(newest, PRODUCT), home


def _spec(run: Path) -> dict[str, Any]:
    path = run / "run.toml"

    def flat(table: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in table.items():
            found |= flat(value, f"{lead}{key}.") if isinstance(value, dict) else {f"{lead}{key}": value}
        return found

    return flat(tomllib.loads(path.read_text("utf-8"))) if path.exists() else {}


def _word(a: StoredItem, b: StoredItem, path: Keys) -> str:
    one, other = a.by_path.get(path), b.by_path.get(path)
    if one is None or other is None:
        return "only in B" if one is None else "only in A"
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return "same" if alike and leaf_digest(a, one) == leaf_digest(b, other) else "changed"


def _shape(item: StoredItem, path: Keys) -> str:
    leaf = item.by_path[path]
    return f"{leaf.dtype}{list(leaf.shape)}"


def _is_shared(leaves: Mapping[Keys, str], site: str) -> bool:
    return all(leaves.get(("components", site, key), "only").split()[0] != "only" for key in "VU")


def _is_same(leaves: Mapping[Keys, str], site: str) -> bool:
    return all(leaves["components", site, key] == "same" for key in "VU")


def _site(a: StoredItem, b: StoredItem, site: str) -> SiteDiff:
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for item in (a, b):
        leaves = [item.by_path["components", site, key] for key in "VU"]
        bring(item, leaves)
        pairs.append((map_leaf(item, leaves[0]), map_leaf(item, leaves[1])))
    (V, U), (W, T) = pairs
    counts = (V.shape[1], W.shape[1])
    dead = [_dead(*pair) for pair in pairs]
    if V.shape[0] != W.shape[0] or U.shape[1] != T.shape[1]:
        return SiteDiff(site, np.empty(0, np.float32), counts, (dead[0], dead[1]), True)
    _, _, cosines = match_components(pairs[0], pairs[1])
    least = min(counts)
    rest = (counts[0] - least, counts[1] - least)
    return SiteDiff(site, cosines, rest, (dead[0], dead[1]), max(counts) <= BEST_UP_TO)


def _dead(V: np.ndarray, U: np.ndarray) -> int:
    return int(V.shape[1] - (np.any(V != 0, axis=0) & np.any(U != 0, axis=1)).sum())
