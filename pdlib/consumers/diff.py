"""Compares two products: specifications, contracts, leaves by digest, components by what they do; changes nothing.

Needs no jax, and reads V and U of those sites alone that differ.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdlib.consumers.matching import Matching, dead_components, match_components
from pdlib.errors import RunSpecError
from pdlib.store.digest import leaf_digest
from pdlib.store.find import find_product, find_run
from pdlib.store.mapped import map_leaf
from pdlib.store.places import locate
from pdlib.store.remote import bring
from pdlib.store.stored import StoredItem

_TEXT_SAME = 0.999

Keys = tuple[str, ...]


@dataclass(frozen=True)
class SiteDiff:
    """How the components of one site compare.

    Attributes:
        site: its name.
        counts: C in A, and in B.
        matching: who goes with whom; None where d_in or d_out differ.
        dead: components of A, and of B, that are zero or not finite: nothing is matched with them.
    """

    site: str
    counts: tuple[int, int]
    matching: Matching | None
    dead: tuple[int, int]

    @property
    def cosines(self) -> np.ndarray:
        """`|cos|` of each matched pair, descending, `[matched]`."""
        return np.empty(0, np.float32) if self.matching is None else self.matching.cosines

    @property
    def unmatched(self) -> tuple[int, int]:
        """Components of A, and of B, that are not dead and have no partner."""
        matched = len(self.cosines)
        return self.counts[0] - self.dead[0] - matched, self.counts[1] - self.dead[1] - matched

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready values, quantiles for the cosines."""
        cosines = self.cosines
        some = len(cosines) > 0
        word = "none: other d_in or d_out" if self.matching is None else "best" if self.matching.best else "mutual"
        return {
            "site": self.site,
            "C": list(self.counts),
            "matched": len(cosines),
            "mean": float(cosines.mean(dtype=np.float64)) if some else None,
            "min": float(cosines.min()) if some else None,
            "quantiles": {str(q): float(np.quantile(cosines, q)) for q in (0, 0.1, 0.5, 0.9, 1)} if some else {},
            "same": int((cosines > _TEXT_SAME).sum()),
            "unmatched": list(self.unmatched),
            "dead": list(self.dead),
            "matching": word,
        }

    def render(self) -> str:
        """The comparison in a line."""
        row = self.as_dict()
        mean, low = ("–", "") if row["mean"] is None else (f"{row['mean']:.4f}", f", lowest {row['min']:.4f}")
        return (
            f"components of {self.site}: {row['matched']} matched ({row['matching']}), mean |cos| {mean}{low}, "
            f"{row['same']} above {_TEXT_SAME}; unmatched {self.unmatched[0]} in A, {self.unmatched[1]} in B; "
            f"zero {self.dead[0]} in A, {self.dead[1]} in B"
        )


@dataclass(frozen=True)
class Diff:
    """How two products compare.

    Attributes:
        names: the two runs and steps, for people.
        spec: key → its value in A and in B, of the keys of `run.toml` and `lineage.json` that differ.
        contract: the same of what the items say of their contracts and containers.
        leaves: path → `same`, `changed`, `only in A` or `only in B`.
        shapes: path → shape and dtype in A and in B, where these differ.
        sites: of the sites that both have and that are not the same to the bit.
    """

    names: tuple[str, str]
    spec: Mapping[str, tuple[Any, Any]]
    contract: Mapping[str, tuple[Any, Any]]
    leaves: Mapping[Keys, str]
    shapes: Mapping[Keys, tuple[str, str]]
    sites: tuple[SiteDiff, ...]

    @property
    def same(self) -> bool:
        """Whether every leaf is the same to the bit."""
        return all(word == "same" for word in self.leaves.values())

    @property
    def differs(self) -> bool:
        """Whether anything at all is different."""
        return bool(self.spec or self.contract or not self.same)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "same": self.same,
            "differs": self.differs,
            "spec": {key: list(pair) for key, pair in self.spec.items()},
            "contract": {key: list(pair) for key, pair in self.contract.items()},
            "leaves": {"/".join(keys): word for keys, word in self.leaves.items()},
            "shapes": {"/".join(keys): list(pair) for keys, pair in self.shapes.items()},
            "sites": [site.as_dict() for site in self.sites],
        }

    def render(self) -> str:
        """The comparison as text."""
        lines = [f"A  {self.names[0]}", f"B  {self.names[1]}"]
        lines += [f"spec  {key}: {a!r} in A, {b!r} in B" for key, (a, b) in self.spec.items()]
        lines += [f"contract  {key}: {a!r} in A, {b!r} in B" for key, (a, b) in self.contract.items()]
        words = [*self.leaves.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("same", "changed", "only in A", "only in B"))
        lines.append(f"leaves  {counts}")
        for keys, word in self.leaves.items():
            if word != "same":
                shapes = self.shapes.get(keys)
                lines.append(f"  {'/'.join(keys)}  {word}{f': {shapes[0]} in A, {shapes[1]} in B' if shapes else ''}")
        lines += [site.render() for site in self.sites]
        return "\n".join([*lines, "the products are the same to the bit"] if self.same else lines)


