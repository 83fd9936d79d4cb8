"""What the method asks of a frozen target, and what one step computes of it once for all terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.errors import ContractError
from pdlib.items.state import Decomposition, Factors
from pdlib.method.importance import ImportanceFn, is_buffer, lower_squash, upper_squash
from pdlib.rewrite.masks import SiteMask
from pdlib.rewrite.plan import Plan


class Clean(NamedTuple):
    """The frozen forward on one batch.

    Attributes:
        output: what the model returns.
        taps: what the importance function sees: the input of each site, and named activations.
        residuals: what a masked forward needs of the model before its first live site.
    """

    output: Any
    taps: dict[str, Array]
    residuals: Any


class Model(NamedTuple):
    """A frozen target as the method sees it; its parameters are arguments, so that no program holds them.

    Attributes:
        clean: `(params, batch) → Clean`.
        masked: `(params, components, masks, residuals) → output`; sites without a mask run frozen.
        weights: `params → W[d_in, d_out]` of each site.
        loss: `(output, clean output) → float32 scalar`, a mean over elements and positions.
    """

    clean: Callable[[Any, Any], Clean]
    masked: Callable[[Any, Mapping[str, Factors], Mapping[str, SiteMask], Any], Any]
    weights: Callable[[Any], dict[str, Array]]
    loss: Callable[[Any, Any], Array]


class Learned(NamedTuple):
    """What of a step depends on the product: a gradient by it is pulled back to V, U and the importance function.

    Attributes:
        components: V and U as they are kept, in float32.
        compute: V and U in the dtype that forwards run in.
        lower: `[*positions, C]` of each site, the importance that feeds masks.
        upper: the same, the importance that minimality presses on.
    """

    components: dict[str, Factors]
    compute: dict[str, Factors]
    lower: dict[str, Array]
    upper: dict[str, Array]


class Pass(NamedTuple):
    """What all terms of a step share.

    Attributes:
        learned: see `Learned`.
        clean: the frozen forward, under stop-gradient.
        params: of the target, as they are.
        frozen: the same in the dtype that forwards run in.
        step: the number of updates made before.
    """

    learned: Learned
    clean: Clean
    params: Any
    frozen: Any
    step: Any

    @property
    def positions(self) -> dict[str, tuple[int, ...]]:
        """`(batch, …)` of each site's activations."""
        return {site: x.shape[:-1] for site, x in self.learned.lower.items()}

    @property
    def counts(self) -> dict[str, int]:
        """C of each site."""
        return {site: x.shape[-1] for site, x in self.learned.lower.items()}


def learn(product: Decomposition, taps: Mapping[str, Array], importance: ImportanceFn, dtype: Any) -> Learned:
    """What terms need of a product: the casts and the importance, once."""
    compute = cast(product.components, dtype)
    logits = importance.apply(cast(product.ci_fn, dtype), compute, taps)
    lower = {site: lower_squash(x) for site, x in logits.items()}
    return Learned(product.components, compute, lower, {site: upper_squash(x) for site, x in logits.items()})


def cast(tree: Any, dtype: Any) -> Any:
    """The tree's floating arrays in another dtype, but for buffers, such as rotary frequencies."""

    def one(path: Any, x: Any) -> Any:
        fixed = is_buffer(path) or not jnp.issubdtype(x.dtype, jnp.floating)
        return x if fixed else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def decompose(
    plan: Plan, sites: Mapping[str, str], loss: Callable[[Any, Any], Array], *, taps: Sequence[str] = ()
) -> Model:
    """A traced target as the method sees it, cut once before the first of its sites.

    Args:
        plan: of the target, for batches of the shape that steps take.
        sites: what each site is called → the parameter that it is.
        loss: see `Model`.
        taps: globs of further activations for the importance function.

    Raises:
        NoSuchSite, SiteRefused: see `Plan.sites`.
        ContractError: a site is no single matrix with a single use, as V and U of the product are kept.
    """
    found = plan.sites(list(sites.values()))
    for name, parameter in sites.items():
        site = found[parameter]
        use = site.uses[0]
        if len(site.uses) != 1 or site.lead or site.batch or use.loops or use.kind != "dot":
            raise ContractError(
                f"{name} ({parameter}) is used by {len(site.uses)} × {use.kind} and has the axes "
                f"{(*site.lead, *site.batch)} before its matrix; training takes matrices outside loops that one dot "
                "multiplies by: leave it out, or unroll the model"
            )
    uses = {name: found[parameter].uses[0].name for name, parameter in sites.items()}
    prefix, suffix = plan.split(list(sites.values()))

    def clean(params: Any, batch: Any) -> Clean:
        output, seen = plan.clean(params, batch, taps=[*uses.values(), *taps])
        inputs = {name: seen[use].input for name, use in uses.items()}
        named = {name: tap.output for name, tap in seen.items() if name not in uses.values()}
        return Clean(output, inputs | named, prefix(params, batch))

    def masked(params: Any, components: Mapping[str, Factors], masks: Mapping[str, SiteMask], residuals: Any) -> Any:
        factors = {sites[name]: components[name] for name in masks}
        return suffix(params, residuals, factors, {uses[name]: mask for name, mask in masks.items()})

    def weights(params: Any) -> dict[str, Array]:
        matrices = plan.matrices(params)
        return {name: matrices[parameter] for name, parameter in sites.items()}

    return Model(clean, masked, weights, loss)
