"""Toy models of superposition: `ReLU(x W1 W2 + b)` with fewer hidden units than features; builds and trains targets.

The model and its data are those of Elhage et al. 2022 (arXiv 2209.10652) as SPD (arXiv 2506.20790) decomposes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pdlib.targets.target import Target

# what a run calls each decomposed weight → the parameter that it is
SITES = {"linear1": "linear1/w", "linear2": "linear2/w"}


class Shape(NamedTuple):
    """A toy model: `features` inputs and outputs through `hidden` units; a feature is active with `probability`."""

    features: int
    hidden: int
    probability: float


def network(shape: Shape) -> hk.Transformed:
    """The model as plain Haiku: two linear layers, a bias on the output, a ReLU."""

    def net(x: Array) -> Array:
        hidden = hk.Linear(shape.hidden, with_bias=False, name="linear1")(x)
        return jax.nn.relu(hk.Linear(shape.features, name="linear2")(hidden))

    return hk.without_apply_rng(hk.transform(net))


def sample(key: Any, batch: int, shape: Shape) -> Float[Array, "batch features"]:
    """Draw inputs: each feature is active with the shape's probability, and then uniform in [0, 1]."""
    key_value, key_active = jax.random.split(key)
    size = (batch, shape.features)
    active = jax.random.bernoulli(key_active, shape.probability, size)
    return jax.random.uniform(key_value, size) * active


def pretrain(key: Any, shape: Shape, *, steps: int, batch: int, learning_rate: float, weight_decay: float) -> Target:
    """Train a toy model with tied weights, `W2 = W1ᵀ`, to reconstruct its input.

    `W ~ 0.8·N(0, 1/hidden)` and no bias at the start: with it six of six seeds reach the regular polygon in 5,000
    steps of 1,024 at 5e-3, where the published initialisation reaches it in one of five.
    """
    key_init, key_data = jax.random.split(key)
    W = 0.8 * jax.random.normal(key_init, (shape.features, shape.hidden)) * shape.hidden**-0.5
    optimizer = optax.adamw(learning_rate, weight_decay=weight_decay)
    apply = network(shape).apply

    def loss(weights: dict[str, Array], x: Array) -> Array:
        return jnp.mean((apply(_untied(weights), x) - x) ** 2)

    def update(step: Array, carry: Any) -> Any:
        weights, state = carry
        gradient = jax.grad(loss)(weights, sample(jax.random.fold_in(key_data, step), batch, shape))
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state

    weights = {"W": W, "b": jnp.zeros(shape.features)}
    carry = (weights, optimizer.init(weights))
    weights, _ = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, update, carry))(carry)
    return Target(apply, _untied(weights))


def _untied(weights: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    return {"linear1": {"w": weights["W"]}, "linear2": {"w": weights["W"].T, "b": weights["b"]}}