def compare_runs(one: str | Path, other: str | Path, *, step_a: int | None = None, step_b: int | None = None) -> Diff:
    """Compare the products of two runs, or of two steps of one run.

    Leaves are compared by the digests of their manifests, without reading them; V and U of sites that differ are read.

    Raises:
        NotARun, NoCheckpoint, TornStep, ForeignLayout: there is no such product.
        RunSpecError: a run's `run.toml` or `lineage.json` is unreadable.
    """
    runs = find_run(locate(one)), find_run(locate(other))
    a, b = find_product(runs[0], step_a), find_product(runs[1], step_b)
    leaves = {path: _word(a, b, path) for path in sorted(a.by_path.keys() | b.by_path.keys())}
    described = {path: (_shape(a, path), _shape(b, path)) for path, word in leaves.items() if word == "changed"}
    sites = [path[1] for path in leaves if path[0] == "components" and path[-1] == "V"]
    differing = [site for site in sites if _is_shared(leaves, site) and not _is_same(leaves, site)]
    names = tuple(f"{run}, step {(i.origin or i.directory).parent.name}" for i, run in zip((a, b), runs, strict=True))
    return Diff(
        (names[0], names[1]),
        _differences(_spec(runs[0]), _spec(runs[1])),
        _differences(_identity(a), _identity(b)),
        leaves,
        {path: pair for path, pair in described.items() if pair[0] != pair[1]},
        tuple(_site(a, b, site) for site in differing),
    )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _spec(run: Path) -> dict[str, Any]:
    """The values of a run's `run.toml`, and those of its `lineage.json` below `lineage`, by dotted key."""
    found: dict[str, Any] = {}
    for name, parse, lead in (("run.toml", tomllib.loads, ""), ("lineage.json", json.loads, "lineage.")):
        path = run / name
        try:
            found |= dict(_flat(parse(path.read_text("utf-8")), lead)) if path.exists() else {}
        except (ValueError, AttributeError) as error:
            raise RunSpecError(f"{path} is unreadable ({error}); restore it from a copy") from error
    return found


def _flat(table: Mapping[str, Any], lead: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{lead}{key}.")
        else:
            yield f"{lead}{key}", value


def _identity(item: StoredItem) -> dict[str, Any]:
    """What an item says of its contract, and the class of each container by its path."""
    contract = {"version": item.version, "role": item.role, "digest": item.digest}
    return {**contract, **dict(_containers(item.tree, ()))}


def _containers(node: Mapping[str, Any], keys: Keys) -> Iterator[tuple[str, str]]:
    if "leaf" not in node:
        yield f"container {'/'.join(keys) or '(the whole item)'}", node.get("class") or node["kind"]
        for key, child in zip(node["keys"], node["children"], strict=True):
            yield from _containers(child, (*keys, str(key)))


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
    if V.shape[0] == W.shape[0] and U.shape[1] == T.shape[1]:
        matching = match_components(*pairs)
        return SiteDiff(site, counts, matching, matching.dead)
    return SiteDiff(site, counts, None, (dead_components(V, U), dead_components(W, T)))
