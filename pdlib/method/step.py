"""One training step of a parameter decomposition, as a pure function of the state; knows no file and no target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from pdlib.items.state import Decomposition, Factors, TrainingItem, TrainState, named_key
from pdlib.method import losses
from pdlib.method.importance import ImportanceFn, lower_squash, upper_squash
from pdlib.method.masks import SiteMask, stochastic_mask
from pdlib.method.schedule import Schedule, constant

Metrics = dict[str, Array]


class Model(NamedTuple):
    """A frozen target as the step sees it, its parameters bound.

    Attributes:
        clean: `batch → (output, site inputs)`.
        masked: `(components, masks, batch) → output`; sites without a mask run frozen.
        weights: `W[d_in, d_out]` of each site.
        sample: `key → batch`.
    """

    clean: Callable[[Any], tuple[Array, dict[str, Array]]]
    masked: Callable[[Mapping[str, Factors], Mapping[str, SiteMask], Any], Array]
    weights: dict[str, Array]
    sample: Callable[[Any], Any]


class Coefficients(NamedTuple):
    """The weight of each loss term, and the power of minimality."""

    faithfulness: float
    minimality: Schedule
    minimality_power: float
    stochastic: float
    stochastic_layerwise: float


class Optimizers(NamedTuple):
    """One optimizer for V and U, one for the importance function."""

    components: optax.GradientTransformation
    ci_fn: optax.GradientTransformation


def init_state(decomposition: Decomposition, optimizers: Optimizers) -> TrainState:
    """The state before step 0, around a product that is new, warmed up, or a parent's."""
    training = TrainingItem(
        components_opt_state=optimizers.components.init(decomposition.components),
        ci_fn_opt_state=optimizers.ci_fn.init(decomposition.ci_fn),
        adversaries={},
        step=jnp.int32(0),
    )
    return TrainState(decomposition, training)


def total_loss(
    decomposition: Decomposition,
    batch: Any,
    key: Any,
    step: Any,
    *,
    model: Model,
    importance: ImportanceFn,
    coefficients: Coefficients,
) -> tuple[Array, Metrics]:
    """The weighted sum of all terms at one step, and each term with the mean L0 of each site.

    Each random term draws from a key of its name and the step: the order of terms changes nothing.
    """
    clean, inputs = jax.lax.stop_gradient(model.clean(batch))
    logits = importance.apply(decomposition.ci_fn, decomposition.components, inputs)
    lower = {site: lower_squash(x) for site, x in logits.items()}

    def reconstruct(name: str, sites: list[str]) -> Array:
        term = jax.random.fold_in(named_key(key, name), step)
        masks = {site: stochastic_mask(named_key(term, site), lower[site]) for site in sites}
        return losses.mean_squared_error(model.masked(decomposition.components, masks, batch), clean)

    alone = [reconstruct(f"stochastic_layerwise/{site}", [site]) for site in lower]
    terms = {
        "faithfulness": losses.faithfulness(model.weights, decomposition.components),
        "minimality": losses.minimality(
            {site: upper_squash(x) for site, x in logits.items()},
            step,
            penalty=losses.power_penalty(constant(coefficients.minimality_power)),
            reference=1.0,
        ).activity,
        "stochastic": reconstruct("stochastic", list(lower)),
        "stochastic_layerwise": jnp.mean(jnp.stack(alone)),
    }
    scale = coefficients._asdict() | {"minimality": coefficients.minimality(step)}
    total = jnp.sum(jnp.stack([scale[name] * value for name, value in terms.items()]))
    active = {f"l0/{site}": jnp.mean(jnp.sum(g > 0, axis=-1, dtype=jnp.float32)) for site, g in lower.items()}
    return total, {"total": total, **terms, **active}


def make_step(
    model: Model, importance: ImportanceFn, coefficients: Coefficients, optimizers: Optimizers, key: Any
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """The update as a function of the state alone: batch and draws are functions of `key` and the state's step."""

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        product, process = state
        batch = model.sample(jax.random.fold_in(named_key(key, "data"), process.step))
        gradient_of = jax.value_and_grad(total_loss, has_aux=True)
        (_, metrics), gradient = gradient_of(
            product, batch, key, process.step, model=model, importance=importance, coefficients=coefficients
        )
        components, components_opt_state = _update(
            optimizers.components, gradient.components, process.components_opt_state, product.components
        )
        ci_fn, ci_fn_opt_state = _update(optimizers.ci_fn, gradient.ci_fn, process.ci_fn_opt_state, product.ci_fn)
        training = TrainingItem(components_opt_state, ci_fn_opt_state, process.adversaries, process.step + 1)
        return TrainState(Decomposition(components, ci_fn), training), metrics

    return step


def make_loop(step: Callable[[TrainState], tuple[TrainState, Metrics]]) -> Callable[..., tuple[TrainState, Metrics]]:
    """`(state, count) → (state, metrics of the last step)`, jitted once for every count, donating the state.

    The count is a traced value, so that one compiled body serves all: a run cut into other pieces gives equal bits.
    """

    def loop(state: TrainState, count: Any) -> tuple[TrainState, Metrics]:
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state)[1])
        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry[0]), (state, metrics))

    return jax.jit(loop, donate_argnums=0)


def warm_up(
    components: dict[str, Factors], weights: Mapping[str, Array], *, steps: int, learning_rate: float
) -> dict[str, Factors]:
    """Train V and U for faithfulness alone, with an optimizer that is thrown away."""
    optimizer = optax.adamw(learning_rate, weight_decay=0.0)

    def update(_: Any, carry: Any) -> Any:
        values, state = carry
        gradient = jax.grad(lambda v: losses.faithfulness(weights, v))(values)
        values, state = _update(optimizer, gradient, state, values)
        return values, state

    run = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, update, carry))
    return run((components, optimizer.init(components)))[0]


def _update(optimizer: optax.GradientTransformation, gradient: Any, state: Any, values: Any) -> tuple[Any, Any]:
    change, state = optimizer.update(gradient, state, values)
    return optax.apply_updates(values, change), state
