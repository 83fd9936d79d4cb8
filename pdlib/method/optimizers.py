"""The two optimizers of a decomposition, on optax; knows no loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pdlib.method.importance import is_buffer
from pdlib.method.schedule import Schedule


class Optimizers(NamedTuple):
    """One optimizer for V and U, one for the importance function."""

    components: optax.GradientTransformation
    ci_fn: optax.GradientTransformation


def adamw(learning_rate: Schedule, *, weight_decay: float = 0.0, max_norm: float | None = None) -> Any:
    """AdamW with β (0.9, 0.999) and ε 1e-8, after an optional clip; buffers of importance functions do not decay.

    Args:
        learning_rate: of each step.
        weight_decay: decoupled, times the learning rate.
        max_norm: see `clip`.
    """
    update = optax.adamw(learning_rate, weight_decay=weight_decay, mask=_trained if weight_decay else None)
    return update if max_norm is None else optax.chain(clip(max_norm), update)


def clip(max_norm: float) -> optax.GradientTransformation:
    """Scale the whole gradient by `min(1, max_norm / (norm + 1e-6))`, as PyTorch does, the norm in float32."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(updates)]
        norm = jnp.sqrt(sum(squares, jnp.float32(0)))
        factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def apply_update(optimizer: optax.GradientTransformation, gradient: Any, state: Any, values: Any) -> tuple[Any, Any]:
    """New values and the optimizer's new state."""
    change, state = optimizer.update(gradient, state, values)
    return optax.apply_updates(values, change), state


def _trained(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_buffer(path), params)
