"""One training step of a parameter decomposition, as a pure function of the state; knows no file, target or loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pdlib.items.state import Decomposition, Factors, TrainingItem, TrainState, named_key
from pdlib.method import losses, schedule
from pdlib.method.importance import ImportanceFn
from pdlib.method.model import Learned, Model, Pass, cast, learn
from pdlib.method.objective import Term, evaluate
from pdlib.method.optimizers import Optimizers, adamw, apply_update
from pdlib.method.reconstruction import worst_case

Metrics = dict[str, Array]
Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def init_state(decomposition: Decomposition, optimizers: Optimizers, adversaries: Mapping[str, Any]) -> TrainState:
    """The state before step 0, around a product that is new, warmed up, or a parent's."""
    training = TrainingItem(
        components_opt_state=optimizers.components.init(decomposition.components),
        ci_fn_opt_state=optimizers.ci_fn.init(decomposition.ci_fn),
        adversaries=dict(adversaries),
        step=jnp.int32(0),
    )
    return TrainState(decomposition, training)


def init_adversaries(
    terms: Mapping[str, Term], key: Any, positions: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]
) -> dict[str, Any]:
    """The persistent adversaries before step 0, by term; see `Persistent.init`."""
    return {
        name: term.adversary.init(named_key(key, f"adversaries/{name}"), positions, counts)
        for name, term in terms.items()
        if term.adversary is not None
    }


def make_step(
    model: Model,
    importance: ImportanceFn,
    terms: Mapping[str, Term],
    optimizers: Optimizers,
    sample: Callable[[Any], Any],
    key: Any,
    *,
    compute_dtype: Any = jnp.float32,
) -> Step:
    """The update `(state, target parameters) → (state, metrics)`: batch and draws follow from `key` and the step.

    The clean forward, the importance and the casts are computed once. Then each persistent adversary climbs, all
    sites live; one backward gives the gradients of the product and of the sources; both take their step with it.

    Args:
        model: the target; see `Model`.
        importance: the importance function.
        terms: the objective.
        optimizers: see `Optimizers`.
        sample: `key → batch`.
        key: a typed PRNG key, the root of everything random.
        compute_dtype: of forwards; losses, parameters, moments and sources stay as they are.
    """

    def step(state: TrainState, params: Any) -> tuple[TrainState, Metrics]:
        product, process = state
        batch = sample(jax.random.fold_in(named_key(key, "data"), process.step))
        frozen = cast(params, compute_dtype)
        clean = jax.lax.stop_gradient(model.clean(frozen, batch))
        learned, pull = jax.vjp(lambda p: learn(p, clean.taps, importance, compute_dtype), product)
        shared = Pass(learned, clean, params, frozen, process.step)
        adversaries = _warmed(terms, process.adversaries, model, jax.lax.stop_gradient(shared))

        def objective(learned: Learned, leaves: Any) -> tuple[Array, Metrics]:
            return evaluate(terms, model, shared._replace(learned=learned), leaves, key)

        leaves = {name: _of(terms, name).leaves(state) for name, state in adversaries.items()}
        slope, metrics = jax.grad(objective, argnums=(0, 1), has_aux=True)(learned, leaves)
        (gradient,) = pull(slope[0])
        climbed = {
            name: _of(terms, name).climb(state, slope[1][name], process.step) for name, state in adversaries.items()
        }
        components, components_opt_state = apply_update(
            optimizers.components, gradient.components, process.components_opt_state, product.components
        )
        ci_fn, ci_fn_opt_state = apply_update(optimizers.ci_fn, gradient.ci_fn, process.ci_fn_opt_state, product.ci_fn)
        training = TrainingItem(components_opt_state, ci_fn_opt_state, climbed, process.step + 1)
        active = {
            f"l0/{site}": jnp.mean(jnp.sum(g > 0, axis=-1, dtype=jnp.float32)) for site, g in learned.lower.items()
        }
        return TrainState(Decomposition(components, ci_fn), training), {**metrics, **active}

    return step


def make_loop(step: Step) -> Callable[..., tuple[TrainState, Metrics]]:
    """`(state, params, count) → (state, metrics of the last step)`, jitted once for every count, donating the state.

    The count is a traced value, so that one compiled body serves all: a run cut into other pieces gives equal bits.
    """

    def loop(state: TrainState, params: Any, count: Any) -> tuple[TrainState, Metrics]:
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, state, params)[1])
        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry[0], params), (state, metrics))

    return jax.jit(loop, donate_argnums=0)


def warm_up(
    components: dict[str, Factors], weights: Mapping[str, Array], *, steps: int, learning_rate: float
) -> dict[str, Factors]:
    """Train V and U for faithfulness alone, with an optimizer that is thrown away."""
    optimizer = adamw(schedule.constant(learning_rate))

    def update(_: Any, carry: Any) -> Any:
        values, state = carry
        gradient = jax.grad(lambda v: losses.faithfulness(weights, v))(values)
        return apply_update(optimizer, gradient, state, values)

    run = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, update, carry))
    return run((components, optimizer.init(components)))[0]


def _warmed(terms: Mapping[str, Term], adversaries: Mapping[str, Any], model: Model, shared: Pass) -> dict[str, Any]:
    """The adversaries after their ascents against a product that stands still."""
    found: dict[str, Any] = {}
    for name, state in adversaries.items():
        adversary = _of(terms, name)
        gradient_of = jax.grad(lambda leaves, a=adversary: worst_case(model, shared, a.drawn(leaves, shared.positions)))
        for _ in range(adversary.ascents):
            state = adversary.climb(state, gradient_of(adversary.leaves(state)), shared.step)
        found[name] = state
    return found


def _of(terms: Mapping[str, Term], name: str) -> Any:
    return terms[name].adversary
