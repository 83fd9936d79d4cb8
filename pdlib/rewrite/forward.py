"""The decomposed form of one product by a weight, in place of its equation; knows neither loops nor the model.

With `h = x V` and `y0 = x W`: `y = (h ⊙ (m − δ)) U + δ·y0`, which equals `((x V) ⊙ m) U + δ · x (W − V U)` and never
forms `V U`. It is `y0` to the bit at m = δ = 1, and where it is not routed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pdlib.items.state import Factors
from pdlib.rewrite import jaxpr as internals
from pdlib.rewrite.layout import COMPONENT, Atom, Dims, arrange, ordered, runs
from pdlib.rewrite.masks import SiteMask
from pdlib.rewrite.products import channel, contraction, lookup
from pdlib.rewrite.sites import Use


class _Parts(NamedTuple):
    """One product, its factors bound.

    Attributes:
        h: `x V` of `[*positions, C]`.
        U: `[*batch, C, *d_out]`, the axes of d_out as the weight has them.
        batch: the number of axes of positions that the weight has too.
        order: the axes of `[*positions, *d_out]` in the order of the equation's output.
    """

    h: Any
    U: Any
    batch: int
    order: tuple[int, ...]


def site_forward(equation: Any, operands: Sequence[Any], use: Use, factors: Factors, mask: SiteMask) -> Any:
    """The output of one equation with its weight decomposed.

    Args:
        equation: a product by a weight, as `use` describes it.
        operands: its operands.
        factors: `V[*batch, d_in, C]`, `U[*batch, C, d_out]`; loops have taken their axes off.
        mask: `mask[*positions, C]`, `delta` and `route` of `[*positions, 1]`, sizes of one allowed.
    """
    dtype, out = operands[use.operand].dtype, equation.outvars[0].aval
    cast = Factors(*(jnp.asarray(one).astype(dtype) for one in factors))
    if use.transposed:
        cast = Factors(jnp.swapaxes(cast.U, -1, -2), jnp.swapaxes(cast.V, -1, -2))
    frozen: Any = None if mask.delta is None and mask.route is None else internals.bind(equation, operands)[0]
    parts = _PARTS[use.kind](equation, operands, use, cast)
    h = parts.h
    m = jnp.ones((1,) * h.ndim, h.dtype) if mask.mask is None else mask.mask.astype(h.dtype)

    def spread(value: Any) -> Any:
        """`[*positions, 1]` along the axes of the output."""
        return transposed(value.reshape(*value.shape[:-1], *(1,) * (len(parts.order) - value.ndim + 1)), parts.order)

    def back(h: Any) -> Any:
        """`h U`, as the output is laid out."""
        y = _contract(h.astype(dtype), parts, equation, frozen)
        return transposed(y, parts.order).astype(out.dtype)

    if mask.delta is None:
        y = back(h * m)
    elif use.kind == "gather" or cast.V.shape[-2] == 1:
        # y0 is one term, which can be −0: subtracted, a zero keeps its sign, since −0 + 0 is 0 and −0 − 0 is −0
        y = spread(mask.delta).astype(out.dtype) * frozen - back(h * (mask.delta.astype(h.dtype) - m))
    else:
        y = back(h * (m - mask.delta.astype(h.dtype))) + spread(mask.delta).astype(out.dtype) * frozen
    return y if mask.route is None else jnp.where(spread(mask.route), y, frozen)


def transposed(array: Any, order: tuple[int, ...]) -> Any:
    """The axes in another order; nothing is emitted where it is the same."""
    return array if order == tuple(range(len(order))) else jax.lax.transpose(array, order)


def dot_order(equation: Any, use: Use) -> tuple[int, ...]:
    """The axes of `[*batch, *free axes of x, *free axes of W]` in the order of a dot's output."""
    axes = contraction(equation, use.operand)
    batch, free, out = len(axes.other_batch), len(axes.other_free), len(axes.weight_out)
    straight = tuple(range(batch + free + out))
    return straight if use.operand == 1 else (*straight[:batch], *straight[batch + free :], *straight[batch:][:free])


def conv_order(equation: Any) -> tuple[int, ...]:
    """The axes of `[*positions, features]` in the order of a convolution's output."""
    rank, features = len(equation.outvars[0].aval.shape), channel(equation)
    order = list(range(rank - 1))
    order.insert(features, rank - 1)
    return tuple(order)


def gather_order(equation: Any) -> tuple[int, ...]:
    """The axes of `[*indices, *kept axes of the table]` in the order of a lookup's output."""
    rank, found = len(equation.outvars[0].aval.shape), lookup(equation)
    offsets = found.offsets if found else ()
    indices = iter(range(rank - len(offsets)))
    return tuple(rank - len(offsets) + offsets.index(a) if a in offsets else next(indices) for a in range(rank))


