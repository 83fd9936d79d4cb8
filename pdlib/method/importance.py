"""Causal-importance functions, as pure functions of taps, and the two squashings of their logits; knows no loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pdlib.errors import ContractError
from pdlib.items.state import Factors, Site

_LEAK = 0.01


class ImportanceFn(NamedTuple):
    """A causal-importance function.

    Attributes:
        init: `(key, sites) → params`.
        apply: `(params, components, site inputs) → logits [..., C] of each site`.
    """

    init: Callable[[Any, Mapping[str, Site]], Any]
    apply: Callable[[Any, Mapping[str, Factors], Mapping[str, Array]], dict[str, Array]]


def per_component_mlp(hidden: int) -> ImportanceFn:
    """One small MLP a component, on the scalar `v_c · x`: `hidden` erf-GELU units, then one logit (SPD, 2506.20790).

    Parameters of site s, in a Haiku module of its name: `w_in`, `b_in`, `w_out` of `[C, hidden]` and `b_out` of `[C]`;
    Kaiming normal (gain √2 in, 1 out), zero biases.
    """

    def forward(inner: Mapping[str, Array]) -> dict[str, Array]:
        names = _module_names(inner)
        return {site: _ComponentMLP(hidden, name=names[site])(x) for site, x in inner.items()}

    network = hk.without_apply_rng(hk.transform(forward))

    def init(key: Any, sites: Mapping[str, Site]) -> Any:
        return network.init(key, {name: jnp.zeros((1, site.C)) for name, site in sites.items()})

    def apply(params: Any, components: Mapping[str, Factors], inputs: Mapping[str, Array]) -> dict[str, Array]:
        return network.apply(params, {site: x @ components[site].V for site, x in inputs.items()})

    return ImportanceFn(init, apply)


class _ComponentMLP(hk.Module):
    def __init__(self, hidden: int, name: str) -> None:
        super().__init__(name=name)
        self.hidden = hidden

    def __call__(self, x: Float[Array, "*positions C"]) -> Float[Array, "*positions C"]:
        shape = (x.shape[-1], self.hidden)
        w_in = hk.get_parameter("w_in", shape, init=hk.initializers.RandomNormal(2**0.5))
        b_in = hk.get_parameter("b_in", shape, init=jnp.zeros)
        w_out = hk.get_parameter("w_out", shape, init=hk.initializers.RandomNormal(self.hidden**-0.5))
        b_out = hk.get_parameter("b_out", shape[:1], init=jnp.zeros)
        lead = (1,) * (x.ndim - 1)
        wide = x[..., None] * w_in.reshape(*lead, *shape) + b_in.reshape(*lead, *shape)
        return jnp.einsum("...ch,ch->...c", jax.nn.gelu(wide, approximate=False), w_out) + b_out.reshape(*lead, -1)


@jax.custom_vjp
def lower_squash(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`clip(x, 0, 1)`, the importance that feeds masks.

    Its gradient passes on 0 < x ≤ 1; at x ≤ 0 it is 0.01 of the incoming one where that is negative (so that a dead
    component can come back), else 0; above 1 it is 0.
    """
    return jnp.clip(x, 0, 1)


def _lower_forward(x: Array) -> tuple[Array, Array]:
    return jnp.clip(x, 0, 1), x


def _lower_backward(x: Array, gradient: Array) -> tuple[Array]:
    below = jnp.where(gradient < 0, _LEAK * gradient, 0)
    return (jnp.where(x <= 0, below, jnp.where(x <= 1, gradient, 0)),)


lower_squash.defvjp(_lower_forward, _lower_backward)


def upper_squash(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0 below 0, x in between, `1 + 0.01 (x − 1)` above 1: the importance that minimality presses on."""
    return jnp.where(x > 1, 1 + _LEAK * (x - 1), jnp.maximum(x, 0))


def _module_names(sites: Mapping[str, Any]) -> dict[str, str]:
    """Site names as Haiku module names, which have letters, digits and _ only."""
    names = {site: re.sub(r"\W", "_", site, flags=re.ASCII) for site in sites}
    if len(set(names.values())) < len(names):
        raise ContractError(f"sites {sorted(names)} differ only in punctuation; rename one for its importance function")
    return names
