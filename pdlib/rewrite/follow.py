"""What a value in a jaxpr is: a parameter laid out anew, something computed from parameters, or an activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pdlib.rewrite.jaxpr import PASSES
from pdlib.rewrite.layout import STACK, Atoms, Dims, reshaped, stored, whole
from pdlib.rewrite.sites import Lead

_SELECTS = frozenset({"gather", "dynamic_slice", "dynamic_update_slice", "select_n", "cond"})


@dataclass(frozen=True)
class Weight:
    """A parameter, or several stacked ones, with the same entries in another layout.

    Attributes:
        members: the parameters' names.
        dims: the layout.
        lead: the axes that scans took apart.
        rank: axes that are left, broadcast ones not counted; a matrix has two.
    """

    members: tuple[str, ...]
    dims: Dims
    lead: tuple[Lead, ...]
    rank: int


@dataclass(frozen=True)
class Derived:
    """A value computed from parameters without the batch.

    Attributes:
        origins: each parameter, with the primitive that first changed it.
    """

    origins: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Activation:
    """A value that depends on the batch, or a parameter broadcast along it."""


ACTIVATION = Activation()
Value = Weight | Derived | Activation | None  # None: a constant


def parameter(name: str, aval: Any) -> Value:
    """A parameter at the input: matrices of real numbers are followed, anything else is a constant."""
    if len(aval.shape) < 2 or 0 in aval.shape or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    return Weight((name,), stored(aval.shape), (), len(aval.shape))


def follow(equation: Any, values: Sequence[Value]) -> list[Value] | None:
    """The outputs of an equation that only lays weights out anew; None for any other."""
    name = equation.primitive.name
    if not any(isinstance(value, (Weight, Derived)) for value in values):
        return None
    if name in PASSES and len(values) == len(equation.outvars):
        real = [jnp.issubdtype(out.aval.dtype, jnp.floating) for out in equation.outvars]
        return [value if keeps else join([value], name) for value, keeps in zip(values, real, strict=True)]
    if name in ("stack", "concatenate"):
        stacked = _stacked(equation, values)
        return None if stacked is None else [stacked]
    if len(values) != 1 or not isinstance(values[0], Weight):
        return None
    weight, shape, dims = values[0], equation.outvars[0].aval.shape, None
    if name == "transpose":
        dims = tuple(weight.dims[axis] for axis in equation.params["permutation"])
    elif name in ("reshape", "squeeze", "expand_dims"):
        dims = reshaped(weight.dims, shape)
    elif name == "broadcast_in_dim":
        dims = _broadcast(equation, weight.dims)
    return None if dims is None else [Weight(weight.members, dims, weight.lead, weight.rank)]


def derive(equation: Any, values: Sequence[Value]) -> Value:
    """What an equation makes that is neither a layout nor a product by a weight."""
    name = equation.primitive.name
    origins = _origins(values, name)
    mixed = any(isinstance(value, Activation) for value in values)
    if not origins:
        return ACTIVATION if mixed else None
    chooses = name in _SELECTS and _origins(values[:1] if name != "select_n" else values[1:], name)
    if mixed and not chooses:
        return ACTIVATION
    if name == "broadcast_in_dim" and _size(equation.outvars[0]) > _size(equation.invars[0]):
        return ACTIVATION
    return Derived(origins)


def join(values: Sequence[Value], how: str) -> Value:
    """What comes out of control flow that may give any of `values`: of weights, something derived."""
    if any(isinstance(value, Activation) for value in values):
        return ACTIVATION
    origins = _origins(values, how)
    return Derived(origins) if origins else None


def _origins(values: Sequence[Value], how: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for value in values:
        if isinstance(value, Weight):
            found = dict.fromkeys(value.members, how) | found
        elif isinstance(value, Derived):
            found = dict(value.origins) | found
    return tuple(found.items())


def _stacked(equation: Any, values: Sequence[Value]) -> Value:
    """Several parameters of one layout along a new axis; `jnp.stack` is a `concatenate` of axes of one up to 0.9."""
    name, weights = equation.primitive.name, [value for value in values if isinstance(value, Weight)]
    if len(weights) < len(values) or any(len(w.members) > 1 or w.lead or w.dims != weights[0].dims for w in weights):
        return None
    dims = list(weights[0].dims)
    axis = equation.params["axis" if name == "stack" else "dimension"]
    if name == "concatenate":
        if equation.invars[0].aval.shape[axis] != 1:
            return None
        del dims[axis]
    dims.insert(axis, whole(STACK, len(weights)))
    members = tuple(w.members[0] for w in weights)
    return Weight(members, tuple(dims), (), weights[0].rank + 1)


def _broadcast(equation: Any, dims: Dims) -> Dims | None:
    """A broadcast that only adds axes of one entry."""
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if _size(equation.outvars[0]) > _size(equation.invars[0]) or len(new) < len(old):
        return None
    result: list[Atoms] = [() for _ in new]
    for axis, target in enumerate(equation.params["broadcast_dimensions"]):
        result[int(target)] = dims[axis]
    return tuple(result)


def _size(variable: Any) -> int:
    result = 1
    for size in variable.aval.shape:
        result *= size
    return result
