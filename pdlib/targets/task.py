"""A target with what a run needs around it: sites, data, a loss, and what is known of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.errors import RunSpecError


class Truth(NamedTuple):
    """What is known of a site's importance on the probe: one component a feature, or a dense block of about `size`."""

    kind: Literal["identity", "dense"]
    size: int


@runtime_checkable
class Corpus(Protocol):
    """Batches that come from the host, as data on disk does; see `pdlib.targets.tokens.Tokens`."""

    def abstract(self, size: int) -> Any:
        """A batch by shapes and dtypes; reads nothing."""
        ...

    def batch(self, seed: int, step: int, size: int) -> Any:
        """The batch of a step, a pytree of NumPy arrays that follows from the arguments alone."""
        ...


@dataclass(frozen=True)
class Task:
    """Everything about a target but its trained parameters.

    Attributes:
        apply: `apply(params, batch) → output`.
        sites: what each site is called → the parameter that it is, in the order of the model.
        pretrain: `key → params`.
        loss: `(output, clean output) → float32 scalar`, a mean over the batch.
        sample: `(key, size) → batch`, a pure function of JAX.
        corpus: in place of `sample`, batches from the host.
        shapes: of the parameters, where `pretrain` reads them from files; else they follow from tracing it.
        probe: inputs that have one feature each, `[features, …]`, where features are known.
        recover: a site whose rows are known to be the features' directions.
        truth: what is known of sites.
    """

    apply: Callable[..., Any]
    sites: Mapping[str, str]
    pretrain: Callable[[Any], Any]
    loss: Callable[[Any, Any], Array]
    sample: Callable[[Any, int], Any] | None = None
    corpus: Corpus | None = None
    shapes: Any = None
    probe: Any = None
    recover: str | None = None
    truth: Mapping[str, Truth] = field(default_factory=dict[str, Truth])

    def __post_init__(self) -> None:
        if (self.sample is None) == (self.corpus is None):
            raise RunSpecError(
                "a task draws its batches from `sample` or reads them from `corpus`: give one of the two"
            )


def one_feature_each(features: int, value: float = 0.75) -> Array:
    """`value · eye(features)`: the probe of the published CI metrics."""
    return value * jnp.eye(features)


def sparse(key: Any, batch: int, features: int, probability: float, *, low: float = 0.0) -> Array:
    """Inputs `[batch, features]`, each entry active with a probability and then uniform in [low, 1]."""
    key_value, key_active = jax.random.split(key)
    size = (batch, features)
    active = jax.random.bernoulli(key_active, probability, size)
    return jax.random.uniform(key_value, size, minval=low, maxval=1.0) * active
