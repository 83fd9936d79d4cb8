"""Activations at a use, axes in the order of masks and factors; keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdlib.rewrite.forward import conv_order, dot_order, gather_order, transposed
from pdlib.rewrite.layout import Atom, arrange, ordered
from pdlib.rewrite.products import contraction, lookup
from pdlib.rewrite.sites import Tap, Use

_POSITION = -10  # counts down: an axis of a position, which is moved and never cut


def tap_of(equation: Any, operands: Sequence[Any], use: Use, output: Any) -> Tap:
    """What meets the weight, and the product."""
    x = operands[1 - use.operand]
    if use.kind == "conv":
        features = int(equation.params["dimension_numbers"].rhs_spec[0])
        return Tap(x, _canonical(_straight(output, conv_order(equation)), use, (features,)))
    if use.kind == "gather":
        table = lookup(equation)
        return Tap(x, _canonical(_straight(output, gather_order(equation)), use, table.kept if table else ()))
    axes = contraction(equation, use.operand)
    x = transposed(x, (*axes.other_batch, *axes.other_free, *axes.other_in))
    y = _straight(output, dot_order(equation, use))
    return Tap(_canonical(x, use, axes.weight_in), _canonical(y, use, axes.weight_out))


def _straight(output: Any, order: tuple[int, ...]) -> Any:
    """An output as `[*positions, *d_out]`."""
    return transposed(output, tuple(order.index(axis) for axis in range(len(order))))


def _canonical(array: Any, use: Use, axes: Sequence[int]) -> Any:
    """`[*positions, *axes of the weight]` with those axes as one, in the order of the site's matrix."""
    count = array.ndim - len(axes)
    front = [(Atom(_POSITION - index, 1, size),) for index, size in enumerate(array.shape[:count])]
    inner = [use.dims[axis] for axis in axes]
    return arrange(array, [*front, *inner], [*front, ordered(atom for dim in inner for atom in dim)])
