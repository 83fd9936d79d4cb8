"""What a run minimises: named terms with coefficients; knows no optimizer and no particular loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.items.state import named_key
from pdlib.method import losses
from pdlib.method.adversary import Persistent
from pdlib.method.masks import Drawn
from pdlib.method.model import Learned, Model, Pass
from pdlib.method.reconstruction import Reconstruction
from pdlib.method.schedule import Schedule

# (model, shared, key of the term and step, sources of its persistent adversary) → float32 scalar
Value = Callable[[Model, Pass, Any, Mapping[str, Drawn] | None], Array]


class Term(NamedTuple):
    """One summand of the objective.

    Attributes:
        value: a pure function; any will do.
        coefficient: its weight at each step.
        adversary: a persistent adversary that climbs the value, whatever the coefficient.
    """

    value: Value
    coefficient: Schedule
    adversary: Persistent | None = None


def faithfulness(coefficient: Schedule, *, relative: bool = False) -> Term:
    """See `losses.faithfulness` and `losses.relative_faithfulness`; float32 whatever forwards run in."""
    loss = losses.relative_faithfulness if relative else losses.faithfulness

    def value(model: Model, shared: Pass, key: Any, drawn: Any = None) -> Array:
        del key, drawn
        return loss(model.weights(shared.params), shared.learned.components)

    return Term(value, coefficient)


def minimality(
    coefficient: Schedule, frequency: Schedule | None, *, penalty: losses.Penalty, reference: float
) -> dict[str, Term]:
    """`minimality`, and with a coefficient for it `frequency`; see `losses.minimality`."""

    def part(name: str) -> Value:
        def value(model: Model, shared: Pass, key: Any, drawn: Any = None) -> Array:
            del model, key, drawn
            found = losses.minimality(shared.learned.upper, shared.step, penalty=penalty, reference=reference)
            return getattr(found, name)

        return value

    terms = {"minimality": Term(part("activity"), coefficient)}
    return terms if frequency is None else terms | {"frequency": Term(part("frequency"), frequency)}


def reconstruction(coefficient: Schedule, term: Reconstruction) -> Term:
    """A reconstruction term with its adversary, if that is a persistent one."""
    return Term(term.value, coefficient, term.adversary if isinstance(term.adversary, Persistent) else None)


def evaluate(
    terms: Mapping[str, Term],
    model: Model,
    shared: Pass,
    leaves: Mapping[str, Mapping[str, Array]],
    key: Any,
) -> tuple[Array, dict[str, Array]]:
    """What is differentiated, and the values: `total`, the weighted sum, and each term unweighted.

    The two gradients of a term with an adversary come from one backward: by what is learned times the coefficient, and
    by the leaves of its sources without it, so that an adversary climbs as well where the coefficient is 0. So for such
    a term the coefficient meets the gradient on its way to what is learned, and not the value.

    Args:
        terms: their order changes nothing.
        model: the target.
        shared: what the step computed once.
        leaves: the leaves of each persistent adversary, by term.
        key: the root of the run's draws; a term draws from (key, its name, the step).
    """
    weighted: dict[str, Array] = {}
    climbed: dict[str, Array] = {}
    values: dict[str, Array] = {}
    for name in sorted(terms):
        term, scale = terms[name], terms[name].coefficient(shared.step)
        own = jax.random.fold_in(named_key(key, name), shared.step)
        if term.adversary is None:
            value = term.value(model, shared, own, None)
            weighted[name] = scale * value
        else:
            seen = shared._replace(learned=scale_gradient(shared.learned, jnp.float32(scale)))
            value = term.value(model, seen, own, term.adversary.drawn(leaves[name], shared.positions))
            climbed[name] = value
            weighted[name] = jax.lax.stop_gradient(scale * value)
        values[name] = value
    total = jnp.sum(jnp.stack(list(weighted.values())))
    differentiated = sum(climbed.values(), total)
    return differentiated, {"total": total, **values}


@jax.custom_vjp
def scale_gradient(learned: Learned, factor: Array) -> Learned:
    """The same values; what comes back is multiplied by the factor."""
    del factor
    return learned


def _scale_forward(learned: Learned, factor: Array) -> tuple[Learned, Array]:
    return learned, factor


def _scale_backward(factor: Array, gradient: Learned) -> tuple[Learned, Array]:
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradient), jnp.zeros_like(factor)


scale_gradient.defvjp(_scale_forward, _scale_backward)
