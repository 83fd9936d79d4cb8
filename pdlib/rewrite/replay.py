"""Evaluates a jaxpr again with some of its products decomposed and some of its values tapped; finds no site itself.

An equation with neither inside is bound as it was, so that its custom derivatives, name and source line stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdlib.items.state import Factors
from pdlib.rewrite import jaxpr as internals
from pdlib.rewrite.forward import site_forward
from pdlib.rewrite.masks import SiteMask, joined, split_loop
from pdlib.rewrite.sites import Location, NamedActivation, Tap, Use
from pdlib.rewrite.taps import tap_of

Taps = dict[str, Tap]


class Live(NamedTuple):
    """What the uses of one forward need, as a pytree.

    Attributes:
        factors: by `Use.factors`.
        masks: by the use's name; a use without one is frozen.
    """

    factors: Mapping[str, Factors]
    masks: Mapping[str, SiteMask]


@dataclass(frozen=True)
class Replay:
    """The places in a jaxpr where a forward differs from the frozen one.

    Attributes:
        uses: live ones and tapped ones.
        named: tapped activations that the model named.
        tapped: names of uses whose activations are wanted.
    """

    uses: tuple[Use, ...] = ()
    named: tuple[NamedActivation, ...] = ()
    tapped: frozenset[str] = frozenset()

    @cached_property
    def places(self) -> dict[Location, Use | NamedActivation]:
        """Equations to replace or tap."""
        return {one.location: one for one in (*self.uses, *self.named)}

    @cached_property
    def entered(self) -> frozenset[Location]:
        """Every prefix of a place: equations, and jaxprs in them, that are opened."""
        return frozenset(place[:depth] for place in self.places for depth in range(1, len(place)))

    def jaxpr(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], live: Live, *, location: Location = ()
    ) -> tuple[list[Any], Taps]:
        """Evaluate a jaxpr; returns its outputs, and what was tapped in it."""
        env = {**dict(zip(jaxpr.constvars, consts, strict=True)), **dict(zip(jaxpr.invars, arguments, strict=True))}
        taps = self.equations(jaxpr, range(len(jaxpr.eqns)), env, live, location=location)
        return [read(env, atom) for atom in jaxpr.outvars], taps

    def equations(
        self, jaxpr: Any, indices: Sequence[int], env: dict[Any, Any], live: Live, *, location: Location = ()
    ) -> Taps:
        """Evaluate some equations of a jaxpr in `env`, which they extend; returns what was tapped."""
        taps: Taps = {}
        for index in indices:
            equation, place = jaxpr.eqns[index], (*location, index)
            operands = [read(env, atom) for atom in equation.invars]
            with internals.context(equation):
                if place in self.places:
                    outs = [self._place(equation, operands, self.places[place], live, taps)]
                elif place in self.entered:
                    outs, found = self._enter(equation, operands, place, live)
                    taps |= found
                else:
                    outs = internals.bind(equation, operands)
            env.update(zip(equation.outvars, outs, strict=True))
        return taps

    def _place(self, equation: Any, operands: list[Any], place: Use | NamedActivation, live: Live, taps: Taps) -> Any:
        if isinstance(place, Use) and place.name in live.masks:
            factors, mask = live.factors[place.factors], live.masks[place.name]
            out = site_forward(equation, operands, place, factors, mask)
        else:
            (out,) = internals.bind(equation, operands)
        if isinstance(place, NamedActivation):
            taps[place.name] = Tap(None, out)
        elif place.name in self.tapped:
            taps[place.name] = tap_of(equation, operands, place, out)
        return out

    def _enter(self, equation: Any, operands: list[Any], place: Location, live: Live) -> tuple[list[Any], Taps]:
        name, inner = equation.primitive.name, internals.inner(equation)
        if name == "scan":
            return self._scan(equation, inner[0], operands, place, live)
        if name == "cond":
            return self._cond(inner, operands, place, live)
        body, params = inner[0], equation.params

        def run(operands: Sequence[Any], live: Live) -> tuple[list[Any], Taps]:
            return self.jaxpr(body.jaxpr, body.consts, operands, live, location=(*place, 0))

        if name in internals.REMATS:
            return internals.remat(equation, run)(operands, live)
        outs, taps = run(internals.constrain(operands, params.get("in_shardings")), live)
        return internals.constrain(outs, params.get("out_shardings")), taps

    def _cond(
        self, branches: Sequence[Any], operands: list[Any], place: Location, live: Live
    ) -> tuple[list[Any], Taps]:
        def branch(index: int) -> Any:
            body = branches[index]
            return lambda *values: self.jaxpr(body.jaxpr, body.consts, values, live, location=(*place, index))

        runs = [branch(index) for index in range(len(branches))]
        shapes: dict[str, Any] = {}
        for run in runs:
            shapes |= jax.eval_shape(run, *operands[1:])[1]

        def with_all_taps(run: Any) -> Any:
            """Zeros for what is tapped in the branches that are not taken."""

            def wrapped(*values: Any) -> tuple[list[Any], Taps]:
                outs, taps = run(*values)
                zeros = {name: jax.tree.map(_zeros, shape) for name, shape in shapes.items() if name not in taps}
                return outs, {name: (taps | zeros)[name] for name in shapes}

            return wrapped

        return jax.lax.switch(operands[0], [with_all_taps(run) for run in runs], *operands[1:])

    def _scan(
        self, equation: Any, body: Any, operands: list[Any], place: Location, live: Live
    ) -> tuple[list[Any], Taps]:
        consts, count = equation.params["num_consts"], equation.params["num_carry"]
        carry, xs = operands[consts : consts + count], operands[consts + count :]
        inside = [use for use in self.uses if use.location[: len(place)] == place and use.name in live.masks]
        sliced = {use.factors for use in inside if any(lead.scan == place for lead in use.lead)}
        halves = {use.name: split_loop(live.masks[use.name], equation.params["length"]) for use in inside}
        taken_apart = Live(
            {name: live.factors[name] for name in sliced}, {name: mask for name, (mask, _) in halves.items()}
        )

        def step(carry: Any, slices: Any) -> Any:
            xs, now = slices
            masks = {name: joined(now.masks[name], shared) for name, (_, shared) in halves.items()}
            outs, taps = self.jaxpr(
                body.jaxpr,
                body.consts,
                [*operands[:consts], *carry, *xs],
                Live({**live.factors, **now.factors}, masks),
                location=(*place, 0),
            )
            return outs[:count], (outs[count:], taps)

        carry, (ys, taps) = internals.scan(equation, step, carry, (xs, taken_apart))
        return [*carry, *ys], taps


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of an operand."""
    return atom.val if internals.is_literal(atom) else env[atom]


def _zeros(shape: jax.ShapeDtypeStruct) -> Any:
    return jnp.zeros(shape.shape, shape.dtype)
