"""The method once more, in float64 NumPy and from its formulas alone: what the tests of pdlib.method compare with."""

from __future__ import annotations

import numpy as np


def relative_faithfulness(weights, components) -> float:
    parts = [((W - V @ U) ** 2).sum() / (W**2).sum() for W, (V, U) in ((weights[s], components[s]) for s in weights)]
    return float(np.mean(parts))


def minimality(upper, cost, reference: float) -> tuple[float, float]:
    """Activity and frequency, one component at a time."""
    activity = frequency = 0.0
    for u in upper.values():
        for c in range(u.shape[-1]):
            f = float(np.mean([cost(x) for x in u[..., c].ravel()]))
            activity += f
            frequency += f * np.log2(1 + reference * f)
    return activity, frequency


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def kl_divergence(out: np.ndarray, clean: np.ndarray) -> float:
    p, q = softmax(clean), softmax(out)
    return float((p * np.log(p / q)).sum(axis=-1).mean())


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> float:
    p = softmax(logits).reshape(-1, logits.shape[-1])
    return float(np.mean([-np.log(row[t]) for row, t in zip(p, targets.ravel(), strict=True)]))
