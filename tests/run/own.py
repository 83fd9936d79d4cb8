"""What a user brings to a run by `module:function`: a language model, a term, a mask source, an importance function."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pdlib.method import losses
from pdlib.method.importance import ImportanceFn, layerwise_mlp
from pdlib.method.masks import Drawn
from pdlib.targets.task import Task


def language(vocabulary: int = 7, width: int = 4, length: int = 3) -> Task:
    """Tokens through a residual layer to logits `[batch, length, vocabulary]`."""

    def net(tokens: Any) -> Any:
        x = checkpoint_name(hk.Embed(vocabulary, width, name="embed")(tokens), "stream")
        x = x + hk.Linear(width, name="down")(jax.nn.gelu(hk.Linear(2 * width, name="up")(x)))
        return hk.Linear(vocabulary, with_bias=False, name="head")(x)

    model = hk.without_apply_rng(hk.transform(net))

    def sample(key: Any, batch: int) -> Any:
        return jax.random.randint(key, (batch, length), 0, vocabulary)

    return Task(
        apply=model.apply,
        sites={"up": "up/w", "down": "down/w"},
        sample=sample,
        pretrain=lambda key: model.init(key, sample(key, 1)),
        loss=losses.kl_divergence,
    )


def largest(power: int = 2) -> Any:
    """The mean of the largest importance at each position, to a power."""

    def value(model: Any, shared: Any, key: Any, drawn: Any) -> Any:
        del model, key, drawn
        return sum(jnp.mean(jnp.max(u, axis=-1) ** power) for u in shared.learned.upper.values())

    return value


def halves(key: Any, lower: Any) -> Drawn:
    """A source of one half."""
    del key
    return Drawn(jnp.full((1,) * lower.ndim, 0.5, lower.dtype))


def narrow(hidden: int = 2) -> ImportanceFn:
    """A layerwise MLP."""
    return layerwise_mlp([hidden])


def nothing() -> None:
    """No target at all."""
