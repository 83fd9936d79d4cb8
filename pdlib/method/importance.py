"""Causal-importance functions, as pure functions of taps, and the two squashings of their logits; knows no loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pdlib.errors import ContractError
from pdlib.items.state import Factors, Site

BUFFERS = ("frequencies",)  # parameters that are never trained, decayed or rounded
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
        return network.apply(params, {site: inputs[site] @ factors.V for site, factors in components.items()})

    return ImportanceFn(init, apply)


def layerwise_mlp(hidden: Sequence[int]) -> ImportanceFn:
    """One MLP a site, from the site's input through erf-GELU layers to its C logits.

    Parameters of site s, in a Haiku module of its name: `w_0 [d_in, hidden[0]]`, `b_0`, … and `w_n [hidden[-1], C]`,
    `b_n`; Kaiming normal (gain √2, 1 in the last), zero biases.
    """

    def forward(inputs: Mapping[str, Array], components: Mapping[str, int]) -> dict[str, Array]:
        names = _module_names(inputs)
        return {site: _MLP((*hidden, components[site]), name=names[site])(x) for site, x in inputs.items()}

    network = hk.without_apply_rng(hk.transform(forward))

    def init(key: Any, sites: Mapping[str, Site]) -> Any:
        inputs = {name: jnp.zeros((1, site.d_in)) for name, site in sites.items()}
        return network.init(key, inputs, {name: site.C for name, site in sites.items()})

    def apply(params: Any, components: Mapping[str, Factors], inputs: Mapping[str, Array]) -> dict[str, Array]:
        return network.apply(params, {site: inputs[site] for site in components}, _counts(components))

    return ImportanceFn(init, apply)


def global_mlp(hidden: Sequence[int]) -> ImportanceFn:
    """One MLP from the inputs of all sites, joined in the order of their names, to the logits of all.

    Parameters in the Haiku module `global_mlp`: as one site's of `layerwise_mlp`, with `Σ d_in` in and `Σ C` out.

    Raises:
        ContractError: sites differ in their positions.
    """

    def forward(inputs: Mapping[str, Array], components: Mapping[str, int]) -> dict[str, Array]:
        sites = sorted(components)
        if len({inputs[site].shape[:-1] for site in sites}) > 1:
            shapes = ", ".join(f"{site}: {inputs[site].shape[:-1]}" for site in sites)
            raise ContractError(
                f"a global MLP joins sites position by position, and these differ: {shapes}; use layerwise_mlp"
            )
        joined = jnp.concatenate([inputs[site] for site in sites], axis=-1)
        logits = _MLP((*hidden, sum(components.values())), name="global_mlp")(joined)
        ends = np.cumsum([components[site] for site in sites])
        return dict(zip(sites, jnp.split(logits, ends[:-1], axis=-1), strict=True))

    network = hk.without_apply_rng(hk.transform(forward))

    def init(key: Any, sites: Mapping[str, Site]) -> Any:
        inputs = {name: jnp.zeros((1, site.d_in)) for name, site in sites.items()}
        return network.init(key, inputs, {name: site.C for name, site in sites.items()})

    def apply(params: Any, components: Mapping[str, Factors], inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = network.apply(params, {site: inputs[site] for site in components}, _counts(components))
        return {site: found[site] for site in components}

    return ImportanceFn(init, apply)


class _MLP(hk.Module):
    def __init__(self, widths: Sequence[int], name: str) -> None:
        super().__init__(name=name)
        self.widths = tuple(widths)

    def __call__(self, x: Float[Array, "*positions d_in"]) -> Float[Array, "*positions d_out"]:
        last = len(self.widths) - 1
        for index, width in enumerate(self.widths):
            scale = ((1 if index == last else 2) / x.shape[-1]) ** 0.5
            w = hk.get_parameter(f"w_{index}", (x.shape[-1], width), init=hk.initializers.RandomNormal(scale))
            b = hk.get_parameter(f"b_{index}", (width,), init=jnp.zeros)
            x = x @ w + b.reshape((1,) * (x.ndim - 1) + b.shape)
            x = x if index == last else gelu(x)
        return x


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
        flat = x.reshape(-1, x.shape[-1]).T  # positions last: every sum over them is then a dot of long rows
        wide = jnp.einsum("ch,cp->chp", w_in, flat) + b_in[..., None]
        logits = jnp.einsum("chp,ch->cp", gelu(wide), w_out) + b_out[:, None]
        return logits.T.reshape(x.shape)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x/2 · (1 + erf(x/√2))`, at least in float32; `jax.nn.gelu` takes erfc, of five times as many operations."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


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


def is_buffer(path: Sequence[Any]) -> bool:
    """Whether a parameter at this path of a tree is a buffer; a tree that is one array has no path, and is none."""
    return any(getattr(key, "key", None) in BUFFERS for key in path[-1:])


def _counts(components: Mapping[str, Factors]) -> dict[str, int]:
    return {site: factors.V.shape[-1] for site, factors in components.items()}


def _module_names(sites: Mapping[str, Any]) -> dict[str, str]:
    """Site names as Haiku module names, which have letters, digits and _ only."""
    names = {site: re.sub(r"\W", "_", site, flags=re.ASCII) for site in sites}
    if len(set(names.values())) < len(names):
        raise ContractError(f"sites {sorted(names)} differ only in punctuation; rename one for its importance function")
    return names
