"""Trains toy targets, several attempts side by side, and keeps the best; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array


def best_of(
    key: Any,
    init: Callable[[Any], Any],
    loss: Callable[[Any, Any], Array],
    *,
    attempts: int,
    steps: int,
    learning_rate: Any,
    weight_decay: float,
) -> Any:
    """Train `attempts` draws of the parameters together with AdamW, and return those of the least loss.

    Args:
        key: a typed PRNG key.
        init: `key → params`.
        loss: `(params, key) → scalar`, drawing its batch from the key.
        attempts: how many initial draws.
        steps: updates of each.
        learning_rate: a number or an optax schedule.
        weight_decay: of AdamW.
    """
    optimizer = optax.adamw(learning_rate, weight_decay=weight_decay)
    key_init, key_data, key_final = jax.random.split(key, 3)

    def train(own: Any) -> tuple[Any, Array]:
        params = init(own)

        def update(step: Array, carry: Any) -> Any:
            params, state = carry
            gradient = jax.grad(loss)(params, jax.random.fold_in(key_data, step))
            change, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, change), state

        params, _ = jax.lax.fori_loop(0, steps, update, (params, optimizer.init(params)))
        finals = jax.lax.map(lambda k: loss(params, k), jax.random.split(key_final, 16))
        return params, jnp.mean(finals)

    trained, finals = jax.jit(jax.vmap(train))(jax.random.split(key_init, attempts))
    return jax.tree.map(lambda x: x[jnp.argmin(finals)], trained)
