"""The runs that `step.py` measures, whole and in parts, and the products that each part needs; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flops import Attention, Network, Product, Products

from pdlib.method.model import Pass, cast, learn
from pdlib.method.optimizers import apply_update
from pdlib.method.reconstruction import worst_case
from pdlib.method.step import make_step
from pdlib.run.build import task_of
from pdlib.run.problem import Problem, pretrain
from pdlib.run.spec import load_run_spec, parse_run_spec
from pdlib.targets import llama

PUBLISHED = {"tms_5-2": (4096, 20), "tms_40-10": (4096, 200), "resid_mlp_1": (2048, 100)}  # batch and C
_PRODUCTION = {"steps": 10_000, "batch": 1}
LANGUAGE = {
    "pile_4": {
        "target": {"kind": "llama_simple_mlp", "length": 64},
        "decomposition": {"C": 512, "sites": ["h.2.*"]},
        "importance": {"width": 256, "blocks": 2, "heads": 4, "hidden": 1024},
        "training": {"steps": 10_000, "batch": 2},
    },
    "llama_8b": {
        "target": {"kind": "llama", "length": 512},
        "decomposition": {"C": 24_576, "sites": ["layers.18.mlp.*"]},
        "importance": {"width": 4096, "blocks": 4, "heads": 64, "hidden": 16_384},
        "training": _PRODUCTION,
    },
}
LANGUAGE["llama_8b_half"] = LANGUAGE["llama_8b"] | {"training": {**_PRODUCTION, "compute_dtype": "bfloat16"}}
TERMS = {  # of the production run
    "faithfulness": {"kind": "faithfulness", "coefficient": 1e5},
    "minimality": {"kind": "minimality", "coefficient": 5e-6, "frequency": 1e-6, "reference": 2.0**20},
    "stochastic": {"kind": "reconstruction", "coefficient": 0.5, "routing": "subset"},
    "persistent": {"kind": "reconstruction", "coefficient": 0.5, "adversary": {"kind": "persistent", "scope": "sc"}},
}


def problem_of(name: str, changes: Sequence[str] = (), *, abstract: bool = False) -> Problem:
    """A run of this name; toy targets are hardly trained, and weights of language models are drawn or abstract."""
    if name not in LANGUAGE:
        batch, C = PUBLISHED[name]
        sizes = [f"training.batch={batch}", f"decomposition.C={C}", *changes]
        spec = load_run_spec(name, overrides=["target.pretraining.steps=1", *sizes])
        return Problem(spec, task_of(spec), pretrain(spec))
    tables = LANGUAGE[name]
    target = {**tables["target"], "weights": "", "tokens": ""}
    importance = {**tables["importance"], "kind": "transformer"}
    rest = {"name": name, "terms": TERMS, "optimizers": {"components": {"max_norm": 0.01}}, "warm_up": {"steps": 0}}
    spec = parse_run_spec({**tables, **rest, "target": target, "importance": importance}, source=name)
    shape = shape_of(spec)
    params: Any = llama.abstract(shape, spec.training.compute_dtype)
    if not abstract:
        leaves, structure = jax.tree.flatten(params)
        drawn = [0.02 * jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
        params = jax.tree.unflatten(structure, drawn)
    return Problem(spec, task_of(spec), params)


def shape_of(spec: Any) -> Any:
    """The sizes of a language model."""
    sizes = spec.target.model_dump(exclude={"kind", "weights", "tokens", "length"})
    return llama.Shape(**sizes, simple=spec.target.kind == "llama_simple_mlp")


def network_of(problem: Problem) -> Network:
    """The target as matrix products."""
    target: Any = problem.spec.target
    batch = problem.spec.training.batch
    if target.kind == "tms":
        pairs = [("linear1", target.features, target.hidden), ("linear2", target.hidden, target.features)]
        parts = [Product(name, stage, *sizes) for stage, (name, *sizes) in enumerate(pairs)]
        return Network(tuple(parts), batch, 1, problem.counts)
    if target.kind == "resid_mlp":
        d, n = target.width, target.neurons
        pairs = [("embedding", target.features, d)]
        for i in range(target.layers):
            pairs += [(f"mlp_in_{i}", d, n), (f"mlp_out_{i}", n, d)]
        pairs += [("unembedding", d, target.features)]
        parts = [Product(name, stage, *sizes) for stage, (name, *sizes) in enumerate(pairs)]
        return Network(tuple(parts), batch, 1, problem.counts)
    d, kv, simple = target.width, target.width // target.heads * target.groups, target.kind == "llama_simple_mlp"
    block, attention, ups = ("h", "attn", ("c_fc",)) if simple else ("layers", "self_attn", ("gate_proj", "up_proj"))
    found: list[Product | Attention] = []
    for i in range(target.layers):
        own, at = f"{block}.{i}", 5 * i
        found += [Product(f"{own}.{attention}.{p}_proj", at, d, d if p == "q" else kv) for p in "qkv"]
        found += [Attention(at + 1, d), Product(f"{own}.{attention}.o_proj", at + 2, d, d)]
        found += [Product(f"{own}.mlp.{up}", at + 3, d, target.inner) for up in ups]
        found += [Product(f"{own}.mlp.down_proj", at + 4, target.inner, d)]
    found += [Product("head", 5 * target.layers, d, target.vocabulary)]
    return Network(tuple(found), batch * target.length, target.length, problem.counts)


def needed(problem: Problem) -> dict[str, Products]:
    """The products that each part of a step needs."""
    table: Any = problem.spec.importance
    network = network_of(problem)
    if table.kind == "transformer":
        taps = sum(site.d_in for site in problem.shapes.values())
        importance = network.transformer(taps, table.width, table.blocks, table.hidden)
    else:
        importance = network.per_component_mlp(table.hidden)
    found: dict[str, Products] = {"clean and importance": network.clean() | importance}
    for name, term in problem.terms.items():
        plan = getattr(getattr(term.value, "__self__", None), "plan", ())
        found[name] = network.faithfulness() if name == "faithfulness" else {}
        for live in plan:
            found[name] |= network.masked(live, f"{name} {live}")
        if term.adversary is not None:
            ascents = [network.masked(problem.names, f"{name} {i}", learn=False) for i in range(term.adversary.ascents)]
            found[f"{name}, each ascent"] = ascents[0]
            found[f"{name}, ascents"] = {key: flops for ascent in ascents for key, flops in ascent.items()}
    return found


def draw(problem: Problem) -> Callable[[Any], Any]:
    """`key → batch` of the run's shape; tokens are drawn evenly."""
    target: Any = problem.spec.target
    batch, task = problem.abstract_batch, problem.task
    if (sample := task.sample) is not None:
        return lambda key: sample(key, problem.spec.training.batch)
    return lambda key: jax.random.randint(key, batch.shape, 0, target.vocabulary)


