"""The losses of a parameter decomposition, as functions of arrays; every reduction is in float32."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from pdlib.items.state import Factors


def faithfulness(weights: Mapping[str, Array], components: Mapping[str, Factors]) -> Float[Array, ""]:
    """`Σ_s ‖W_s − V_s U_s‖² / Σ_s numel(W_s)`: the mean squared error of all weights (SPD, 2506.20790)."""
    squares = [
        jnp.sum((W - components[site].V @ components[site].U).astype(jnp.float32) ** 2) for site, W in weights.items()
    ]
    return sum(squares, jnp.float32(0)) / sum(W.size for W in weights.values())


def minimality(upper: Mapping[str, Array], *, power: float, epsilon: float = 1e-12) -> Float[Array, ""]:
    """`Σ_s Σ_c mean over positions of (u_c + ε)^p`, with u the upper importance; sites are never merged."""
    totals = [
        jnp.sum(jnp.mean((u.astype(jnp.float32).reshape(-1, u.shape[-1]) + epsilon) ** power, axis=0))
        for u in upper.values()
    ]
    return sum(totals, jnp.float32(0))


def mean_squared_error(out: Float[Array, "*shape"], clean: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Mean squared difference of two outputs: the reconstruction loss of toy models."""
    return jnp.mean((out - clean).astype(jnp.float32) ** 2)
