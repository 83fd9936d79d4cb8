"""Sources that climb a loss: projected gradient ascent, afresh in each forward or kept from step to step.

Knows no model: a loss is a function of sources. Its gradient is a mean over the batch wherever a source is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.errors import ContractError
from pdlib.items.state import named_key
from pdlib.method.masks import Drawn
from pdlib.method.schedule import Schedule

Sources = dict[str, Array]  # `[*scope, C + 1]` of each site, the last channel for δ
Loss = Callable[[Mapping[str, Drawn]], Array]
_BETA, _EPSILON = (0.5, 0.99), 1e-8


class Scope(NamedTuple):
    """Who shares a source: `c` all elements and positions, `bc` all positions, `sc` all elements, `bsc` nobody, and
    `nsc` every `period`-th element; on inputs without positions `c`, `bc` and `nsc` are left."""

    kind: Literal["c", "bc", "sc", "bsc", "nsc"]
    period: int = 1

    def shape(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """The leading axes of a source for activations of these positions, `(batch, …)`.

        Raises:
            ContractError: there are no positions to differ at, or `period` does not divide the batch.
        """
        batch, rest = positions[0], positions[1:]
        if self.kind in ("sc", "bsc") and not rest:
            raise ContractError(f"scope {self.kind!r} needs activations with positions, these have {positions}; use bc")
        if self.kind == "nsc" and batch % self.period:
            raise ContractError(f"{self.period} sources do not divide a batch of {batch}; change one of them")
        front = {"c": 1, "bc": batch, "sc": 1, "bsc": batch, "nsc": self.period}[self.kind]
        return (front, *(rest if "s" in self.kind else (1,) * len(rest)))


class Fresh(NamedTuple):
    """An adversary that starts anew in each forward: U[0, 1], then `steps` of `rate · sign(gradient)`, clamped."""

    scope: Scope
    steps: int
    rate: float


class Persistent(NamedTuple):
    """An adversary whose sources survive from step to step, in `TrainingItem.adversaries`.

    Attributes:
        scope: who shares a source.
        rate: the learning rate; it moves once a training step.
        ascents: how many, before the one that goes with the update.
        ascent: Adam (β 0.5 and 0.99, ε 1e-8 outside the root, bias-corrected) or the sign of the gradient.
        sigmoid: keep unbounded values from N(0, 1), whose sigmoid is the source, in place of clamped ones from U[0, 1].
        dtype: how sources are kept; moments are float32.
    """

    scope: Scope
    rate: Schedule
    ascents: int = 0
    ascent: Literal["adam", "sign"] = "adam"
    sigmoid: bool = False
    dtype: Any = jnp.float32

    def init(self, key: Any, positions: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]) -> dict[str, Any]:
        """The adversary before step 0.

        Args:
            key: a typed PRNG key.
            positions: `(batch, …)` of each site.
            counts: C of each site.

        Returns:
            `sources`, and with Adam `m`, `v` and the float32 counter `count` of its ascents.
        """
        draw = jax.random.normal if self.sigmoid else jax.random.uniform
        sources = {
            site: draw(named_key(key, site), (*self.scope.shape(positions[site]), C + 1), jnp.float32)
            for site, C in counts.items()
        }
        kept = {site: value.astype(self.dtype) for site, value in sources.items()}
        if self.ascent == "sign":
            return {"sources": kept}
        m, v = ({site: jnp.zeros_like(value) for site, value in sources.items()} for _ in "mv")  # buffers to donate
        return {"sources": kept, "m": m, "v": v, "count": jnp.float32(0)}

    def leaves(self, adversary: Mapping[str, Any]) -> Sources:
        """The kept values in float32: what a gradient is taken for."""
        return {site: value.astype(jnp.float32) for site, value in adversary["sources"].items()}

    def drawn(self, leaves: Mapping[str, Array], positions: Mapping[str, tuple[int, ...]]) -> dict[str, Drawn]:
        """The sources for activations of these positions."""
        return spread(jax.tree.map(jax.nn.sigmoid, leaves) if self.sigmoid else leaves, self.scope, positions)

    def climb(self, adversary: Mapping[str, Any], gradient: Mapping[str, Array], step: Any) -> dict[str, Any]:
        """The adversary after one ascent with the gradient of its loss by its leaves."""
        rate, kept = self.rate(step), self.leaves(adversary)
        if self.ascent == "sign":
            moved = {site: value + rate * jnp.sign(gradient[site]) for site, value in kept.items()}
            return {"sources": self._stored(moved)}
        count = adversary["count"] + 1
        m = {site: _BETA[0] * old + (1 - _BETA[0]) * gradient[site] for site, old in adversary["m"].items()}
        v = {site: _BETA[1] * old + (1 - _BETA[1]) * gradient[site] ** 2 for site, old in adversary["v"].items()}
        first, second = 1 - _BETA[0] ** count, 1 - _BETA[1] ** count
        moved = {
            site: value + rate * (m[site] / first) / (jnp.sqrt(v[site] / second) + _EPSILON)
            for site, value in kept.items()
        }
        return {"sources": self._stored(moved), "m": m, "v": v, "count": count}

    def _stored(self, moved: Mapping[str, Array]) -> Sources:
        return {s: (x if self.sigmoid else jnp.clip(x, 0, 1)).astype(self.dtype) for s, x in moved.items()}


def spread(sources: Mapping[str, Array], scope: Scope, positions: Mapping[str, tuple[int, ...]]) -> dict[str, Drawn]:
    """Sources with sizes of one where they are shared; with `nsc` element b has the source `b mod period`."""
    found: dict[str, Drawn] = {}
    for site, source in sources.items():
        if scope.kind == "nsc":
            source = jnp.tile(source, (positions[site][0] // scope.period, *(1,) * (source.ndim - 1)))
        found[site] = Drawn(source[..., :-1], source[..., -1:])
    return found


def attack(
    loss: Loss, fresh: Fresh, key: Any, positions: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]
) -> dict[str, Drawn]:
    """The sources that a fresh adversary finds against a loss, which has to close over detached values only."""
    sources = {
        site: jax.random.uniform(named_key(key, site), (*fresh.scope.shape(positions[site]), C + 1))
        for site, C in counts.items()
    }
    gradient_of = jax.grad(lambda leaves: loss(spread(leaves, fresh.scope, positions)))

    def ascend(_: Any, leaves: Sources) -> Sources:
        gradient = gradient_of(leaves)
        return {site: jnp.clip(x + fresh.rate * jnp.sign(gradient[site]), 0, 1) for site, x in leaves.items()}

    found = jax.lax.fori_loop(0, fresh.steps, ascend, sources)
    return spread(jax.lax.stop_gradient(found), fresh.scope, positions)
