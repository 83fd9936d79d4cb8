"""What a plan finds: uses of weights, sites, named activations; and their selection by glob. Traces nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pdlib.errors import NoSuchSite, SiteRefused
from pdlib.rewrite.layout import STACK, Atom, Atoms, Dims, arrange, runs, size_of

Location = tuple[int, ...]


class Lead(NamedTuple):
    """An axis of a weight that a scan takes apart."""

    atoms: Atoms
    length: int
    scan: Location


class Use(NamedTuple):
    """One equation that multiplies by a weight.

    Attributes:
        name: the site's name, with `@0`, `@1` … where it has several uses, and `a|b` where parameters were stacked.
        members: the parameters; several where they were stacked.
        kind: `dot`, `conv` or `gather`.
        transposed: whether it multiplies by the transpose of the site's matrix.
        loops: lengths of the scans around it, outermost first: leading axes of masks and taps.
        positions: the axes over which a mask may vary: batch axes of the weight, then those of the activation.
        location, operand, dims, lead, batch, inputs, outputs: where the equation is, and how the weight lies in it.
        blockers: why it cannot be decomposed; empty for most.
    """

    name: str
    members: tuple[str, ...]
    kind: str
    transposed: bool
    loops: tuple[int, ...]
    positions: tuple[int, ...]
    location: Location
    operand: int
    dims: Dims
    lead: tuple[Lead, ...]
    batch: Atoms
    inputs: Atoms
    outputs: Atoms
    blockers: tuple[str, ...] = ()

    @property
    def factors(self) -> str:
        """A name for the factors it takes: uses of one weight, sliced by the same scans, share them."""
        return " ".join(["|".join(self.members), *(str(lead.scan) for lead in self.lead)])


class NamedActivation(NamedTuple):
    """A value that the model marked with `jax.ad_checkpoint.checkpoint_name`."""

    name: str
    loops: tuple[int, ...]
    location: Location
    blockers: tuple[str, ...] = ()


class WeightSite(NamedTuple):
    """A weight matrix of a model that can be decomposed: `W[*lead, *batch, d_in, d_out]`.

    Attributes:
        name: the parameter's path, module/parameter.
        d_in, d_out: the sizes of the matrix; a first use as x W fixes what is in and what is out.
        lead: the lengths of the loops that take it apart, one matrix each.
        batch: further axes with one matrix each, such as experts.
        uses: each multiplies by it, and has a mask of its own.
        also: primitives that consume it otherwise; they see the frozen weight.
        shape: of the parameter.
    """

    name: str
    d_in: int
    d_out: int
    lead: tuple[int, ...]
    batch: tuple[int, ...]
    uses: tuple[Use, ...]
    also: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        """How it is used, as `dot`, `gather+dot^T` …, in the order of its uses."""
        kinds = [f"{use.kind}^T" if use.transposed else use.kind for use in self.uses]
        return "+".join(dict.fromkeys(kinds))

    @property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """For each use the shape of a mask without its last axis, C: loops, then positions."""
        return {use.name: (*use.loops, *use.positions) for use in self.uses}

    def matrix(self, weight: Any) -> Any:
        """The parameter as `W[*lead, *batch, d_in, d_out]`."""
        return arrange(weight, *self._layouts())

    def parameter(self, matrix: Any) -> Any:
        """The inverse of `matrix`: `W[*lead, *batch, d_in, d_out]` in the parameter's own layout."""
        have, want = self._layouts()
        return arrange(matrix, want, have).reshape(self.shape)

    def _layouts(self) -> tuple[list[Atoms], list[Atoms]]:
        use = self.uses[0]
        lead = [one.atoms for one in use.lead if not _stacked(one.atoms)]
        want = [*lead, *(tuple(run) for run in runs(use.batch) if not _stacked(run)), use.inputs, use.outputs]
        fine = sorted((atom for dim in want for atom in dim), key=lambda atom: (atom.axis, -atom.stride))
        have = [tuple(atom for atom in fine if atom.axis == axis) for axis in range(len(self.shape))]
        return have, want


