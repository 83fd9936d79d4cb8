"""Residual MLPs that compute `ReLU(x) + x` of more features than they have neurons (SPD, arXiv 2506.20790).

A fixed random unit embedding `W_E [features, width]`, `W_U = W_Eᵀ`; each layer adds `ReLU(r W_in) W_out` to the
stream r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from pdlib.method.losses import mean_squared_error
from pdlib.targets.pretrain import best_of
from pdlib.targets.task import Task, Truth, one_feature_each, sparse


class Shape(NamedTuple):
    """The sizes: `layers` of `neurons` each on a stream of `width`, and features active with `probability`."""

    features: int
    width: int
    layers: int
    neurons: int
    probability: float


class Pretraining(NamedTuple):
    """How the model is trained: the best of so many `attempts`, each for `steps` batches of AdamW, cosine to 0."""

    attempts: int
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float


def network(shape: Shape) -> hk.Transformed:
    """The model as plain Haiku."""

    def net(x: Array) -> Array:
        embedding = hk.get_parameter("embedding", (shape.features, shape.width), init=_unit_rows)
        stream = x @ embedding
        for layer in range(shape.layers):
            inner = hk.Linear(shape.neurons, with_bias=False, name=f"mlp_in_{layer}")(stream)
            stream += hk.Linear(shape.width, with_bias=False, name=f"mlp_out_{layer}")(jax.nn.relu(inner))
        return stream @ embedding.T

    return hk.without_apply_rng(hk.transform(net))


def task(shape: Shape, pretraining: Pretraining) -> Task:
    """The model with its sites `mlp_in_0`, `mlp_out_0`, …; each mlp_in has one component a feature, as all layers
    compute parts of it, and each mlp_out is a dense block of about as many as the layer has neurons."""
    layers = range(shape.layers)
    names = [f"{part}_{layer}" for layer in layers for part in ("mlp_in", "mlp_out")]
    truth: dict[str, Truth] = {f"mlp_in_{layer}": Truth("identity", shape.features) for layer in layers}
    truth |= {f"mlp_out_{layer}": Truth("dense", shape.neurons) for layer in layers}
    return Task(
        apply=network(shape).apply,
        sites={name: f"{name}/w" for name in names},
        sample=lambda key, batch: sparse(key, batch, shape.features, shape.probability, low=-1.0),
        pretrain=lambda key: pretrain(key, shape, pretraining),
        loss=mean_squared_error,
        probe=one_feature_each(shape.features),
        truth=truth,
    )


def pretrain(key: Any, shape: Shape, how: Pretraining) -> Any:
    """Train the layers for the label `ReLU(x) + x`; the embedding stays as drawn."""
    net = network(shape)
    key_embedding, key_train = jax.random.split(key)
    fixed = {"~": {"embedding": _unit_rows((shape.features, shape.width), jnp.float32, key=key_embedding)}}

    def init(key: Any) -> Any:
        params = net.init(key, jnp.zeros((1, shape.features)))
        return {name: module for name, module in params.items() if name != "~"}

    def loss(layers: Any, key: Any) -> Array:
        x = sparse(key, how.batch, shape.features, shape.probability, low=-1.0)
        return jnp.mean((net.apply({**fixed, **layers}, x) - jax.nn.relu(x) - x) ** 2)

    rate = optax.cosine_decay_schedule(how.learning_rate, how.steps)
    layers = best_of(
        key_train, init, loss, attempts=how.attempts, steps=how.steps, learning_rate=rate, weight_decay=how.weight_decay
    )
    return {**fixed, **layers}


def _unit_rows(shape: Any, dtype: Any, key: Any = None) -> Array:
    rows = jax.random.normal(hk.next_rng_key() if key is None else key, shape, dtype)
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
