"""Turns a run's specification into the functions and arrays of the method; touches no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pdlib.items.state import Decomposition, Factors, Site, TrainState, init_decomposition, named_key
from pdlib.method import schedule
from pdlib.method.importance import ImportanceFn, lower_squash, per_component_mlp
from pdlib.method.initialise import spread_factors
from pdlib.method.step import Coefficients, Model, Optimizers, init_state, make_loop, make_step, warm_up
from pdlib.method.truth import identity_error, probe, recovery
from pdlib.rewrite.masks import SiteMask
from pdlib.rewrite.plan import Plan
from pdlib.run.spec import RunSpec
from pdlib.targets import tms
from pdlib.targets.target import Target


@dataclass(frozen=True)
class Problem:
    """A specification made concrete around a trained target."""

    spec: RunSpec
    target: Target

    @property
    def key(self) -> jax.Array:
        """The root of everything random in the run."""
        return jax.random.key(self.spec.seed)

    def plan(self, batch: int) -> Plan:
        """The target, traced for batches of this size."""
        return self.target.plan(jax.ShapeDtypeStruct((batch, self.spec.target.features), jnp.float32))

    @cached_property
    def weights(self) -> dict[str, jax.Array]:
        """`W[d_in, d_out]` of each site."""
        matrices = self.plan(1).matrices(self.target.params)
        return {site: matrices[name] for site, name in tms.SITES.items()}

    @property
    def importance(self) -> ImportanceFn:
        """The importance function."""
        return per_component_mlp(self.spec.decomposition.importance_hidden)

    @property
    def optimizers(self) -> Optimizers:
        """AdamW without decay for each half, on one cosine schedule."""
        training = self.spec.training
        rate = schedule.cosine(training.learning_rate, training.steps, final_fraction=training.final_fraction)
        return Optimizers(optax.adamw(rate, weight_decay=0.0), optax.adamw(rate, weight_decay=0.0))

    def loop(self) -> Any:
        """`(state, count) → (state, metrics)`; see `pdlib.method.step.make_loop`."""
        losses, training = self.spec.losses, self.spec.training
        coefficients = Coefficients(
            losses.faithfulness,
            schedule.ramp(losses.minimality, training.steps, fraction=losses.minimality_ramp),
            losses.minimality_power,
            losses.stochastic,
            losses.stochastic_layerwise,
        )
        params, plan = self.target.params, self.plan(training.batch)

        def masked(components: Mapping[str, Factors], masks: Mapping[str, SiteMask], x: Any) -> jax.Array:
            factors = {tms.SITES[site]: value for site, value in components.items()}
            return plan.masked(params, factors, {tms.SITES[site]: mask for site, mask in masks.items()}, x)

        model = Model(
            clean=lambda x: _clean(plan, params, x),
            masked=masked,
            weights=self.weights,
            sample=lambda key: tms.sample(key, training.batch, shape_of(self.spec)),
        )
        key = named_key(self.key, "train")
        return make_loop(make_step(model, self.importance, coefficients, self.optimizers, key))

    def initial_product(self) -> Decomposition:
        """The product before step 0: drawn, and warmed up for faithfulness."""
        spec = self.spec.decomposition
        sites = {site: Site(W.shape[0], W.shape[1], spec.C) for site, W in self.weights.items()}
        product = init_decomposition(named_key(self.key, "init"), sites, self.importance.init)
        if spec.init == "spread":
            keys = {site: named_key(self.key, f"spread/{site}") for site in sites}
            product = product._replace(
                components={s: spread_factors(keys[s], W, spec.C) for s, W in self.weights.items()}
            )
        training = self.spec.training
        warmed = warm_up(
            product.components, self.weights, steps=training.warmup_steps, learning_rate=training.warmup_learning_rate
        )
        return product._replace(components=warmed)

    def initial_state(self, product: Decomposition) -> TrainState:
        """The state before step 0 around a product."""
        return init_state(product, self.optimizers)

    def abstract_state(self) -> TrainState:
        """The abstract twin of the state: what a restore asks for."""
        return jax.eval_shape(lambda: self.initial_state(self.initial_product()))

    def importance_on_probe(self, product: Decomposition) -> dict[str, Any]:
        """Lower importance `[features, C]` of each site on one active feature at a time."""
        features = jnp.asarray(probe(self.spec.target.features))
        _, inputs = _clean(self.plan(len(features)), self.target.params, features)
        logits = self.importance.apply(product.ci_fn, product.components, inputs)
        return {site: jax.device_get(lower_squash(x)) for site, x in logits.items()}

    def results(self, product: Decomposition) -> dict[str, Any]:
        """What was found of what is known: recovery of linear1's features, identity error of each site."""
        W = jax.device_get(self.weights["linear1"])
        found = recovery(W, jax.device_get(product.components["linear1"]))
        ci = self.importance_on_probe(product)
        return {
            "features": self.spec.target.features,
            "features_recovered": found.recovered,
            "mmcs": found.mmcs,
            "ml2r": found.ml2r,
            "identity_error": {site: identity_error(x) for site, x in ci.items()},
        }


def _clean(plan: Plan, params: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The frozen forward, and each site's input."""
    out, taps = plan.clean(params, x, taps=list(tms.SITES.values()))
    return out, {site: taps[name].input for site, name in tms.SITES.items()}


def shape_of(spec: RunSpec) -> tms.Shape:
    """The target's shape."""
    return tms.Shape(spec.target.features, spec.target.hidden, spec.target.feature_probability)


def train_target(spec: RunSpec) -> Target:
    """Train the target that the specification and its seed determine."""
    return tms.pretrain(
        named_key(jax.random.key(spec.seed), "target"),
        shape_of(spec),
        steps=spec.target.pretrain_steps,
        batch=spec.target.pretrain_batch,
        learning_rate=spec.target.pretrain_learning_rate,
        weight_decay=spec.target.pretrain_weight_decay,
    )
