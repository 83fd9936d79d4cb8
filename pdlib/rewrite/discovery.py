"""Follows parameters through a jaxpr to the products that consume them; reads no value and binds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pdlib.rewrite import jaxpr as internals
from pdlib.rewrite.follow import ACTIVATION, Activation, Derived, Value, Weight, derive, follow, join, parameter
from pdlib.rewrite.layout import merged
from pdlib.rewrite.products import PRODUCTS, product_of
from pdlib.rewrite.sites import Lead, Location, NamedActivation, Use


class Found(NamedTuple):
    """What a jaxpr does with its parameters.

    Attributes:
        uses: products by a weight, in program order.
        named: activations that the model named.
        consumers: parameter → primitives that consume it otherwise.
        refused: parameter → why it cannot be decomposed.
    """

    uses: tuple[Use, ...]
    named: tuple[NamedActivation, ...]
    consumers: Mapping[str, Sequence[str]]
    refused: Mapping[str, str]


class Scope(NamedTuple):
    """Where in the program a jaxpr stands."""

    location: Location = ()
    loops: tuple[int, ...] = ()
    blockers: tuple[str, ...] = ()


def discover(closed: Any, names: Sequence[str | None]) -> Found:
    """Find the uses of parameters.

    Args:
        closed: a traced model.
        names: for each of its inputs the parameter it is, None for what belongs to the batch.
    """
    inputs = closed.jaxpr.invars
    values: list[Value] = [
        ACTIVATION if name is None else parameter(name, variable.aval)
        for name, variable in zip(names, inputs, strict=True)
    ]
    walk = _Walk()
    for value in walk.jaxpr(closed.jaxpr, values, Scope()):
        walk.consumed(value, "the output")
    uses = _orient(walk.uses)
    refused = {name: "; ".join(dict.fromkeys(reasons)) for name, reasons in walk.refused.items()}
    for use in uses:
        for name in use.members if use.blockers else ():
            reasons = dict.fromkeys([*filter(None, [refused.get(name)]), *use.blockers])
            refused[name] = "; ".join(reasons)
    return Found(tuple(_numbered(uses)), tuple(_numbered(walk.named)), walk.consumers, refused)


@dataclass
class _Walk:
    """One pass over a jaxpr and those inside it, collecting what it meets."""

    uses: list[Use] = field(default_factory=list)
    named: list[NamedActivation] = field(default_factory=list)
    consumers: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: Any, values: Sequence[Value], scope: Scope) -> list[Value]:
        """Walk one jaxpr; returns what its outputs are."""
        env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Value:
            return None if internals.is_literal(atom) else env.get(atom)

        for index, equation in enumerate(jaxpr.eqns):
            inside = scope._replace(location=(*scope.location, index))
            results = self.equation(equation, [read(atom) for atom in equation.invars], inside)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, values: list[Value], scope: Scope) -> list[Value]:
        """What the outputs of one equation are, given its operands."""
        name = equation.primitive.name
        if name == "name" and not isinstance(values[0], (Weight, Derived)):
            self.named.append(NamedActivation(equation.params["name"], scope.loops, scope.location, scope.blockers))
        inner = internals.inner(equation)
        if inner:
            return self.nested(equation, inner, values, scope)
        laid_out = follow(equation, values)
        if laid_out is not None:
            return laid_out
        if name in PRODUCTS:
            result = self.product(equation, values, scope)
            if result is not None:
                return [result]
        for value in values:
            self.consumed(value, name)
        return [derive(equation, values)] * len(equation.outvars)

    def product(self, equation: Any, values: list[Value], scope: Scope) -> Value:
        """Record a product by a weight; None where this is no product by exactly one."""
        weights = [(index, value) for index, value in enumerate(values) if isinstance(value, Weight)]
        if len(weights) == 1:
            use = product_of(equation, *weights[0])
            if use is not None:
                blockers = (*use.blockers, *scope.blockers)
                self.uses.append(use._replace(loops=scope.loops, location=scope.location, blockers=blockers))
                return ACTIVATION
        if any(isinstance(value, Activation) for value in values) and not weights:
            for value in values:
                for name, how in value.origins if isinstance(value, Derived) else ():
                    self.refuse(name, f"it is computed before it is used ({how})")
        return None

    def nested(self, equation: Any, inner: Sequence[Any], values: list[Value], scope: Scope) -> list[Value]:
        """Walk the jaxprs inside an equation."""
        name = equation.primitive.name
        if name in internals.CALLS | internals.REMATS:
            return self.jaxpr(inner[0].jaxpr, values, _deeper(scope, 0))
        if name == "scan":
            return self.scan(equation, inner[0], values, scope)
        if name == "cond":
            branches = [self.jaxpr(b.jaxpr, values[1:], _deeper(scope, k)) for k, b in enumerate(inner)]
            outs = [join(outs, "cond") for outs in zip(*branches, strict=True)]
            return [ACTIVATION if out is None and values[0] is ACTIVATION else out for out in outs]
        if name == "while":
            reason = "inside a while loop, whose number of steps is not known"
            consts = equation.params["cond_nconsts"] + equation.params["body_nconsts"]
            values = [*values[:consts], *_carried(values[consts:], name, data=ACTIVATION in values)]
        elif name in internals.CUSTOM:
            reason = f"inside {name}, whose own derivative rule would be passed over"
        else:
            reason = f"inside the primitive {name!r}, which pdlib does not enter"
        blocked = scope._replace(blockers=(*scope.blockers, reason))
        for index, one in enumerate(inner):
            if one.operands is None:
                for value in values:
                    self.blocked(value, reason)
                continue
            self.jaxpr(one.jaxpr, [values[k] for k in one.operands], _deeper(blocked, index))
        return [join(values, name)] * len(equation.outvars)

    def scan(self, equation: Any, body: Any, values: list[Value], scope: Scope) -> list[Value]:
        """Walk a scan's body once: what it takes apart loses an axis, what it carries is no weight any more."""
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        length = equation.params["length"]
        first, last = consts, consts + carry
        carried = _carried(values[first:last], "scan", data=ACTIVATION in values)
        sliced: list[Value] = []
        for value in values[last:]:
            if isinstance(value, Weight):
                lead = Lead(value.dims[0], length, scope.location)
                value = replace(value, dims=value.dims[1:], lead=(*value.lead, lead), rank=value.rank - 1)
            sliced.append(value)
        inside = _deeper(scope, 0)._replace(loops=(*scope.loops, length))
        outs = self.jaxpr(body.jaxpr, [*values[:consts], *carried, *sliced], inside)
        after = [out if out is ACTIVATION else before for before, out in zip(carried, outs, strict=False)]
        return [*after, *(join([out], "scan") for out in outs[carry:])]

    def consumed(self, value: Value, primitive: str) -> None:
        """Note that a primitive reads a weight without being a product by it."""
        for member in value.members if isinstance(value, Weight) else ():
            self.consumers.setdefault(member, []).append(primitive)

    def refuse(self, name: str, reason: str) -> None:
        """Note why a parameter cannot be decomposed."""
        self.refused.setdefault(name, []).append(reason)

    def blocked(self, value: Value, reason: str) -> None:
        """Refuse every parameter that a value is or comes from."""
        found = join([value], reason)
        for name, _ in found.origins if isinstance(found, Derived) else ():
            self.refuse(name, reason)


