"""Reconstruction terms as data: which sites run decomposed in which forward, where, and by which sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.items.state import named_key
from pdlib.method.adversary import Fresh, Persistent, attack
from pdlib.method.masks import Drawn, Source, either, masked_by, uniform
from pdlib.method.model import Model, Pass
from pdlib.method.routing import Router, everywhere

Live = tuple[str, ...]  # the sites that one forward runs decomposed
LivePlan = Callable[[Sequence[str]], tuple[Live, ...]]  # all sites → one forward each


def all_sites(sites: Sequence[str]) -> tuple[Live, ...]:
    """One forward with every site live."""
    return (tuple(sites),)


def layerwise(sites: Sequence[str]) -> tuple[Live, ...]:
    """One forward a site."""
    return tuple((site,) for site in sites)


def groups(size: int) -> LivePlan:
    """One forward for each `size` sites in their order; the last group may be smaller."""
    return lambda sites: tuple(tuple(sites[i : i + size]) for i in range(0, len(sites), size))


class Reconstruction(NamedTuple):
    """A term whose value is the mean over its forwards of the loss against the clean output.

    Attributes:
        plan: the live sites of each forward.
        route: where they run decomposed.
        source: what masks are made of.
        adversary: in place of `source`; a persistent one is stepped with the term.
        fraction: with an adversary: each element of the batch is its own with this probability, routed everywhere, and
            else takes `source` and `route`.
    """

    plan: tuple[Live, ...]
    route: Router = everywhere
    source: Source = uniform
    adversary: Fresh | Persistent | None = None
    fraction: float | None = None

    def value(self, model: Model, shared: Pass, key: Any, drawn: Mapping[str, Drawn] | None = None) -> Array:
        """The term's value.

        Args:
            model: the target.
            shared: what the step computed once.
            key: of this term and step.
            drawn: the sources of a persistent adversary.
        """
        keys = [named_key(key, "+".join(sorted(live))) for live in self.plan]
        values = [self._forward(model, shared, own, live, drawn) for own, live in zip(keys, self.plan, strict=True)]
        return jnp.mean(jnp.stack(values))

    def _forward(self, model: Model, shared: Pass, key: Any, live: Live, drawn: Mapping[str, Drawn] | None) -> Array:
        positions, lower = shared.positions, shared.learned.lower
        routes = self.route(named_key(key, "route"), {site: positions[site] for site in live})
        chosen = _chosen(named_key(key, "fraction"), self.fraction, {site: positions[site] for site in live})
        if self.adversary is None or self.fraction is not None:
            ordinary = {site: self.source(named_key(key, f"source/{site}"), lower[site]) for site in live}
        else:
            ordinary = {}

        def loss(shared: Pass, hostile: Mapping[str, Drawn]) -> Array:
            masks: dict[str, Any] = {}
            for site in live:
                route = routes.get(site)
                if site in chosen:
                    source = either(chosen[site], hostile[site], ordinary[site])
                    route = None if route is None else chosen[site] | route
                else:
                    source = (hostile if self.adversary is not None else ordinary)[site]
                masks[site] = masked_by(shared.learned.lower[site], source, route)
            return reconstruct(model, shared, masks)

        if isinstance(self.adversary, Fresh):
            detached, counts = jax.lax.stop_gradient(shared), shared.counts

            def against(hostile: Mapping[str, Drawn]) -> Array:
                return loss(detached, hostile)

            place = {site: positions[site] for site in live}
            drawn = attack(against, self.adversary, named_key(key, "attack"), place, {s: counts[s] for s in live})
        return loss(shared, drawn or {})


def reconstruct(model: Model, shared: Pass, masks: Mapping[str, Any]) -> Array:
    """The loss of one masked forward against the clean output."""
    out = model.masked(shared.frozen, shared.learned.compute, masks, shared.clean.residuals)
    return model.loss(out, shared.clean.output)


def worst_case(model: Model, shared: Pass, drawn: Mapping[str, Drawn]) -> Array:
    """The loss with all sites live everywhere under these sources: what warm-up ascents climb."""
    masks = {site: masked_by(lower, drawn[site]) for site, lower in shared.learned.lower.items()}
    return reconstruct(model, shared, masks)


def _chosen(key: Any, fraction: float | None, positions: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Which elements of the batch are the adversary's, `[batch, 1, …, 1]`, the same for every site."""
    if fraction is None:
        return {}
    batch = next(iter(positions.values()))[0]
    chosen = jax.random.bernoulli(key, fraction, (batch,))
    return {site: chosen.reshape(batch, *(1,) * len(shape)) for site, shape in positions.items()}
