"""Cuts a traced model where its live sites begin: a clean prefix for once a batch, a suffix for once a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from pdlib.errors import BatchMismatch, NoSuchSite
from pdlib.items.state import Factors
from pdlib.rewrite import jaxpr as internals
from pdlib.rewrite.replay import Live, Replay, read
from pdlib.rewrite.sites import Use
from pdlib.tree import flatten, show

Bound = Callable[[Sequence[Use], Mapping[str, Factors], Mapping[str, Any]], Live]


class Part(NamedTuple):
    """Some equations of a model, in order.

    Attributes:
        trace: the model.
        equations: their indices.
        reads: the parameters that they read, by name.
        between: what passes from the prefix to the suffix.
    """

    trace: internals.Trace
    equations: tuple[int, ...]
    reads: Mapping[str, Any]
    between: tuple[Any, ...]

    def environment(self, params: Any) -> dict[Any, Any]:
        """The values of constants and parameters, by variable."""
        flat = flatten(params)
        given = dict(zip(map(show, flat.paths), flat.leaves, strict=True))
        missing = [name for name in self.reads if name not in given]
        if missing:
            raise BatchMismatch(f"parameters {missing} are needed and not there; `params` of this part names them all")
        closed = self.trace.closed
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return env | {variable: given[name] for name, variable in self.reads.items()}


@dataclass(frozen=True, eq=False)
class Prefix:
    """`prefix(params, batch) → residuals`: what the suffix needs of the model before its live sites, frozen.

    Attributes:
        part: its equations.
        inputs: the variables of the batch's leaves.
        batch: the pytree of the batch's arguments.
    """

    part: Part
    inputs: tuple[Any, ...]
    batch: Any

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters it needs."""
        return tuple(self.part.reads)

    def __call__(self, params: Any, batch: Any) -> list[Any]:
        """Run it; `params` may be any tree that has this part's parameters."""
        leaves, structure = jax.tree.flatten(batch if type(batch) is tuple else (batch,))
        if structure != self.batch:
            raise BatchMismatch(f"the batch has the structure {structure}, the plan {self.batch}; make another plan")
        env = self.part.environment(params) | dict(zip(self.inputs, leaves, strict=True))
        Replay().equations(self.part.trace.closed.jaxpr, self.part.equations, env, Live({}, {}))
        return [env[variable] for variable in self.part.between]


@dataclass(frozen=True, eq=False)
class Suffix:
    """`suffix(params, residuals, factors, masks) → output`: equal to `Plan.masked`, from the residuals on.

    Attributes:
        part: its equations.
        uses: those of the sites that the model was split for.
        bind: checks masks and factors and keys them by use.
    """

    part: Part
    uses: tuple[Use, ...]
    bind: Bound

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters it needs."""
        return tuple(self.part.reads)

    @property
    def residuals(self) -> tuple[Any, ...]:
        """The abstract values that the prefix hands over."""
        return tuple(variable.aval for variable in self.part.between)

    def __call__(
        self, params: Any, residuals: Sequence[Any], factors: Mapping[str, Factors], masks: Mapping[str, Any]
    ) -> Any:
        """Run it; masks may name only uses of the sites that the model was split for."""
        known = [use.name for use in self.uses]
        foreign = [name for name in masks if name not in known]
        if foreign:
            raise NoSuchSite(f"{foreign} are not among the uses {known} that the model was split for; split anew")
        uses = tuple(use for use in self.uses if use.name in masks)
        env = self.part.environment(params) | dict(zip(self.part.between, residuals, strict=True))
        jaxpr = self.part.trace.closed.jaxpr
        Replay(uses).equations(jaxpr, self.part.equations, env, self.bind(uses, factors, masks))
        return jax.tree.unflatten(self.part.trace.structure, [read(env, atom) for atom in jaxpr.outvars])


def split(
    trace: internals.Trace, live: tuple[Use, ...], names: Sequence[str], structure: Any, bind: Bound
) -> tuple[Prefix, Suffix]:
    """Cut at the first live use, between equations of the outermost jaxpr.

    What depends on parameters alone (transposed weights, rotary tables, causal masks) is computed anew in the suffix:
    as a residual it would be a copy of the weights.
    """
    jaxpr = trace.closed.jaxpr
    params, inputs = jaxpr.invars[: len(names)], jaxpr.invars[len(names) :]
    after, fixed = _classify(jaxpr, {use.location[0] for use in live}, params)
    suffix, needed = _backwards(jaxpr, {*after, *fixed}, set(jaxpr.outvars) | _reads(jaxpr, after), keep=after)
    given = {*params, *jaxpr.constvars}
    made = {out for index in suffix for out in jaxpr.eqns[index].outvars}
    between = tuple(variable for variable in needed if variable not in made and variable not in given)
    prefix, before = _backwards(jaxpr, set(range(len(jaxpr.eqns))) - set(after), set(between), keep=())

    def part(equations: Sequence[int], wanted: Sequence[Any]) -> Part:
        reads = {name: variable for name, variable in zip(names, params, strict=True) if variable in set(wanted)}
        return Part(trace, tuple(equations), reads, between)

    batch = jax.tree.structure(jax.tree.unflatten(structure, [0] * structure.num_leaves)[1:])
    return Prefix(part(prefix, before), tuple(inputs), batch), Suffix(part(suffix, needed), live, bind)


def _classify(jaxpr: Any, first: set[int], params: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Equations that depend on a live use, and those that depend on neither it nor the batch."""
    downstream: set[Any] = set()
    constant = {*params, *jaxpr.constvars}
    after: list[int] = []
    fixed: list[int] = []
    for index, equation in enumerate(jaxpr.eqns):
        operands = [atom for atom in equation.invars if not internals.is_literal(atom)]
        if index in first or any(atom in downstream for atom in operands):
            after.append(index)
            downstream.update(equation.outvars)
        elif all(atom in constant for atom in operands) and not equation.effects:
            fixed.append(index)
            constant.update(equation.outvars)
    return after, fixed


def _reads(jaxpr: Any, indices: Sequence[int]) -> set[Any]:
    return {atom for index in indices for atom in jaxpr.eqns[index].invars if not internals.is_literal(atom)}


def _backwards(jaxpr: Any, allowed: set[int], wanted: set[Any], *, keep: Sequence[int]) -> tuple[list[int], list[Any]]:
    """Those of the allowed equations that wanted values need, in order, and everything that they read."""
    needed = dict.fromkeys(atom for atom in wanted if not internals.is_literal(atom))
    kept: list[int] = []
    for index in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[index]
        if index in keep or (index in allowed and any(out in needed for out in equation.outvars)):
            kept.append(index)
            needed |= dict.fromkeys(atom for atom in equation.invars if not internals.is_literal(atom))
    return kept[::-1], list(needed)
