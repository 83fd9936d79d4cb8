"""Masks of uses: what they are, whether they and the factors fit, and how loops take them apart; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdlib.errors import MaskMismatch
from pdlib.items.state import Factors
from pdlib.rewrite.sites import Use, WeightSite


class SiteMask(NamedTuple):
    """What one forward does to one use of a site. Sizes of one, and missing axes in front, are broadcast.

    Attributes:
        mask: `[*loops, *positions, C]`, the factor of each component; ones where it is None.
        delta: `[*loops, *positions, 1]`, the factor of `W − V U`; None is 0, a forward without a delta path.
        route: `[*loops, *positions, 1]` of booleans: where it is false the use is frozen. None is true everywhere.
    """

    mask: Any
    delta: Any = None
    route: Any = None


def as_mask(name: str, given: SiteMask | Mapping[str, Any]) -> SiteMask:
    """A mask from itself or from a mapping with the keys `mask`, `delta` and `route`.

    Raises:
        MaskMismatch: another key.
    """
    if isinstance(given, SiteMask):
        return given
    if not set(given) <= set(SiteMask._fields):
        raise MaskMismatch(f"{name}: a mask has the keys mask, delta and route, not {sorted(given)}; drop the others")
    return SiteMask(given.get("mask"), given.get("delta"), given.get("route"))


def fit(
    uses: Sequence[Use], masks: Mapping[str, SiteMask], factors: Mapping[str, Factors], sites: Mapping[str, WeightSite]
) -> dict[str, SiteMask]:
    """The masks of uses with all their axes, sizes of one where they are shared.

    Raises:
        MaskMismatch: factors are missing or of another shape, or a mask does not broadcast; lists all.
    """
    problems = [line for name in _members(uses) for line in _factor_problems(sites[name], factors)]
    if not problems:
        for use in uses:
            C = factors[use.members[0]][0].shape[-1]
            if len({factors[name][0].shape[-1] for name in use.members}) > 1:
                problems.append(f"{use.name}: its factors differ in C; stacked weights share one mask, so one C")
            problems += _mask_problems(use, masks[use.name], C)
    if problems:
        lines = "\n".join(f"  {line}" for line in dict.fromkeys(problems))
        raise MaskMismatch(f"masks or factors do not fit the model\n{lines}\n`plan.sites(...)` has the shapes to use.")
    return {use.name: _with_all_axes(use, masks[use.name]) for use in uses}


def stacked(use: Use, factors: Mapping[str, Factors]) -> Factors:
    """The factors of a use; where parameters were stacked, theirs along the axis that the stack has in `W`."""
    if len(use.members) == 1:
        return Factors(*factors[use.members[0]])
    axes = [lead.atoms for lead in use.lead] + [(atom,) for atom in use.batch]
    place = next(index for index, atoms in enumerate(axes) if any(atom.axis < 0 for atom in atoms))
    parts = zip(*(factors[name] for name in use.members), strict=True)
    return Factors(*(jnp.stack(part, axis=place) for part in parts))


def split_loop(mask: SiteMask, length: int) -> tuple[SiteMask, SiteMask]:
    """A mask's parts that a loop of this length takes apart, and those it shares, their first axis taken off."""
    sliced = SiteMask(*(x if x is not None and x.shape[0] == length else None for x in mask))
    shared = SiteMask(*(None if x is None or x.shape[0] == length else jnp.squeeze(x, 0) for x in mask))
    return sliced, shared


def joined(first: SiteMask, second: SiteMask) -> SiteMask:
    """Each part from the one that has it."""
    return SiteMask(*(a if a is not None else b for a, b in zip(first, second, strict=True)))


def _members(uses: Sequence[Use]) -> dict[str, None]:
    return dict.fromkeys(name for use in uses for name in use.members)


def _factor_problems(site: WeightSite, factors: Mapping[str, Factors]) -> list[str]:
    if site.name not in factors:
        return [f"{site.name}: no factors; pass pdlib.Factors(V, U) under this name"]
    V, U = factors[site.name]
    found = jnp.shape(V), jnp.shape(U)
    C = found[0][-1] if found[0] else 0
    front = (*site.lead, *site.batch)
    want = (*front, site.d_in, C), (*front, C, site.d_out)
    names = (*(["lead"] * len(site.lead)), *(["batch"] * len(site.batch)))
    dims = [[*names, "d_in", "C"], [*names, "C", "d_out"]]
    return [
        f"{site.name}: {part} has shape {shape}, want ({', '.join(f'{d}={n}' for d, n in zip(dim, size, strict=True))})"
        for part, shape, size, dim in zip("VU", found, want, dims, strict=True)
        if shape != size
    ]


def _mask_problems(use: Use, mask: SiteMask, C: int) -> list[str]:
    front = (*use.loops, *use.positions)
    problems: list[str] = []
    for part, value in zip(SiteMask._fields, mask, strict=True):
        if value is None:
            continue
        want = (*front, C if part == "mask" else 1)
        shape, dtype = jnp.shape(value), jax.dtypes.result_type(value)
        fits = len(shape) <= len(want) and all(n in (1, m) for n, m in zip(shape[::-1], want[::-1], strict=False))
        if not fits:
            axes = "loops, positions" if use.loops else "positions"
            last = "C" if part == "mask" else "1"
            problems.append(
                f"{use.name}: {part} has shape {shape}, which does not broadcast to {want}, ({axes}, {last})"
            )
        if (dtype == jnp.bool_) != (part == "route"):
            problems.append(f"{use.name}: {part} is {dtype}, want {'bool' if part == 'route' else 'a real number'}")
    return problems


def _with_all_axes(use: Use, mask: SiteMask) -> SiteMask:
    rank = len(use.loops) + len(use.positions) + 1

    def full(value: Any) -> Any:
        array = jnp.asarray(value)
        return array.reshape((1,) * (rank - array.ndim) + array.shape)

    return SiteMask(*(None if value is None else full(value) for value in mask))