def parts_of(problem: Problem) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
    """`(product, params, batch) → what they share`, and the parts of a step as functions of (shared, state)."""
    model, dtype, optimizers = problem.model, problem.dtype, problem.optimizers

    def share(product: Any, params: Any, batch: Any) -> Any:
        frozen = cast(params, dtype)
        clean = jax.lax.stop_gradient(model.clean(frozen, batch))
        return Pass(learn(product, clean.taps, problem.importance, dtype), clean, params, frozen, 0)

    def first(shared: Any, state: Any, batch: Any) -> Any:
        clean = model.clean(shared.frozen, batch)
        learned, pull = jax.vjp(lambda p: learn(p, clean.taps, problem.importance, dtype), state.decomposition)
        return clean.output, learned, pull(jax.lax.optimization_barrier(shared.learned))

    def of_term(term: Any, name: str) -> Callable[..., Any]:
        def part(shared: Any, state: Any, batch: Any) -> Any:
            del batch
            adversary = state.training.adversaries.get(name)
            leaves = {} if adversary is None else term.adversary.leaves(adversary)

            def value(learned: Any, leaves: Any) -> Any:
                drawn = term.adversary.drawn(leaves, shared.positions) if term.adversary else None
                return term.value(model, shared._replace(learned=learned), problem.key, drawn)

            return jax.value_and_grad(value, (0, 1))(shared.learned, leaves)

        return part

    def of_ascent(adversary: Any, name: str) -> Callable[..., Any]:
        def part(shared: Any, state: Any, batch: Any) -> Any:
            del batch

            def value(leaves: Any) -> Any:
                return worst_case(model, shared, adversary.drawn(leaves, shared.positions))

            kept = state.training.adversaries[name]
            return adversary.climb(kept, jax.grad(value)(adversary.leaves(kept)), 0)

        return part

    def update(shared: Any, state: Any, batch: Any) -> Any:
        del shared, batch
        product, process = state
        ci_fn = apply_update(optimizers.ci_fn, product.ci_fn, process.ci_fn_opt_state, product.ci_fn)
        own = product.components
        return ci_fn, apply_update(optimizers.components, own, process.components_opt_state, own)

    found: dict[str, Callable[..., Any]] = {"clean and importance": first}
    for name, term in problem.terms.items():
        found[name] = of_term(term, name)
        if term.adversary is not None:
            found[f"{name}, each ascent"] = of_ascent(term.adversary, name)
    return share, found | {"update": update}


def step_of(problem: Problem) -> Any:
    """One update, as `Problem.loop` has it, on one device and with batches that are drawn."""
    return make_step(
        problem.model,
        problem.importance,
        problem.terms,
        problem.optimizers,
        draw(problem),
        problem.key,
        compute_dtype=problem.dtype,
    )
