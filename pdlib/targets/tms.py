"""Toy models of superposition: `ReLU(x W1 W2 + b)` with fewer hidden units than features.

The model and its data are those of Elhage et al. 2022 (arXiv 2209.10652) as SPD (arXiv 2506.20790) decomposes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.method.losses import mean_squared_error
from pdlib.targets.pretrain import best_of
from pdlib.targets.task import Task, Truth, one_feature_each, sparse


class Shape(NamedTuple):
    """A toy model: `features` inputs and outputs through `hidden` units; a feature is active with `probability`.

    With `identity` a frozen identity layer stands between the two: `ReLU(x W1 I W2 + b)`.
    """

    features: int
    hidden: int
    probability: float
    identity: bool = False


class Pretraining(NamedTuple):
    """How the model is trained: the best of so many `attempts`, each for `steps` batches of AdamW."""

    attempts: int
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float


def network(shape: Shape) -> hk.Transformed:
    """The model as plain Haiku: linear layers, a bias on the output, a ReLU."""

    def net(x: Array) -> Array:
        hidden = hk.Linear(shape.hidden, with_bias=False, name="linear1")(x)
        if shape.identity:
            hidden = hk.Linear(shape.hidden, with_bias=False, name="identity")(hidden)
        return jax.nn.relu(hk.Linear(shape.features, name="linear2")(hidden))

    return hk.without_apply_rng(hk.transform(net))


def task(shape: Shape, pretraining: Pretraining) -> Task:
    """The model with its sites `linear1`, `linear2` and, if it is there, `identity`; each has one component a feature,
    but for the identity, where all features share the hidden units."""
    sites = ["linear1", *["identity"] * shape.identity, "linear2"]
    truth = {site: Truth("identity", shape.features) for site in ("linear1", "linear2")}
    if shape.identity:
        truth["identity"] = Truth("dense", shape.hidden)
    return Task(
        apply=network(shape).apply,
        sites={site: f"{site}/w" for site in sites},
        sample=lambda key, batch: sparse(key, batch, shape.features, shape.probability),
        pretrain=lambda key: pretrain(key, shape, pretraining),
        loss=mean_squared_error,
        probe=one_feature_each(shape.features),
        recover="linear1",
        truth=truth,
    )


def pretrain(key: Any, shape: Shape, how: Pretraining) -> dict[str, dict[str, Array]]:
    """Train a toy model with tied weights, `W2 = W1ᵀ`, to reconstruct its input.

    `W ~ 0.8·N(0, 1/hidden)` and no bias at the start: with it six of six seeds reach the regular polygon in 5,000
    steps of 1,024 at 5e-3, where the published initialisation reaches it in one of five.
    """
    apply = network(shape).apply

    def init(key: Any) -> dict[str, Array]:
        W = 0.8 * jax.random.normal(key, (shape.features, shape.hidden)) * shape.hidden**-0.5
        return {"W": W, "b": jnp.zeros(shape.features)}

    def loss(weights: dict[str, Array], key: Any) -> Array:
        x = sparse(key, how.batch, shape.features, shape.probability)
        return jnp.mean((apply(_untied(weights, shape), x) - x) ** 2)

    found = best_of(
        key,
        init,
        loss,
        attempts=how.attempts,
        steps=how.steps,
        learning_rate=how.learning_rate,
        weight_decay=how.weight_decay,
    )
    return _untied(found, shape)


def _untied(weights: dict[str, Array], shape: Shape) -> dict[str, dict[str, Array]]:
    params = {"linear1": {"w": weights["W"]}, "linear2": {"w": weights["W"].T, "b": weights["b"]}}
    return params | ({"identity": {"w": jnp.eye(shape.hidden)}} if shape.identity else {})
