"""Closed-form initialisation of V and U; knows no optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pdlib.items.state import Factors


def spread_factors(key: Any, W: Float[Array, "d_in d_out"], C: int) -> Factors:
    """Exactly faithful factors that share the weight evenly: V of random unit columns, `U = Vᵀ (V Vᵀ)⁻¹ W`.

    Needs `C ≥ d_in`, where `V U = W` up to rounding; it makes a faithfulness warm-up needless.
    """
    columns = jax.random.normal(key, (W.shape[0], C), jnp.float32)
    V = columns / jnp.linalg.norm(columns, axis=0, keepdims=True)
    return Factors(V, V.T @ jnp.linalg.solve(V @ V.T, W))
