"""How near a decomposition comes to parts that are known: pure functions of arrays, in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment

from pdlib.items.state import Factors


class Recovery(NamedTuple):
    """How well the components of a linear site stand for its input features.

    Attributes:
        mmcs: mean over features of the largest cosine of a component's part and the weight row (SPD, 2506.20790).
        ml2r: mean over features of the norm ratio of that component's part and the column.
        recovered: features whose cosine is at least 0.99 and norm ratio within 10 %.
    """

    mmcs: float
    ml2r: float
    recovered: int


def recovery(W: Float[np.ndarray, "features d_out"], factors: Factors) -> Recovery:
    """Compare each row of W with what every component does to that feature, `V[j, c] · U[c]`."""
    V, U = np.asarray(factors.V, np.float64), np.asarray(factors.U, np.float64)
    rows_of_W = np.asarray(W, np.float64)
    parts = V[:, :, None] * U[None]
    norms = np.linalg.norm(parts, axis=-1)
    lengths = np.linalg.norm(rows_of_W, axis=-1)
    cosines = np.einsum("fcd,fd->fc", parts, rows_of_W) / np.maximum(norms * lengths[:, None], 1e-12)
    best = np.argmax(cosines, axis=-1)
    rows = np.arange(len(rows_of_W))
    cosine, ratio = cosines[rows, best], norms[rows, best] / np.maximum(lengths, 1e-12)
    good = (cosine >= 0.99) & (np.abs(ratio - 1) <= 0.1)
    return Recovery(float(cosine.mean()), float(ratio.mean()), int(good.sum()))


def permute_to_identity(ci: Float[np.ndarray, "features C"]) -> Float[np.ndarray, "features C"]:
    """The columns in the order that puts the most importance on the diagonal; unmatched ones follow by mass."""
    rows, columns = linear_sum_assignment(-ci)
    matched = columns[np.argsort(rows)]
    others = np.setdiff1d(np.arange(ci.shape[1]), matched)
    return ci[:, np.concatenate([matched, others[np.argsort(-ci[:, others].sum(0), kind="stable")]])]


def identity_error(ci: Float[np.ndarray, "features C"], *, tolerance: float = 0.1) -> int:
    """Entries that are not the identity's in the best column order: high off the diagonal, or low on it.

    Args:
        ci: lower importance of each component on one active feature at a time.
        tolerance: what still counts as 0, or as 1.
    """
    placed = permute_to_identity(np.asarray(ci, np.float64))
    size = min(placed.shape)
    wanted = np.zeros(placed.shape, bool)
    wanted[np.arange(size), np.arange(size)] = True
    wrong = np.where(wanted, placed < 1 - tolerance, placed > tolerance)
    return int(wrong.sum())


def dense_error(ci: Float[np.ndarray, "features C"], size: int, *, tolerance: float = 0.1) -> int:
    """How far importance is from a dense block of `size` components, those of the most mass.

    Counts the components of the block that reach `1 − tolerance` on no feature, those that are not there at all, and
    the entries above the tolerance outside the block.
    """
    values = np.asarray(ci, np.float64)
    values = values[:, np.argsort(-values.sum(0), kind="stable")]
    peaks = values[:, :size].max(0, initial=0.0)
    missing = size - int((peaks >= 1 - tolerance).sum())
    return missing + int((values[:, size:] > tolerance).sum())