def _dot(equation: Any, operands: Sequence[Any], use: Use, factors: Factors) -> _Parts:
    axes = contraction(equation, use.operand)
    x, batch = operands[1 - use.operand], len(axes.weight_batch)
    V = _lay_out(factors.V, use.dims, axes.weight_batch, axes.weight_in, components=-1)
    U = _lay_out(factors.U, use.dims, axes.weight_batch, axes.weight_out, components=batch)
    numbers = ((axes.other_in, tuple(range(batch, V.ndim - 1))), (axes.other_batch, tuple(range(batch))))
    place: dict[str, Any] = {}
    if internals.explicit_mesh(V) is not None:
        spec = internals.spec_of(x)
        place = _place(V, [spec[axis] for axis in (*axes.other_batch, *axes.other_free)], internals.spec_of(V)[-1:])
    h = jax.lax.dot_general(x, V, numbers, **_settings(equation), **place)
    return _Parts(h, U, batch, dot_order(equation, use))


def _conv(equation: Any, operands: Sequence[Any], use: Use, factors: Factors) -> _Parts:
    out = int(equation.params["dimension_numbers"].rhs_spec[0])
    V = _lay_out(factors.V, use.dims, (), [axis for axis in range(len(use.dims)) if axis != out], components=-1)
    U = _lay_out(factors.U, use.dims, (), (out,), components=0)
    order = conv_order(equation)
    h = internals.bind(equation, (operands[0], jnp.moveaxis(V, -1, out)))[0]
    return _Parts(transposed(h, _inverse(order)), U, 0, order)


def _gather(equation: Any, operands: Sequence[Any], use: Use, factors: Factors) -> _Parts:
    table, indices = lookup(equation), operands[1]
    assert table is not None
    V = _lay_out(factors.V, use.dims, (), (table.row,), components=-1)
    U = _lay_out(factors.U, use.dims, (), table.kept, components=0)
    numbers = jax.lax.GatherDimensionNumbers((indices.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    h = internals.bind(equation, (V, indices), dimension_numbers=numbers, slice_sizes=(1, V.shape[-1]))[0]
    return _Parts(h, U, 0, gather_order(equation))


_PARTS = {"dot": _dot, "conv": _conv, "gather": _gather}


def _contract(h: Any, parts: _Parts, equation: Any, frozen: Any) -> Any:
    """`h U` of `[*positions, *d_out]`."""
    batch, place = tuple(range(parts.batch)), {}
    if internals.explicit_mesh(h) is not None:
        spec = internals.spec_of(parts.U)[parts.batch + 1 :]
        if frozen is not None:
            whole = internals.spec_of(frozen)
            spec = tuple(whole[parts.order.index(axis)] for axis in range(h.ndim - 1, len(parts.order)))
        place = _place(h, internals.spec_of(h)[:-1], spec)
    numbers = (((h.ndim - 1,), (parts.batch,)), (batch, batch))
    return jax.lax.dot_general(h, parts.U, numbers, **_settings(equation), **place)


def _settings(equation: Any) -> dict[str, Any]:
    """The precision of the frozen product, where it has one."""
    return {name: equation.params.get(name) for name in ("precision", "preferred_element_type")}


def _place(like: Any, positions: Sequence[Any], rest: Sequence[Any]) -> dict[str, Any]:
    """Where a product belongs in an explicit mesh; an axis of the mesh that splits a position splits nothing else."""
    taken = {name for entry in positions for name in _axis_names(entry)}
    kept = [None if taken & set(_axis_names(entry)) else entry for entry in rest]
    return {"out_sharding": NamedSharding(internals.explicit_mesh(like), PartitionSpec(*positions, *kept))}


def _axis_names(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _lay_out(factor: Any, dims: Dims, batch: Sequence[int], axes: Sequence[int], *, components: int) -> Any:
    """A factor with the axes that its weight has: `batch` in front, and `axes` for d_in or d_out."""
    C = (Atom(COMPONENT, 1, factor.shape[-1 if components == -1 else -2]),)
    have = [tuple(run) for run in runs(atom for axis in batch for atom in dims[axis])]
    own = [ordered(atom for axis in axes for atom in dims[axis])]
    front, want = [dims[axis] for axis in batch], [dims[axis] for axis in axes]
    if components == -1:
        return arrange(factor, [*have, *own, C], [*front, *want, C])
    return arrange(factor, [*have, C, *own], [*front, C, *want])


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
