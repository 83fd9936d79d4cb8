"""Matches the components of two sites by what they do, whatever their order, signs and scales; needs no jax.

`|cos|` of rank-one matrices `v ⊗ u` and `v' ⊗ u'` is `|v·v'| |u·u'| / (‖v‖ ‖v'‖ ‖u‖ ‖u'‖)`; partners are one to one.
Up to `BEST_UP_TO` components the sum of `|cos|` is the largest there is (SciPy's assignment, cubic in C). Above,
partners are those who are each other's best, taken out round by round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

BEST_UP_TO = 4096  # components of a site
DRAWN_UP_TO = 64  # components of a site whose whole matrix is kept for a figure
_ROUNDS = 64  # of mutual bests; what is left then takes its best in turn
_ROWS = 1024

Pair = tuple[np.ndarray, np.ndarray]


class Matching(NamedTuple):
    """How the components of two sites go together.

    Attributes:
        rows, columns: components of the one and of the other, partners beside each other, `[matched]`.
        cosines: `|cos|` of each pair, above 0, descending, `[matched]`.
        dead: components of the one and of the other that are zero, or not finite: they have no partner.
        best: whether the sum of `|cos|` is the largest there is.
        matrix: `|cos|` of all, partners on the diagonal, `[C, C']`; None for more than `DRAWN_UP_TO` components.
    """

    rows: np.ndarray
    columns: np.ndarray
    cosines: np.ndarray
    dead: tuple[int, int]
    best: bool
    matrix: np.ndarray | None


def match_components(one: Pair, other: Pair) -> Matching:
    """Match two sites of the same d_in and d_out.

    Args:
        one: V `[d_in, C]` and U `[C, d_out]`.
        other: the same, with a C of its own.
    """
    norms, others = _norms(*one), _norms(*other)
    cosines = _cosines((one, norms), (other, others))
    best = max(cosines.shape) <= BEST_UP_TO
    rows, columns = linear_sum_assignment(-cosines) if best else _mutual(cosines)
    found = cosines[rows, columns]
    order = np.argsort(-found, kind="stable")
    order = order[found[order] > 0]
    rows, columns = rows[order], columns[order]
    matrix = None
    if max(cosines.shape) <= DRAWN_UP_TO:
        rest = [np.setdiff1d(np.arange(n), taken) for n, taken in zip(cosines.shape, (rows, columns), strict=True)]
        matrix = cosines[np.ix_(np.append(rows, rest[0]), np.append(columns, rest[1]))]
    return Matching(rows, columns, found[order], (_dead(norms), _dead(others)), best, matrix)


def dead_components(V: np.ndarray, U: np.ndarray) -> int:
    """How many components are zero, or not finite."""
    return _dead(_norms(V, U))


def _norms(V: np.ndarray, U: np.ndarray) -> Pair:
    """Norms of the columns of V and of the rows of U, float64, `[C]` each."""
    with np.errstate(over="ignore", invalid="ignore"):
        v = np.sqrt(np.einsum("ij,ij->j", V, V, dtype=np.float64))
        u = np.sqrt(np.einsum("ij,ij->i", U, U, dtype=np.float64))
    return v, u


def _good(norms: Pair) -> np.ndarray:
    return np.logical_and.reduce([np.isfinite(norm) & (norm > 0) for norm in norms])


def _dead(norms: Pair) -> int:
    return int((~_good(norms)).sum())


def _cosines(one: tuple[Pair, Pair], other: tuple[Pair, Pair]) -> np.ndarray:
    """`[C, C']`, a block of rows at a time; zero for dead components."""
    W, T = _unit(*other, slice(None))
    (V, U), norms = one
    result = np.empty((V.shape[1], W.shape[1]), np.float32)
    for start in range(0, V.shape[1], _ROWS):
        part = slice(start, start + _ROWS)
        v, u = _unit((V, U), norms, part)
        np.matmul(v.T, W, out=result[part])
        np.abs(result[part], out=result[part])
        result[part] *= np.abs(u @ T.T)
    return np.clip(result, 0, 1, out=result)


def _unit(pair: Pair, norms: Pair, part: slice) -> Pair:
    """Some components with factors of norm one, float32; dead ones become zero."""
    V, U = pair[0][:, part], pair[1][part]
    good = _good((norms[0][part], norms[1][part]))
    v = np.where(good, norms[0][part], 1)[None]
    u = np.where(good, norms[1][part], 1)[:, None]
    results = [np.zeros(V.shape, np.float32), np.zeros(U.shape, np.float32)]
    np.divide(V, v, out=results[0], where=good[None], casting="unsafe")
    np.divide(U, u, out=results[1], where=good[:, None], casting="unsafe")
    return results[0], results[1]


def _mutual(cosines: np.ndarray) -> Pair:
    """Pairs of which each is the other's best, round by round: but for ties, the largest entries of what is left."""
    rows, columns = np.arange(cosines.shape[0]), np.arange(cosines.shape[1])
    found: list[Pair] = []
    for _ in range(_ROUNDS):
        if not cosines.size:
            break
        to = cosines.argmax(axis=1)
        at = np.arange(len(rows))
        taken = np.flatnonzero((_best_rows(cosines)[to] == at) & (cosines[at, to] > 0))
        if not len(taken):
            break
        found.append((rows[taken], columns[to[taken]]))
        rest = np.delete(at, taken), np.delete(np.arange(len(columns)), to[taken])
        rows, columns, cosines = rows[rest[0]], columns[rest[1]], cosines[np.ix_(*rest)]
    last = _in_turn(cosines)
    found.append((rows[last[0]], columns[last[1]]))
    return np.concatenate([pair[0] for pair in found]), np.concatenate([pair[1] for pair in found])


def _best_rows(cosines: np.ndarray) -> np.ndarray:
    """The best row of each column; a block of rows at a time, because NumPy copies what it searches along axis 0."""
    best = np.zeros(cosines.shape[1], np.intp)
    top = np.full(cosines.shape[1], -1, cosines.dtype)
    for start in range(0, cosines.shape[0], _ROWS):
        block = cosines[start : start + _ROWS]
        place = block.argmax(axis=0)
        value = np.take_along_axis(block, place[None], axis=0)[0]
        better = value > top
        best[better], top[better] = place[better] + start, value[better]
    return best


def _in_turn(cosines: np.ndarray) -> Pair:
    """The best partner of each row, rows with the best ones first; a partner that is taken is not offered again."""
    first = np.argsort(-cosines.max(axis=1), kind="stable") if cosines.size else np.empty(0, int)
    free = np.ones(cosines.shape[1], bool)
    columns: list[int] = []
    for row in first[: cosines.shape[1]]:
        columns.append(int(np.argmax(np.where(free, cosines[row], -1))))
        free[columns[-1]] = False
    return first[: len(columns)], np.array(columns, int)
