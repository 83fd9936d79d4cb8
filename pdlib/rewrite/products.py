"""Reads how an equation multiplies by a weight: what it contracts, what stays; binds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdlib.rewrite.follow import Weight
from pdlib.rewrite.layout import STACK, Atoms, merged
from pdlib.rewrite.sites import Use

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "gather"})


class Contraction(NamedTuple):
    """The axes of a `dot_general`, for its weight and for the other operand.

    Attributes:
        weight_batch, weight_in, weight_out: axes of the weight; the first two pair with those of the other.
        other_batch, other_in, other_free: axes of the other operand.
    """

    weight_batch: tuple[int, ...]
    weight_in: tuple[int, ...]
    weight_out: tuple[int, ...]
    other_batch: tuple[int, ...]
    other_in: tuple[int, ...]
    other_free: tuple[int, ...]


class Lookup(NamedTuple):
    """The axes of a gather that looks rows up.

    Attributes:
        row: the weight's axis that indices run over; the others are taken whole.
        kept: the weight's other axes.
        offsets: where those stand in the output.
    """

    row: int
    kept: tuple[int, ...]
    offsets: tuple[int, ...]


def product_of(equation: Any, operand: int, weight: Weight) -> Use | None:
    """The use that an equation makes of a weight, not yet named or placed; None if it is not a product by it."""
    if weight.rank < 2:
        return None
    name = equation.primitive.name
    if name == "dot_general":
        return _dot(equation, operand, weight)
    if name == "conv_general_dilated":
        return _conv(equation, operand, weight)
    return _gather(equation, operand, weight)


def contraction(equation: Any, operand: int) -> Contraction:
    """Read the axes of a `dot_general` whose weight is this operand."""
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [len(atom.aval.shape) for atom in equation.invars]

    def free(side: int) -> tuple[int, ...]:
        return tuple(a for a in range(ranks[side]) if a not in contracted[side] and a not in batch[side])

    w, x = operand, 1 - operand
    parts = (batch[w], contracted[w], free(w), batch[x], contracted[x], free(x))
    return Contraction(*(tuple(map(int, part)) for part in parts))


def lookup(equation: Any) -> Lookup | None:
    """Read a gather as a lookup of rows along one axis of a table, None if it is something else."""
    numbers = equation.params["dimension_numbers"]
    shape, sizes = equation.invars[0].aval.shape, tuple(equation.params["slice_sizes"])
    rows = tuple(map(int, numbers.start_index_map))
    if len(rows) != 1 or tuple(numbers.collapsed_slice_dims) != rows or numbers.operand_batching_dims:
        return None
    kept = tuple(axis for axis in range(len(shape)) if axis != rows[0])
    if sizes[rows[0]] != 1 or any(sizes[axis] != shape[axis] for axis in kept):
        return None
    return Lookup(rows[0], kept, tuple(map(int, numbers.offset_dims)))


def channel(equation: Any) -> int:
    """The axis of a convolution's output that holds features."""
    return int(equation.params["dimension_numbers"].out_spec[1])


def _dot(equation: Any, operand: int, weight: Weight) -> Use | None:
    axes = contraction(equation, operand)
    if not axes.weight_in or not axes.weight_out:
        return None
    shape = equation.invars[1 - operand].aval.shape
    positions = tuple(shape[axis] for axis in (*axes.other_batch, *axes.other_free))
    return _use(
        "dot", operand, weight, positions, batch=axes.weight_batch, inputs=axes.weight_in, outputs=axes.weight_out
    )


def _conv(equation: Any, operand: int, weight: Weight) -> Use | None:
    if operand != 1:
        return None
    params = equation.params
    out = int(params["dimension_numbers"].rhs_spec[0])
    inputs = [axis for axis in range(len(weight.dims)) if axis != out]
    features = channel(equation)
    positions = tuple(size for axis, size in enumerate(equation.outvars[0].aval.shape) if axis != features)
    use = _use("conv", operand, weight, positions, batch=(), inputs=inputs, outputs=(out,))
    groups = params["feature_group_count"], params["batch_group_count"]
    if use is not None and groups != (1, 1):
        kind = "features" if groups[0] > 1 else "the batch"
        return use._replace(blockers=(f"it is the kernel of a convolution in {max(groups)} groups of {kind}",))
    return use


def _gather(equation: Any, operand: int, weight: Weight) -> Use | None:
    found = lookup(equation) if operand == 0 else None
    if found is None:
        return None
    shape = equation.outvars[0].aval.shape
    positions = tuple(size for axis, size in enumerate(shape) if axis not in found.offsets)
    return _use("gather", operand, weight, positions, batch=(), inputs=(found.row,), outputs=found.kept)


def _use(
    kind: str,
    operand: int,
    weight: Weight,
    positions: tuple[int, ...],
    *,
    batch: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> Use | None:
    def atoms(axes: Sequence[int]) -> Atoms:
        return merged(atom for axis in axes for atom in weight.dims[axis])

    d_in, d_out = atoms(inputs), atoms(outputs)
    if any(atom.axis == STACK for atom in (*d_in, *d_out)):
        return None
    return Use(
        name="|".join(weight.members),
        members=weight.members,
        kind=kind,
        transposed=False,
        loops=(),
        positions=positions,
        location=(),
        operand=operand,
        dims=weight.dims,
        lead=weight.lead,
        batch=atoms(batch),
        inputs=d_in,
        outputs=d_out,
    )