class Tap(NamedTuple):
    """Activations at one use in a forward, or one named activation.

    Attributes:
        input: what meets the weight: `[*loops, *positions, d_in]` for a dot; the image of a conv and the indices of a
            gather as they are. None for a named activation.
        output: the product `[*loops, *positions, d_out]`, a bias not yet added; or the named activation.
    """

    input: Any
    output: Any


def matches(pattern: str, name: str) -> bool:
    """Whether a glob fits a parameter's path, its module, or the name of a use of it."""
    module = name.rpartition("/")[0]
    return fnmatchcase(name, pattern) or fnmatchcase(module, pattern)


def select(
    patterns: str | Sequence[str],
    *,
    sites: Mapping[str, WeightSite],
    refused: Mapping[str, str],
    others: Mapping[str, Sequence[str]],
) -> dict[str, WeightSite]:
    """The sites that globs name, in the order of the model's parameters; `!glob` leaves out.

    Args:
        patterns: one or several.
        sites: by name.
        refused: name → reason, for weights that cannot be decomposed.
        others: the parameters that multiply nothing → primitives that consume them.

    Raises:
        NoSuchSite: a glob matches no parameter, or there is none.
        SiteRefused: a glob matches a weight that cannot be decomposed, or only parameters that multiply nothing.
    """
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    wanted, unwanted = [g for g in globs if not g.startswith("!")], [g[1:] for g in globs if g.startswith("!")]
    if not wanted:
        raise NoSuchSite(f"no glob says which sites to decompose; pass globs such as {_some(sites)}")
    names = [*sites, *refused, *others]
    missing = [g for g in wanted + unwanted if not any(matches(g, name) for name in names)]
    if missing:
        raise NoSuchSite("\n".join(no_such("site", g, [*sites, *refused]) for g in missing))
    hits = {name for name in names for g in wanted if matches(g, name)}
    hits -= {name for name in names for g in unwanted if matches(g, name)}
    problems = {name: reason for name, reason in refused.items() if name in hits}
    for glob in wanted:
        found = [name for name in names if matches(glob, name)]
        if not any(name in sites or name in refused for name in found):
            problems |= {name: f"it multiplies nothing: {_consumers(others[name])}" for name in found}
    if problems:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in problems.items())
        raise SiteRefused(
            f"{len(problems)} of the selected weights cannot be decomposed\n{lines}\n"
            f"Leave them out, e.g. by the glob {'!' + next(iter(problems))!r}; other sites are not affected."
        )
    found = {name: site for name, site in sites.items() if name in hits}
    if not found:
        raise NoSuchSite(f"globs {globs} leave no site; drop one that starts with '!'")
    return found


def no_such(what: str, wanted: str, names: Iterable[str]) -> str:
    """What to say of a name that is not there: the near ones, or some."""
    known = sorted({*names, *(name.rpartition("/")[0] for name in names)} - {""})
    near = difflib.get_close_matches(wanted.strip("*!"), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {_some(known)}"
    return f"no {what} matches {wanted!r}; {hint}"


def _stacked(atoms: Iterable[Atom]) -> bool:
    return any(atom.axis == STACK for atom in atoms)


def _some(names: Iterable[str]) -> str:
    shown = list(names)[:6]
    return ", ".join(map(repr, shown)) if shown else "none"


def _consumers(primitives: Sequence[str]) -> str:
    return f"consumed by {', '.join(dict.fromkeys(primitives))}" if primitives else "nothing consumes it"


def site_of(name: str, shape: tuple[int, ...], uses: Sequence[Use], also: Sequence[str]) -> WeightSite:
    """The site that its uses describe."""
    use = uses[0]
    d_in, d_out = size_of(use.inputs), size_of(use.outputs)
    lead = tuple(one.length for one in use.lead if not _stacked(one.atoms))
    batch = tuple(size_of(run) for run in runs(use.batch) if not _stacked(run))
    return WeightSite(name, d_in, d_out, lead, batch, tuple(uses), tuple(dict.fromkeys(also)), shape)