def _deeper(scope: Scope, index: int) -> Scope:
    return scope._replace(location=(*scope.location, index))


def _carried(values: Sequence[Value], loop: str, *, data: bool) -> list[Value]:
    """What a loop carries: nothing that it passes around can be followed, so a weight becomes something derived."""
    fixed = [join([value], f"it is carried through a {loop}") for value in values]
    return [ACTIVATION if value is None and data else value for value in fixed]


def _orient(uses: Sequence[Use]) -> list[Use]:
    """Give each use the matrix of its parameter's first use, transposed or not; block one that has another."""
    first: dict[str, Use] = {}
    result: list[Use] = []
    for use in uses:
        chiefs = [first.setdefault(member, use) for member in use.members]
        matrix, seen = (use.inputs, use.outputs), {(one.inputs, one.outputs) for one in chiefs}
        if any(_axes(one) != _axes(use) for one in chiefs) or len(seen) > 1 or not seen <= {matrix, matrix[::-1]}:
            use = use._replace(blockers=(*use.blockers, "it is used as two different matrices"))
        elif matrix not in seen:
            use = use._replace(transposed=True, inputs=use.outputs, outputs=use.inputs)
        result.append(use)
    return result


def _axes(use: Use) -> list[Any]:
    return [*(merged(lead.atoms) for lead in use.lead), *((atom,) for atom in use.batch)]


def _numbered(found: Sequence[Any]) -> list[Any]:
    """Number what shares a name: `a@0`, `a@1`."""
    names = [one.name for one in found]
    seen: dict[str, int] = {}
    result: list[Any] = []
    for one in found:
        count = seen[one.name] = seen.get(one.name, -1) + 1
        result.append(one._replace(name=f"{one.name}@{count}") if names.count(one.name) > 1 else one)
    return result
