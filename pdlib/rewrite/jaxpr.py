"""Every part of JAX's internals that the rewrite leans on, in one place; interprets nothing itself.

What it takes for granted: the fields of a jaxpr, names and parameters of higher-order primitives, that an equation is
bound again with `get_bind_params`, and its source context. The oracle tests hold it on the oldest and newest JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
REMATS = frozenset({"remat2", "remat", "checkpoint"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
# equations of one output per operand that change neither the order nor, beyond rounding, the value of entries
PASSES = frozenset(
    {
        "convert_element_type", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "name",
        "reduce_precision", "device_put", "reshard", "stop_gradient", "pvary",
    }
)  # fmt: skip


class Trace(NamedTuple):
    """A traced function.

    Attributes:
        closed: its jaxpr with constants.
        structure: the pytree of its output.
    """

    closed: Any
    structure: Any

    @property
    def avals(self) -> list[Any]:
        """The abstract inputs, flat."""
        return [variable.aval for variable in self.closed.jaxpr.invars]


class Inner(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
        jaxpr: open.
        consts: of the jaxpr, if it was closed.
        operands: for each of its inputs the equation's operand that feeds it; None where that is not known.
    """

    jaxpr: Any
    consts: Sequence[Any]
    operands: Sequence[int] | None


def trace(function: Callable[..., Any], *arguments: Any) -> Trace:
    """Trace on shapes and dtypes alone: arrays are not read, and abstract ones do as well."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Trace(closed, jax.tree.structure(out))


def inner(equation: Any) -> list[Inner]:
    """The jaxprs inside an equation, in a fixed order; none for a first-order primitive."""
    params, count, name = equation.params, len(equation.invars), equation.primitive.name
    if name in CALLS:
        return [_inner(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], range(count))]
    if name in REMATS or name == "scan":
        return [_inner(params["jaxpr"], range(count))]
    if name in CUSTOM:
        return [_inner(params["call_jaxpr"] if "call_jaxpr" in params else params["fun_jaxpr"], range(count))]
    if name == "cond":
        return [_inner(branch, range(1, count)) for branch in params["branches"]]
    if name == "while":
        test, body = params["cond_nconsts"], params["body_nconsts"]
        carry = range(test + body, count)
        return [
            _inner(params["cond_jaxpr"], [*range(test), *carry]),
            _inner(params["body_jaxpr"], range(test, count)),
        ]
    found = [leaf for value in params.values() for leaf in _jaxprs(value)]
    return [_inner(one, range(count) if len(_open(one)[0].invars) == count else None) for one in found]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant written into the equation."""
    return isinstance(atom, Literal)


def bind(equation: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation again, with its custom derivatives and, but for `changed`, its parameters."""
    primitive = equation.primitive
    given = primitive.get_bind_params(equation.params)
    functions, params = given if isinstance(given, tuple) else ((), given)  # a pair up to jax 0.9
    out = primitive.bind(*functions, *operands, **{**params, **changed})
    return list(out) if primitive.multiple_results else [out]


@contextmanager
def context(equation: Any) -> Generator[None]:
    """Source line, name stack and configuration under which an equation was traced."""
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
        yield


def scan(equation: Any, body: Callable[..., Any], init: Any, xs: Any) -> Any:
    """A scan with the settings of `equation` over another body."""
    params = equation.params
    settings = {name: params[name] for name in ("reverse", "unroll", "_split_transpose") if name in params}
    return jax.lax.scan(body, init, xs, length=params["length"], **settings)


def remat(equation: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the rematerialisation of `equation`."""
    return jax.checkpoint(function, prevent_cse=equation.params["prevent_cse"], policy=equation.params["policy"])


def constrain(values: Sequence[Any], shardings: Sequence[Any] | None) -> list[Any]:
    """Hold values to those of a jit's shardings that it specified."""
    if shardings is None:
        return list(values)
    return [
        jax.lax.with_sharding_constraint(value, one) if isinstance(one, jax.sharding.Sharding) else value
        for value, one in zip(values, shardings, strict=True)
    ]


def explicit_mesh(value: Any) -> Any:
    """The mesh of a value whose type carries a sharding; None for one that XLA shards by itself."""
    sharding = getattr(jax.typeof(value), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    kinds = sharding.mesh.axis_types
    return sharding.mesh if any(kind == jax.sharding.AxisType.Explicit for kind in kinds) else None


def spec_of(value: Any) -> tuple[Any, ...]:
    """The partition of each axis in a value's type, in an explicit mesh."""
    spec = tuple(jax.typeof(value).sharding.spec)
    return spec + (None,) * (value.ndim - len(spec))


def baked(closed: Any, *, limit: int = 1 << 16) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of each array above `limit` bytes that a jaxpr, or one inside it, holds as a constant."""
    found: dict[int, tuple[int, tuple[int, ...]]] = {}

    def visit(jaxpr: Any, consts: Sequence[Any]) -> None:
        literals = [x.val for equation in jaxpr.eqns for x in equation.invars if is_literal(x)]
        for value in (*consts, *literals):
            if getattr(value, "nbytes", 0) > limit:
                found[id(value)] = (value.nbytes, tuple(value.shape))
        for equation in jaxpr.eqns:
            for one in (one for value in equation.params.values() for one in _jaxprs(value)):
                visit(*_open(one))

    visit(closed.jaxpr, closed.consts)
    return list(found.values())


def _inner(jaxpr: Any, operands: Sequence[int] | None) -> Inner:
    return Inner(*_open(jaxpr), operands)


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _jaxprs(one)
