"""How one model is decomposed on batches of one shape: its sites, its clean and masked forwards; trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from pdlib.errors import BatchMismatch, NameCollision, NoSuchSite, SiteRefused
from pdlib.items.state import Factors
from pdlib.rewrite import jaxpr as internals
from pdlib.rewrite.discovery import Found, discover
from pdlib.rewrite.masks import SiteMask, as_mask, fit, stacked
from pdlib.rewrite.replay import Live, Replay
from pdlib.rewrite.sites import Tap, Use, WeightSite, matches, no_such, select, site_of
from pdlib.rewrite.split import Prefix, Suffix, split
from pdlib.tree import flatten, show


@dataclass(frozen=True, eq=False)
class Plan:
    """A traced model: made by `Target.plan`, for batches of the shapes that it was traced with.

    Attributes:
        trace: the jaxpr of `apply(params, *batch)`.
        found: what it does with the parameters.
        names: the parameters' paths, in the order of their leaves.
        structure: the pytree of `(params, *batch)`.
    """

    trace: internals.Trace
    found: Found
    names: tuple[str, ...]
    structure: Any

    def __repr__(self) -> str:
        return f"Plan({len(self.all_sites)} sites, {len(self.found.refused)} refused)"

    @cached_property
    def all_sites(self) -> dict[str, WeightSite]:
        """Every site that can be decomposed."""
        shapes = {name: tuple(aval.shape) for name, aval in zip(self.names, self.trace.avals, strict=False)}
        result: dict[str, WeightSite] = {}
        for name in self.names:
            uses = [use for use in self.found.uses if name in use.members]
            if uses and name not in self.found.refused:
                result[name] = site_of(name, shapes[name], uses, self.found.consumers.get(name, ()))
        return result

    @property
    def refused(self) -> dict[str, str]:
        """Weights that cannot be decomposed, each with its reason."""
        return dict(self.found.refused)

    def sites(self, globs: str | Sequence[str]) -> dict[str, WeightSite]:
        """The sites that globs name, on a parameter's path or its module; `!glob` leaves out.

        Raises:
            NoSuchSite: a glob matches no parameter.
            SiteRefused: a glob matches a weight that cannot be decomposed; names each with its reason.
        """
        sites, refused = self.all_sites, self.found.refused
        others = {n: self.found.consumers.get(n, ()) for n in self.names if n not in sites and n not in refused}
        return select(globs, sites=sites, refused=refused, others=others)

    def matrices(self, params: Any) -> dict[str, Any]:
        """`W[*lead, *batch, d_in, d_out]` of every site."""
        leaves = dict(zip(self.names, jax.tree.leaves(params), strict=True))
        return {name: site.matrix(leaves[name]) for name, site in self.all_sites.items()}

    def clean(self, params: Any, batch: Any, taps: str | Sequence[str] = ()) -> tuple[Any, dict[str, Tap]]:
        """The frozen forward, and activations on the way.

        Args:
            params: of the shapes that the plan was made for.
            batch: the same.
            taps: globs on sites, uses, or names that the model gave with `checkpoint_name`.

        Returns:
            What the model returns, and a `Tap` of each use or named activation, by name.

        Raises:
            NoSuchSite: a glob matches nothing.
            SiteRefused: it matches a place that cannot be entered.
            BatchMismatch: the plan is for other shapes.
        """
        uses, named = self._tapped([taps] if isinstance(taps, str) else taps)
        replay = Replay(uses, named, frozenset(use.name for use in uses))
        return self._run(replay, params, batch, Live({}, {}))

    def masked(
        self, params: Any, factors: Mapping[str, Factors], masks: Mapping[str, SiteMask | Mapping[str, Any]], batch: Any
    ) -> Any:
        """The forward with the uses that have a mask decomposed, and all others frozen.

        Args:
            params: of the shapes that the plan was made for.
            factors: `V[*lead, *batch, d_in, C]`, `U[*lead, *batch, C, d_out]` of each site with a mask, by its name.
            masks: by the name of a use: `mask[*loops, *positions, C]`, and `delta` and `route` with 1 for C, each of
                which may be left out; see `SiteMask`.
            batch: as for `clean`.

        Raises:
            NoSuchSite: a mask is for no use of the model.
            SiteRefused: it is for one that cannot be decomposed.
            MaskMismatch: masks or factors do not fit; lists all that do not.
            BatchMismatch: the plan is for other shapes.
        """
        uses = self._live(masks)
        return self._run(Replay(uses), params, batch, self._bound(uses, factors, masks))[0]

    def split(self, live_sites: str | Sequence[str]) -> tuple[Prefix, Suffix]:
        """Cut the model before the first use of the live sites: the clean part, and what depends on their masks.

        Returns:
            `prefix(params, batch) → residuals`, to run once a batch, and
            `suffix(params, residuals, factors, masks) → output`, once a mask. The `params` of each names the
            parameters it needs: it takes any tree that has them. Loops are not cut.

        Raises:
            NoSuchSite, SiteRefused: as `sites`.
        """
        chosen = self.sites(live_sites)
        live = tuple(use for use in self.found.uses if any(member in chosen for member in use.members))
        return split(self.trace, live, self.names, self.structure, self._bound)

    def _live(self, masks: Mapping[str, Any]) -> tuple[Use, ...]:
        known = {use.name: use for use in self.found.uses}
        unknown = [name for name in masks if name not in known]
        if unknown:
            lines = [self._unknown_use(name, known) for name in unknown]
            raise NoSuchSite("\n".join(lines))
        self._usable([known[name] for name in masks])
        return tuple(use for use in self.found.uses if use.name in masks)

    def _unknown_use(self, name: str, known: Mapping[str, Use]) -> str:
        uses = [use.name for use in known.values() if name in use.members]
        if uses:
            return f"{name!r} has {len(uses)} uses; give each its mask: {', '.join(map(repr, uses))}"
        return no_such("use", name, known)

    def _usable(self, places: Sequence[Any]) -> None:
        problems: dict[str, str] = {}
        for place in places:
            members = place.members if isinstance(place, Use) else ()
            reasons = [*place.blockers, *(self.found.refused[name] for name in members if name in self.found.refused)]
            if reasons:
                problems[place.name] = "; ".join(dict.fromkeys(reasons))
        if problems:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in problems.items())
            raise SiteRefused(f"{len(problems)} places cannot be entered\n{lines}\nLeave them out of masks and taps.")

    def _tapped(self, globs: Sequence[str]) -> tuple[tuple[Use, ...], tuple[Any, ...]]:
        def hit(glob: str, name: str, members: Sequence[str] = ()) -> bool:
            return any(matches(glob, one) for one in (name, *members))

        uses = [use for use in self.found.uses if any(hit(glob, use.name, use.members) for glob in globs)]
        named = [one for one in self.found.named if any(hit(glob, one.name) for glob in globs)]
        everything = [*((u.name, u.members) for u in self.found.uses), *((n.name, ()) for n in self.found.named)]
        missing = [glob for glob in globs if not any(hit(glob, name, members) for name, members in everything)]
        if missing:
            raise NoSuchSite(
                "\n".join(no_such("use or named activation", g, [n for n, _ in everything]) for g in missing)
            )
        self._usable([*uses, *named])
        return tuple(uses), tuple(named)

    def _bound(self, uses: Sequence[Use], factors: Mapping[str, Factors], masks: Mapping[str, Any]) -> Live:
        """Masks and factors, checked and keyed by use."""
        given = {name: as_mask(name, mask) for name, mask in masks.items()}
        fitted = fit(uses, given, factors, self.all_sites)
        return Live({use.factors: stacked(use, factors) for use in uses}, fitted)

    def _run(self, replay: Replay, params: Any, batch: Any, live: Live) -> Any:
        leaves = _checked(self, params, batch)
        closed = self.trace.closed
        outs, taps = replay.jaxpr(closed.jaxpr, closed.consts, leaves, live)
        return jax.tree.unflatten(self.trace.structure, outs), taps


def make_plan(apply: Callable[..., Any], params: Any, batch: Any) -> Plan:
    """Trace `apply(params, *batch)` on shapes and dtypes, and find what it does with its parameters.

    Args:
        apply: a function of JAX arrays; arguments that choose its program, such as `is_training`, belong in a closure.
        params: a pytree, concrete or abstract.
        batch: one argument, or a tuple of several.
    """
    arguments = arguments_of(batch)
    flat = flatten(params)
    names = tuple(map(show, flat.paths))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise NameCollision(f"several parameters would be the site {', '.join(twice)}; rename a module or parameter")
    structure = jax.tree.structure((params, *arguments))
    trace = internals.trace(apply, params, *arguments)
    found = discover(trace.closed, [*names, *[None] * (structure.num_leaves - len(names))])
    return Plan(trace, found, names, structure)


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments: a plain tuple is several, anything else one."""
    return batch if type(batch) is tuple else (batch,)


def _checked(plan: Plan, params: Any, batch: Any) -> list[Any]:
    """The leaves of parameters and batch, held to what the plan was made for."""
    tree = (params, *arguments_of(batch))
    leaves, structure = jax.tree.flatten(tree)
    hint = "make a plan for them with target.plan(batch)"
    if structure != plan.structure:
        raise BatchMismatch(f"parameters and batch have the structure {structure}, the plan {plan.structure}; {hint}")
    problems: list[str] = []
    for keys, leaf, aval in zip(flatten(tree).paths, leaves, plan.trace.avals, strict=True):
        found = jax.typeof(leaf)
        if (found.shape, found.dtype) != (aval.shape, aval.dtype):
            where = (
                show(keys[1:]) if keys[0] == "0" else f"batch[{int(keys[0]) - 1}]{''.join(f'/{k}' for k in keys[1:])}"
            )
            problems.append(f"  {where}: {found.str_short()}, the plan has {aval.str_short()}")
    if problems:
        raise BatchMismatch(
            "parameters or batch differ from the plan\n" + "\n".join([*problems, f"{hint[:1].upper()}{hint[1:]}."])
        )
    return leaves
