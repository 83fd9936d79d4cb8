"""The losses of a parameter decomposition, as functions of arrays; every reduction is in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pdlib.items.state import Factors
from pdlib.method.schedule import Schedule

Penalty = Callable[[Any, Any], Any]  # (upper importance in float32, step) → what each entry costs, of the same shape


class Minimality(NamedTuple):
    """The two parts of minimality, each a float32 scalar with a coefficient of its own."""

    activity: Any
    frequency: Any


def faithfulness(weights: Mapping[str, Array], components: Mapping[str, Factors]) -> Float[Array, ""]:
    """`Σ_s ‖W_s − V_s U_s‖² / Σ_s numel(W_s)`: the mean squared error of all weights (SPD, 2506.20790)."""
    squares = [
        jnp.sum((W - components[site].V @ components[site].U).astype(jnp.float32) ** 2) for site, W in weights.items()
    ]
    return sum(squares, jnp.float32(0)) / sum(W.size for W in weights.values())


def relative_faithfulness(weights: Mapping[str, Array], components: Mapping[str, Factors]) -> Float[Array, ""]:
    """The mean over sites of `‖W_s − V_s U_s‖² / ‖W_s‖²`: sites count alike whatever their size and scale."""
    parts: list[Array] = []
    for site, W in weights.items():
        V, U = components[site]
        target = W.astype(jnp.float32)
        rest = target - jnp.matmul(V.astype(jnp.float32), U.astype(jnp.float32))
        parts.append(jnp.sum(rest**2) / jnp.sum(target**2))
    return jnp.mean(jnp.stack(parts))


def power_penalty(exponent: Schedule, *, epsilon: float = 1e-12) -> Penalty:
    """`(u + ε)^p`, with the exponent p of each step; ε keeps its gradient finite at u = 0 where p < 1."""
    return lambda upper, step: (upper + epsilon) ** exponent(step)


def smooth_l0(width: Schedule) -> Penalty:
    """`u² / (u² + γ²)`, with the width γ of each step: the count of entries well above γ."""

    def penalty(upper: Any, step: Any) -> Any:
        square = upper**2
        return square / (square + width(step) ** 2)

    return penalty


def minimality(upper: Mapping[str, Array], step: Any, *, penalty: Penalty, reference: float) -> Minimality:
    """How much is important: `f_c`, the mean of a penalty over the batch and its positions, summed in two ways.

    `activity = Σ_s Σ_c f_c`; `frequency = Σ_s Σ_c f_c · log2(1 + a·f_c)` (VPD), which presses more on components that
    are often important. Sites are never merged, and the mean is taken before the logarithm.

    Args:
        upper: `[..., C]` of each site, the upper importance.
        step: handed to the penalty.
        penalty: see `power_penalty` and `smooth_l0`.
        reference: a, a number of positions.
    """
    means = [jnp.mean(penalty(u.astype(jnp.float32).reshape(-1, u.shape[-1]), step), axis=0) for u in upper.values()]
    activity = sum((jnp.sum(f) for f in means), jnp.float32(0))
    frequency = sum((jnp.sum(f * jnp.log2(1 + reference * f)) for f in means), jnp.float32(0))
    return Minimality(activity, frequency)


def mean_squared_error(out: Float[Array, "*shape"], clean: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Mean squared difference of two outputs: the reconstruction loss of toy models."""
    return jnp.mean((out - clean).astype(jnp.float32) ** 2)


def kl_divergence(out: Float[Array, "*positions vocabulary"], clean: Float[Array, "*positions vocabulary"]) -> Array:
    """`KL(softmax(clean) ‖ softmax(out))` in nats, summed over the vocabulary, the mean over positions."""
    log_clean = jax.nn.log_softmax(clean.astype(jnp.float32))
    log_out = jax.nn.log_softmax(out.astype(jnp.float32))
    return jnp.mean(jnp.sum(jnp.exp(log_clean) * (log_clean - log_out), axis=-1))


def cross_entropy(logits: Float[Array, "*positions vocabulary"], targets: Int[Array, "*positions"]) -> Array:
    """The mean over positions of `−log softmax(logits)[target]`, in nats."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], axis=-1))
