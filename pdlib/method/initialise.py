"""Closed-form initialisation of V and U; knows no optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pdlib.items.state import Factors, Site


def can_spread(site: Site) -> bool:
    """Whether a site has components enough for `spread_factors`."""
    return min(site.d_in, site.d_out) <= site.C


def spread_factors(key: Any, W: Float[Array, "d_in d_out"], C: int) -> Factors:
    """Exactly faithful factors that share the weight evenly: V of random unit columns, `U = Vᵀ (V Vᵀ)⁻¹ W`.

    Where `C < d_in`, U of random unit rows and `V = W (Uᵀ U)⁻¹ Uᵀ`. Needs `C ≥ min(d_in, d_out)`, where `V U = W` up to
    rounding; it makes a faithfulness warm-up needless.
    """
    if W.shape[0] > C:
        turned = spread_factors(key, W.T, C)
        return Factors(turned.U.T, turned.V.T)
    columns = jax.random.normal(key, (W.shape[0], C), jnp.float32)
    V = columns / jnp.linalg.norm(columns, axis=0, keepdims=True)
    return Factors(V, V.T @ jnp.linalg.solve(V @ V.T, W))
