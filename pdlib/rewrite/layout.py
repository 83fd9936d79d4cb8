"""How a weight's entries are laid out after transposes and reshapes; knows no equation and no model.

Each axis of a laid-out weight is a tuple of atoms: runs of the axes of the stored parameter, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

STACK = -1  # the axis along which several parameters were stacked
COMPONENT = -2  # the axis C of factors


class Atom(NamedTuple):
    """`size` entries of a parameter's axis, `stride` apart."""

    axis: int
    stride: int
    size: int


Atoms = tuple[Atom, ...]
Dims = tuple[Atoms, ...]


def whole(axis: int, size: int) -> Atoms:
    """An axis that nothing has cut; an axis of one entry has no atom."""
    return () if size == 1 else (Atom(axis, 1, size),)


def stored(shape: Sequence[int]) -> Dims:
    """The layout of a parameter as it is stored."""
    return tuple(whole(axis, size) for axis, size in enumerate(shape))


def size_of(atoms: Iterable[Atom]) -> int:
    """The number of entries along atoms."""
    return math.prod(atom.size for atom in atoms)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The layout after a reshape; None where a new axis cuts across atoms that no whole number divides."""
    left = [atom for dim in dims for atom in dim][::-1]
    result: list[Atoms] = []
    for size in shape:
        taken: list[Atom] = []
        while size > 1:
            if not left:
                return None
            atom = left.pop()
            if size % atom.size == 0:
                taken.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                low = atom.size // size
                taken.append(Atom(atom.axis, atom.stride * low, size))
                left.append(Atom(atom.axis, atom.stride, low))
                size = 1
            else:
                return None
        result.append(tuple(taken))
    return None if left else tuple(result)


def runs(atoms: Iterable[Atom]) -> list[list[Atom]]:
    """Atoms in the order of the stored parameter, grouped where one continues the other."""
    result: list[list[Atom]] = []
    for atom in sorted(atoms, key=lambda atom: (atom.axis, -atom.stride)):
        last = result[-1][-1] if result else None
        if last is not None and last.axis == atom.axis and last.stride == atom.stride * atom.size:
            result[-1].append(atom)
        else:
            result.append([atom])
    return result


def ordered(atoms: Iterable[Atom]) -> Atoms:
    """Atoms in the order of the stored parameter."""
    return tuple(atom for run in runs(atoms) for atom in run)


def merged(atoms: Iterable[Atom]) -> Atoms:
    """Atoms in the order of the stored parameter, each run as one: equal for equal sets of entries."""
    return tuple(Atom(run[0].axis, run[-1].stride, size_of(run)) for run in runs(atoms))


def arrange(array: Any, have: Sequence[Sequence[Atom]], want: Sequence[Sequence[Atom]]) -> Any:
    """Lay an array out anew: axis i holds the atoms `have[i]`, and comes to hold `want[i]`.

    Both list the same atoms, grouped and ordered differently; where they agree nothing is emitted.
    """
    old, new = [atom for dim in have for atom in dim], [atom for dim in want for atom in dim]
    order = tuple(old.index(atom) for atom in new)
    shape = tuple(map(size_of, want))
    if order == tuple(range(len(order))):
        return array if array.shape == shape else array.reshape(shape)
    fine = tuple(atom.size for atom in old)
    array = jax.lax.transpose(array if array.shape == fine else array.reshape(fine), order)
    return array if array.shape == shape else array.reshape(shape)
