"""One training step against float64 NumPy, and what must hold from one step to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pdlib.items.state import Decomposition, named_key
from pdlib.method import losses, masks, routing, schedule
from pdlib.method.adversary import Fresh, Persistent, Scope
from pdlib.method.importance import ImportanceFn, global_mlp, layerwise_mlp, per_component_mlp
from pdlib.method.masks import Drawn
from pdlib.method.objective import Term, faithfulness, minimality, reconstruction
from pdlib.method.optimizers import Optimizers, adamw, apply_update, clip
from pdlib.method.reconstruction import Reconstruction, all_sites, layerwise
from pdlib.method.step import make_loop, make_step
from tests import oracle_training as oracle
from tests.method.problems import (
    COUNTS,
    KEY,
    NAMES,
    PARAMS,
    SITES,
    copied,
    equal,
    key_of_data,
    key_of_forward,
    model_of,
    once,
    product_of,
    sampler,
    state_of,
)

AT, STEPS = 3, 9  # the step that is compared, of a run of so many
IMPORTANCE = {
    "layerwise": (layerwise_mlp([3]), oracle.layerwise_logits),
    "per_component": (per_component_mlp(3), oracle.per_component_logits),
    "global": (global_mlp([4]), oracle.global_logits),
}


class Case(NamedTuple):
    """One comparison with the oracle: a persistent adversary, the positions of the batch, an importance function.

    `full` has every kind of term, the others those that differ between cases.
    """

    scope: str
    count: int = 1
    ascent: Any = "adam"
    sigmoid: bool = False
    positions: tuple[int, ...] = (6,)
    importance: str = "layerwise"
    full: bool = False


CASES = [
    Case("c", full=True),
    Case("bc", importance="per_component"),
    Case("nsc", 3, importance="global"),
    Case("bc", ascent="sign"),
    Case("c", sigmoid=True, importance="per_component"),
    Case("nsc", 2, "sign", True),
    Case("sc", positions=(3, 2)),
    Case("bsc", positions=(3, 2), importance="per_component", full=True),
    Case("nsc", 2, positions=(4, 2), importance="global"),
    Case("bsc", 1, "sign", True, (3, 2)),
]
RATE = schedule.warm_up(0.2, STEPS, fraction=0.5)


def terms_of(case: Case) -> dict[str, Term]:
    """The terms of a case, with coefficients that differ."""
    persistent = Persistent(Scope(case.scope, case.count), RATE, 2, case.ascent, case.sigmoid)
    other = Persistent(Scope("c"), RATE, 1)
    subset = routing.uniform_k_subset
    plans = {
        "stochastic": (0.6, Reconstruction(all_sites(NAMES))),
        "masked": (0.3, Reconstruction(all_sites(NAMES), source=masks.SOURCES["ci_masked"])),
        "layers": (0.7, Reconstruction(layerwise(NAMES), routing.bernoulli(0.6), masks.bernoulli)),
        "subset": (0.4, Reconstruction(all_sites(NAMES), subset)),
        "persistent": (0.5, Reconstruction(all_sites(NAMES), subset, adversary=persistent)),
        "fresh": (0.2, Reconstruction(layerwise(NAMES), subset, adversary=Fresh(Scope("c"), 3, 0.2))),
        "merged": (0.9, Reconstruction(all_sites(NAMES), subset, adversary=other, fraction=0.5)),
    }
    plans = plans if case.full else {name: plans[name] for name in ("masked", "persistent")}
    cost = losses.smooth_l0(schedule.anneal(1.0, 0.2, STEPS))
    return {
        "faithfulness": faithfulness(schedule.constant(0.8)),
        **minimality(schedule.constant(0.05), schedule.constant(0.02), penalty=cost, reference=32.0),
        **{name: reconstruction(schedule.constant(weight), plan) for name, (weight, plan) in plans.items()},
    }


def draws_of(name: str, plan: Reconstruction, positions: tuple[int, ...]) -> tuple[oracle.Forward, ...]:
    """What a term draws in step `AT`, by the samplers themselves."""
    found: list[oracle.Forward] = []
    for live in plan.plan:
        key, place = key_of_forward(name, AT, live), dict.fromkeys(live, positions)
        routes = plan.route(named_key(key, "route"), place)
        sources, start = {}, {}
        for site in live:
            drawn = plan.source(named_key(key, f"source/{site}"), jnp.zeros((*positions, COUNTS[site])))
            sources[site] = np.float64(drawn.source), 0.0 if drawn.delta is None else np.float64(drawn.delta)
            if isinstance(plan.adversary, Fresh):
                shape = (*plan.adversary.scope.shape(positions), COUNTS[site] + 1)
                start[site] = np.float64(jax.random.uniform(named_key(named_key(key, "attack"), site), shape))
        chosen = None
        if plan.fraction is not None:
            chosen = np.asarray(jax.random.bernoulli(named_key(key, "fraction"), plan.fraction, positions[:1]))
            chosen = chosen.reshape(-1, *(1,) * len(positions))
        found.append(oracle.Forward(live, {s: np.asarray(r) for s, r in routes.items()}, sources, chosen, start))
    return tuple(found)


def adversary_of(adversary: Any) -> oracle.Adversary | None:
    if isinstance(adversary, Fresh):
        return oracle.Adversary(
            *adversary.scope[:1], adversary.rate, adversary.steps, adversary.scope.period, fresh=True
        )
    if adversary is None:
        return None
    kind, count = adversary.scope
    sign = adversary.ascent == "sign"
    return oracle.Adversary(kind, float(RATE(AT)), adversary.ascents, count, sign, adversary.sigmoid)


def problem_of(case: Case, terms: dict[str, Term]) -> oracle.Problem:
    plans = {name: term.value.__self__ for name, term in terms.items() if hasattr(term.value, "__self__")}
    width = 1 + (0.2 - 1) * AT / (STEPS - 1)
    exact = jax.tree.map(np.float64, PARAMS)
    return oracle.Problem(
        x=np.float64(sampler(case.positions)(key_of_data(AT))),
        W={"one": exact["linear1"]["w"], "two": exact["linear2"]["w"]},
        b=exact["~"]["b"],
        logits=IMPORTANCE[case.importance][1],
        cost=lambda u: u**2 / (u**2 + width**2),
        reference=32.0,
        faithfulness=0.8,
        minimality=0.05,
        frequency=0.02,
        terms={
            name: oracle.Term(
                terms[name].coefficient(AT), draws_of(name, plan, case.positions), adversary_of(plan.adversary)
            )
            for name, plan in plans.items()
        },
        rate=0.03 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * AT / (STEPS - 1)))),
        max_norm=norm_of(case),
        weight_decay=0.1,
    )


def norm_of(case: Case) -> float:
    """A norm that the gradient exceeds in the full cases alone."""
    return 0.02 if case.full else 50.0


def in_the_middle(state: Any) -> Any:
    """A state at step `AT`, every moment of which is something."""
    random = np.random.default_rng(5)

    def some(tree: Any, low: float, high: float) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(random.uniform(low, high, x.shape), x.dtype), tree)

    def moments(optimizer_state: Any) -> Any:
        m, v = (optax.tree_utils.tree_get(optimizer_state, name) for name in ("mu", "nu"))
        return optax.tree_utils.tree_set(
            optimizer_state, mu=some(m, -0.01, 0.01), nu=some(v, 1e-5, 1e-4), count=jnp.int32(AT)
        )

    adversaries = {
        name: one | ({"m": some(one["m"], -0.01, 0.01), "v": some(one["v"], 1e-5, 1e-4), "count": jnp.float32(9)})
        if "m" in one
        else one
        for name, one in state.training.adversaries.items()
    }
    product, training = state
    training = training._replace(
        components_opt_state=moments(training.components_opt_state),
        ci_fn_opt_state=moments(training.ci_fn_opt_state),
        adversaries=adversaries,
        step=jnp.int32(AT),
    )
    return type(state)(product, training)


def in_numpy(state: Any) -> dict[str, Any]:
    """A state as the oracle has it."""
    product, training = jax.tree.map(np.float64, copied(state))

    def moments(optimizer_state: Any) -> Any:
        m, v = (plain(optax.tree_utils.tree_get(optimizer_state, name)) for name in ("mu", "nu"))
        counts = {int(count) for _, count in optax.tree_utils.tree_get_all_with_path(optimizer_state, "count")}
        (count,) = counts
        return m, v, count

    return {
        "components": plain(product.components),
        "ci_fn": plain(product.ci_fn),
        "components_moments": moments(training.components_opt_state),
        "ci_fn_moments": moments(training.ci_fn_opt_state),
        "adversaries": training.adversaries,
    }


def plain(tree: Any) -> Any:
    """Named tuples as tuples."""
    if isinstance(tree, dict):
        return {name: plain(tree[name]) for name in tree}
    return tuple(plain(one) for one in tree) if isinstance(tree, tuple) else tree


def close(found: Any, want: Any, rtol: float, atol: float, path: str = "") -> None:
    if isinstance(want, dict):
        assert set(found) == set(want), path
        for name in want:
            close(found[name], want[name], rtol, atol, f"{path}/{name}")
    elif isinstance(want, tuple):
        for index, (one, other) in enumerate(zip(found, want, strict=True)):
            close(one, other, rtol, atol, f"{path}/{index}")
    else:
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol, err_msg=path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_a_step_agrees_with_numpy(case):
    terms = terms_of(case)
    importance = IMPORTANCE[case.importance][0]
    cosine = schedule.cosine(0.03, STEPS, final_fraction=0.1)
    optimizers = Optimizers(adamw(cosine, max_norm=norm_of(case)), adamw(cosine, weight_decay=0.1))
    product = product_of(importance)
    state = in_the_middle(state_of(terms, product=product, optimizers=optimizers, positions=case.positions))
    step = make_step(model_of(case.positions), importance, terms, optimizers, sampler(case.positions), KEY)
    new, metrics = once(step, state)
    want, values = oracle.step(problem_of(case, terms), in_numpy(state))
    close(metrics, values, 1e-5, 1e-8, "metrics")
    assert int(new.training.step) == AT + 1
    found = in_numpy(new)
    for part in ("components_moments", "ci_fn_moments"):
        close(found[part], want[part], 1e-4, 1e-7, part)
    close(found["adversaries"], want["adversaries"], 1e-4, 1e-6, "adversaries")
    for part in ("components", "ci_fn"):
        before = in_numpy(state)[part]
        moved = oracle.mapped(np.subtract, found[part], before), oracle.mapped(np.subtract, want[part], before)
        close(*moved, 1e-4, 1e-6, part)


def test_the_cases_meet_every_branch_of_the_squashings():
    logits = oracle.layerwise_logits(
        plain(jax.tree.map(np.float64, product_of().ci_fn)),
        {},
        {"one": np.float64(x := sampler()(key_of_data(AT))), "two": np.float64(x @ PARAMS["linear1"]["w"])},
    )
    for site, x in logits.items():
        assert min((x < 0).sum(), ((x > 0) & (x < 1)).sum()) > 0, site
    assert any((x > 1).any() for x in logits.values())


SMALL = Optimizers(adamw(schedule.constant(1e-2), max_norm=0.5), adamw(schedule.constant(1e-2)))
PLAIN = Optimizers(optax.sgd(1.0), optax.sgd(1.0))  # what a step takes off is the gradient
IMPORTANCE_FN = layerwise_mlp([3])
ASCENDING = Persistent(Scope("bc"), schedule.constant(0.05), 1)
POWER = losses.power_penalty(schedule.constant(1.0))


def small_terms(adversary: Persistent = ASCENDING, weight: float = 0.5) -> dict[str, Term]:
    hostile = Reconstruction(all_sites(NAMES), routing.uniform_k_subset, adversary=adversary)
    return {
        "stochastic": reconstruction(schedule.constant(0.5), Reconstruction(all_sites(NAMES))),
        "hostile": reconstruction(schedule.constant(weight), hostile),
        "faithfulness": faithfulness(schedule.constant(1.0)),
        **minimality(schedule.constant(0.05), schedule.constant(0.02), penalty=POWER, reference=32.0),
    }


def step_of(terms: dict[str, Term], optimizers: Optimizers = SMALL, **settings: Any) -> Any:
    return make_step(model_of(), IMPORTANCE_FN, terms, optimizers, sampler(), KEY, **settings)


def change(before: Any, after: Any) -> Any:
    """The gradient by the product, of a step with `PLAIN`."""
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), before.decomposition, after.decomposition)


@pytest.fixture(scope="module")
def loop() -> Any:
    return make_loop(step_of(small_terms()))


def test_the_order_of_the_terms_changes_nothing_to_the_bit():
    terms = small_terms()
    backwards = dict(reversed(terms.items()))
    assert list(terms) != list(backwards)
    one, other = (once(step_of(t), state_of(t, optimizers=SMALL)) for t in (terms, backwards))
    equal(one, other)


def test_a_term_draws_from_its_name_and_the_step():
    plan = Reconstruction(all_sites(NAMES))
    terms = {name: reconstruction(schedule.constant(1.0), plan) for name in ("a", "b")}
    step = jax.jit(make_step(model_of(), IMPORTANCE_FN, terms, PLAIN, lambda _: sampler()(KEY), KEY))
    state = state_of(terms, optimizers=PLAIN)
    first = step(state, PARAMS)[1]
    later = step(state._replace(training=state.training._replace(step=jnp.int32(1))), PARAMS)[1]
    assert len({float(value) for value in (first["a"], first["b"], later["a"], later["b"])}) == 4


@pytest.fixture(scope="module")
def weighed() -> Any:
    """A step with one term that has an adversary, by its coefficient: the gradient, the new state, the metrics."""
    runs = {}
    for weight in (0.0, 0.5, 2.0):
        terms = {"hostile": small_terms(weight=weight)["hostile"]}
        state = state_of(terms, optimizers=PLAIN)
        new, metrics = once(step_of(terms, PLAIN), state)
        runs[weight] = change(state, new), new, metrics
    return runs


def test_with_a_coefficient_of_zero_a_term_moves_its_adversary_alone(weighed):
    gradient, zero, values = weighed[0.0]
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        zero.training.adversaries,
        weighed[2.0][1].training.adversaries,
    )
    start = state_of(small_terms()).training.adversaries["hostile"]["sources"]
    assert np.abs(zero.training.adversaries["hostile"]["sources"]["one"] - start["one"]).max() > 0.01
    assert (float(values["total"]), float(values["hostile"]) > 0) == (0.0, True)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((zero, values)))


def test_the_coefficient_scales_what_a_term_with_an_adversary_asks_of_the_product(weighed):
    half, double = weighed[0.5][0], weighed[2.0][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(4 * a, b, rtol=1e-4, atol=1e-6), half, double)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(double.components)) > 1e-3


def test_three_steps_and_two_are_five_to_the_bit(loop):
    state = state_of(small_terms(), optimizers=SMALL)
    whole = loop(given := copied(state), PARAMS, 5)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.decomposition))
    parts = loop(loop(copied(state), PARAMS, 3)[0], PARAMS, 2)
    equal(whole, parts)
    assert int(whole[0].training.step) == 5
    assert float(whole[0].training.adversaries["hostile"]["count"]) == 10


def test_a_resumed_adversary_ascends_as_if_it_had_never_stopped(loop):
    whole = loop(state_of(small_terms(), optimizers=SMALL), PARAMS, 3)
    first = loop(state_of(small_terms(), optimizers=SMALL), PARAMS, 2)[0]
    equal(whole, loop(copied(first), PARAMS, 1))
    hostile = first.training.adversaries["hostile"] | {"count": jnp.float32(0)}
    forgetful = first._replace(training=first.training._replace(adversaries={"hostile": hostile}))
    again = loop(copied(forgetful), PARAMS, 1)[0].training.adversaries["hostile"]["sources"]
    want = whole[0].training.adversaries["hostile"]["sources"]
    assert max(float(jnp.abs(again[site] - want[site]).max()) for site in NAMES) > 1e-3


def test_stored_sources_may_be_bfloat16_and_their_moments_are_not():
    terms = small_terms(ASCENDING._replace(dtype=jnp.bfloat16))
    state = state_of(terms, optimizers=SMALL)
    hostile = make_loop(step_of(terms))(copied(state), PARAMS, 2)[0].training.adversaries["hostile"]
    assert {x.dtype for x in hostile["sources"].values()} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves([hostile[part] for part in ("m", "v", "count")])} == {jnp.dtype("float32")}
    before = state.training.adversaries["hostile"]["sources"]["one"]
    assert float(jnp.abs(hostile["sources"]["one"] - before).max()) > 0.05


def test_forwards_may_run_in_bfloat16_and_nothing_is_kept_in_it():
    masked = Reconstruction(all_sites(NAMES), source=masks.SOURCES["ci_masked"])
    terms = small_terms() | {"masked": reconstruction(schedule.constant(1.0), masked)}
    seen: dict[str, Any] = {}

    def look(_: Any, shared: Any, key: Any, drawn: Any) -> Any:
        del key, drawn
        parts = shared.learned._asdict() | {"params": shared.params, "frozen": shared.frozen, "taps": shared.clean.taps}
        seen.update({name: {leaf.dtype.name for leaf in jax.tree.leaves(part)} for name, part in parts.items()})
        return jnp.float32(0)

    state = state_of(terms, optimizers=SMALL)
    model = model_of(dtype=jnp.bfloat16)
    half = make_step(model, IMPORTANCE_FN, terms, SMALL, sampler(dtype=jnp.bfloat16), KEY, compute_dtype=jnp.bfloat16)
    (new, metrics), (_, exact) = (once(s, state) for s in (half, step_of(terms)))
    kept = [leaf.dtype for leaf in jax.tree.leaves(new) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert set(kept) == {jnp.dtype("float32")}
    assert {value.dtype for value in metrics.values()} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics["faithfulness"], exact["faithfulness"], rtol=1e-6)
    np.testing.assert_allclose(metrics["masked"], exact["masked"], rtol=0.05)
    assert float(metrics["masked"]) != float(exact["masked"])
    looking, sample = {"look": Term(look, schedule.constant(1.0))}, sampler(dtype=jnp.bfloat16)
    watched = make_step(model, IMPORTANCE_FN, looking, SMALL, sample, KEY, compute_dtype=jnp.bfloat16)
    jax.eval_shape(watched, state_of({}), PARAMS)
    kept = {name for name, dtypes in seen.items() if dtypes == {"float32"}}
    assert kept == {"components", "params"}
    assert all(seen[name] == {"bfloat16"} for name in set(seen) - kept)


def test_terms_sources_and_importance_functions_of_others_work_as_they_are():
    def size(_: Any, shared: Any, key: Any, drawn: Any) -> Any:
        del key, drawn
        return sum(jnp.sum(V**2) for V, _ in shared.learned.components.values())

    def game(_: Any, __: Any, key: Any, drawn: Any) -> Any:
        del key
        return sum(jnp.sum(one.source) - jnp.sum(one.delta) for one in drawn.values())

    def half(_: Any, lower: Any) -> Drawn:
        return Drawn(jnp.full_like(lower, 0.5), jnp.full((*lower.shape[:-1], 1), 0.25))

    def logits(bias: Any, components: Any, taps: Any) -> Any:
        return {site: jnp.tanh(taps[site] @ components[site].V) + bias for site in components}

    own = ImportanceFn(lambda key, sites: jnp.float32(0.5), logits)  # noqa: ARG005
    product = product_of(IMPORTANCE_FN)
    product = Decomposition(product.components, own.init(KEY, {}))
    terms = {
        "size": Term(size, schedule.constant(0.5)),
        "game": Term(game, schedule.constant(0.0), Persistent(Scope("c"), schedule.constant(1.0), 0, "sign")),
        "half": reconstruction(schedule.constant(1.0), Reconstruction(all_sites(NAMES), source=half)),
    }
    state = state_of(terms, product=product, optimizers=PLAIN)
    new, metrics = once(make_step(model_of(), own, terms, PLAIN, sampler(), KEY), state)
    np.testing.assert_allclose(
        metrics["size"], sum((np.float64(f.V) ** 2).sum() for f in product.components.values()), rtol=1e-5
    )
    for source in new.training.adversaries["game"]["sources"].values():
        np.testing.assert_array_equal(source, np.append(np.ones(source.size - 1), 0)[None])
    assert float(new.decomposition.ci_fn) != 0.5
    x, exact = np.float64(sampler()(key_of_data(0))), jax.tree.map(np.float64, PARAMS)
    W = {"one": exact["linear1"]["w"], "two": exact["linear2"]["w"]}
    inputs, y = {"one": x, "two": x @ W["one"]}, x
    for site in NAMES:
        V, U = jax.tree.map(np.float64, product.components[site])
        g = oracle.lower(np.tanh(inputs[site] @ V) + 0.5)
        y = oracle.site_output(y, W[site], V, U, oracle.mask(g, 0.5), 0.25, np.array(True))
    out, clean = (np.maximum(z + exact["~"]["b"], 0) for z in (y, x @ W["one"] @ W["two"]))
    np.testing.assert_allclose(metrics["half"], oracle.mean_squared_error(out, clean), rtol=1e-4)


@pytest.mark.parametrize(("name", "same"), [("masked", True), ("minimality", True), ("frequency", False)])
def test_the_gradient_of_a_batch_is_the_mean_over_its_halves_but_for_the_frequency(name, same):
    source = masks.SOURCES["ci_masked"]
    terms = {
        "masked": reconstruction(schedule.constant(1.0), Reconstruction(all_sites(NAMES), source=source)),
        **minimality(schedule.constant(1.0), schedule.constant(1.0), penalty=POWER, reference=32.0),
    }
    chosen, batch = {name: terms[name]}, sampler()(KEY)

    def gradient(part: Any) -> Any:
        state = state_of(chosen, optimizers=PLAIN)
        step = make_step(model_of(part.shape[:1]), IMPORTANCE_FN, chosen, PLAIN, lambda _: part, KEY)
        return change(state, once(step, state)[0])

    whole, halves = gradient(batch), [gradient(batch[:3]), gradient(batch[3:])]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    far = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), whole, mean)))
    large = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(whole))
    assert large > 1e-3
    assert (far < 1e-5 * large) if same else (far > 1e-2 * large)


def test_a_clip_leaves_a_small_gradient_as_it_is_and_scales_a_large_one_whole():
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[-4.0]])}
    small = clip(5.1).update(gradient, optax.EmptyState())[0]
    equal(small, gradient)
    large = clip(0.5).update(gradient, optax.EmptyState())[0]
    want = oracle.clipped(jax.tree.map(np.float64, gradient), 0.5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), large, want)
    assert float(jnp.linalg.norm(jnp.concatenate([x.ravel() for x in large.values()]))) == pytest.approx(0.5, rel=1e-5)


def test_buffers_do_not_decay():
    optimizer = adamw(schedule.constant(0.1), weight_decay=0.5)
    for values, decayed in (({"m": {"w": 2.0, "frequencies": 2.0}}, {"m": {"w": 1.9, "frequencies": 2.0}}), (2.0, 1.9)):
        params = jax.tree.map(jnp.float32, values)
        found, _ = apply_update(optimizer, jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, decayed)


def test_the_site_names_of_the_tests_are_the_oracle_s():
    assert tuple(SITES) == oracle.SITES
