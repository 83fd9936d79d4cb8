"""One training step once more, in float64 NumPy and from the method's formulas alone, for a model of two sites.

The model is `ReLU(x W_one W_two + b)`. Gradients are central differences; what JAX draws comes in as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

SITES = ("one", "two")
Arrays = dict[str, np.ndarray]
_WIDTH = 1e-6


class Adversary(NamedTuple):
    """`scope` with its `count`, and how sources climb: `sign` with a fixed rate and afresh each time, if `fresh`."""

    scope: str
    rate: float
    ascents: int
    count: int = 1
    sign: bool = False
    sigmoid: bool = False
    fresh: bool = False


class Forward(NamedTuple):
    """What one masked forward of a term drew.

    Attributes:
        live: the sites that run decomposed.
        routes: where, `[*positions, 1]`; everywhere for a site that is missing.
        sources: `s [*positions, C]` and `δ [*positions, 1]` of each live site.
        chosen: which elements of the batch are the adversary's, `[batch, 1, …]`.
        start: where the sources of a fresh adversary begin, `[*scope, C + 1]`.
    """

    live: tuple[str, ...]
    routes: Mapping[str, np.ndarray] = {}
    sources: Mapping[str, tuple[Any, Any]] = {}
    chosen: np.ndarray | None = None
    start: Mapping[str, np.ndarray] = {}


class Term(NamedTuple):
    """One reconstruction term: the mean over its forwards."""

    coefficient: float
    forwards: tuple[Forward, ...]
    adversary: Adversary | None = None


class Problem(NamedTuple):
    """All that one step depends on but its state.

    Attributes:
        x: the batch, `[*positions, d_in]`.
        W, b: the frozen model.
        logits: `(ci_fn, V of each site, inputs of each site) → logits of each site`.
        cost: the penalty of minimality.
        reference: its number of positions.
        faithfulness, minimality, frequency: coefficients.
        terms: the reconstruction terms, by name.
        rate: the learning rate of both optimizers.
        max_norm: of the gradient by V and U.
        weight_decay: of the importance function.
    """

    x: np.ndarray
    W: Arrays
    b: np.ndarray
    logits: Callable[[Any, Arrays, Arrays], Arrays]
    cost: Callable[[np.ndarray], np.ndarray]
    reference: float
    faithfulness: float
    minimality: float
    frequency: float
    terms: Mapping[str, Term]
    rate: float
    max_norm: float
    weight_decay: float


# Squashings


def lower(x: np.ndarray) -> np.ndarray:
    return np.clip(x, 0, 1)


def lower_pull(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The gradient by x, given the one by `lower(x)`: a rule of its own, not the derivative."""
    result = np.zeros_like(x)
    inside, dead = (x > 0) & (x <= 1), (x <= 0) & (gradient < 0)
    result[inside] = gradient[inside]
    result[dead] = 0.01 * gradient[dead]
    return result


def upper(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, 0.0, np.where(x > 1, 1 + 0.01 * (x - 1), x))


def upper_pull(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    return gradient * np.where(x < 0, 0.0, np.where(x > 1, 0.01, 1.0))


# Importance functions


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def per_component_logits(ci_fn: Any, V: Arrays, inputs: Arrays) -> Arrays:
    """A small MLP for each component, on the number `v_c · x`."""
    found: Arrays = {}
    for site in SITES:
        p, inner = ci_fn[site], inputs[site] @ V[site]
        columns = [
            gelu(inner[..., c, None] * p["w_in"][c] + p["b_in"][c]) @ p["w_out"][c] + p["b_out"][c]
            for c in range(inner.shape[-1])
        ]
        found[site] = np.stack(columns, axis=-1)
    return found


def _two_layers(p: Arrays, x: np.ndarray) -> np.ndarray:
    return gelu(x @ p["w_0"] + p["b_0"]) @ p["w_1"] + p["b_1"]


def layerwise_logits(ci_fn: Any, V: Arrays, inputs: Arrays) -> Arrays:
    """An MLP for each site, on the site's input."""
    del V
    return {site: _two_layers(ci_fn[site], inputs[site]) for site in SITES}


def global_logits(ci_fn: Any, V: Arrays, inputs: Arrays) -> Arrays:
    """One MLP on the inputs of all sites."""
    logits = _two_layers(ci_fn["global_mlp"], np.concatenate([inputs["one"], inputs["two"]], axis=-1))
    first = V["one"].shape[1]
    return {"one": logits[..., :first], "two": logits[..., first:]}


# The masked forward


def mask(g: np.ndarray, s: Any) -> np.ndarray:
    return g + (1 - g) * s


def site_output(x: np.ndarray, W: np.ndarray, V: np.ndarray, U: np.ndarray, m: Any, delta: Any, route: Any) -> Any:
    y = ((x @ V) * m) @ U + delta * (x @ (W - V @ U))
    return np.where(route, y, x @ W)


def model(problem: Problem, components: Mapping[str, Any], masks: Mapping[str, Any]) -> np.ndarray:
    """The output; a site without `(m, δ, route)` runs frozen."""
    y = problem.x
    for site in SITES:
        V, U = components[site]
        W = problem.W[site]
        y = site_output(y, W, V, U, *masks[site]) if site in masks else y @ W
    return np.maximum(y + problem.b, 0)


# Losses


def mean_squared_error(out: np.ndarray, clean: np.ndarray) -> float:
    return float(np.sum((out - clean) ** 2) / out.size)


def faithfulness(W: Arrays, components: Mapping[str, Any]) -> float:
    squares = sum(np.sum((W[site] - components[site][0] @ components[site][1]) ** 2) for site in SITES)
    return float(squares / sum(W[site].size for site in SITES))


def minimality(problem: Problem, u: Arrays) -> tuple[float, float]:
    """Activity and frequency."""
    activity = frequency = 0.0
    for site in SITES:
        f = problem.cost(u[site]).reshape(-1, u[site].shape[-1]).mean(axis=0)
        activity += float(f.sum())
        frequency += float((f * np.log2(1 + problem.reference * f)).sum())
    return activity, frequency


# Adversaries


def spread(leaves: Arrays, how: Adversary, positions: tuple[int, ...]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`s` and `δ` of each site, written out for every element of the batch and every position."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for site, leaf in leaves.items():
        value = 1 / (1 + np.exp(-leaf)) if how.sigmoid else leaf
        full = np.empty((*positions, leaf.shape[-1]))
        for index in np.ndindex(*positions):
            element = {"c": 0, "bc": index[0], "sc": 0, "bsc": index[0], "nsc": index[0] % how.count}[how.scope]
            rest = index[1:] if how.scope in ("sc", "bsc", "nsc") else (0,) * len(index[1:])
            full[index] = value[(element, *rest)]
        found[site] = full[..., :-1], full[..., -1:]
    return found


def ascend(state: dict[str, Any], gradient: Arrays, how: Adversary) -> dict[str, Any]:
    """One ascent of a persistent adversary."""
    if how.sign:
        moved = {site: value + how.rate * np.sign(gradient[site]) for site, value in state["sources"].items()}
        return {"sources": moved if how.sigmoid else {site: np.clip(x, 0, 1) for site, x in moved.items()}}
    count = state["count"] + 1
    sources, m, v = {}, {}, {}
    for site, value in state["sources"].items():
        m[site] = 0.5 * state["m"][site] + 0.5 * gradient[site]
        v[site] = 0.99 * state["v"][site] + 0.01 * gradient[site] ** 2
        new = value + how.rate * (m[site] / (1 - 0.5**count)) / (np.sqrt(v[site] / (1 - 0.99**count)) + 1e-8)
        sources[site] = new if how.sigmoid else np.clip(new, 0, 1)
    return {"sources": sources, "m": m, "v": v, "count": count}


def attack(loss: Callable[[Arrays], float], how: Adversary, start: Arrays) -> Arrays:
    """Where a fresh adversary ends."""
    leaves = dict(start)
    for _ in range(how.ascents):
        gradient = differences(loss, leaves)
        leaves = {site: np.clip(x + how.rate * np.sign(gradient[site]), 0, 1) for site, x in leaves.items()}
    return leaves


# Reconstruction terms


def forward_value(
    problem: Problem, components: Any, g: Arrays, forward: Forward, hostile: Mapping[str, Any] | None
) -> float:
    """The loss of one forward, with the sources of an adversary where it has one."""
    masks: dict[str, Any] = {}
    for site in forward.live:
        route = forward.routes.get(site, np.array(True))
        if hostile is None:
            s, delta = forward.sources[site]
        elif forward.chosen is None:
            s, delta = hostile[site]
        else:
            ordinary = forward.sources[site]
            s, delta = (np.where(forward.chosen, a, b) for a, b in zip(hostile[site], ordinary, strict=True))
            route = route | forward.chosen
        masks[site] = mask(g[site], s), delta, route
    return mean_squared_error(model(problem, components, masks), model(problem, components, {}))


def term_value(problem: Problem, components: Any, g: Arrays, term: Term, found: list[Arrays]) -> float:
    """The mean over forwards, under sources that an adversary found for each."""
    positions, values = problem.x.shape[:-1], []
    for index, forward in enumerate(term.forwards):
        hostile = spread(found[index], term.adversary, positions) if term.adversary is not None else None
        values.append(forward_value(problem, components, g, forward, hostile))
    return float(np.mean(values))


def worst_case(problem: Problem, components: Any, g: Arrays, how: Adversary, leaves: Arrays) -> float:
    """The loss with every site live and routed everywhere: what ascents before the update climb."""
    return forward_value(problem, components, g, Forward(SITES), spread(leaves, how, problem.x.shape[:-1]))


# Gradients


def differences(value: Callable[[Any], float], at: Any) -> Any:
    """Central differences of a number by every array of a nested dictionary or tuple."""
    if isinstance(at, dict):
        return {name: differences(lambda x, n=name: value({**at, n: x}), at[name]) for name in at}
    if isinstance(at, tuple):
        return tuple(differences(lambda x, i=i: value((*at[:i], x, *at[i + 1 :])), at[i]) for i in range(len(at)))
    gradient = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        up, down = at.copy(), at.copy()
        up[index] += _WIDTH
        down[index] -= _WIDTH
        gradient[index] = (value(up) - value(down)) / (2 * _WIDTH)
    return gradient


# Optimizers


def leaves_of(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves_of(tree[name])]
    return [leaf for part in tree for leaf in leaves_of(part)] if isinstance(tree, tuple) else [tree]


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of arrays, over trees alike."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: mapped(function, *(tree[name] for tree in trees)) for name in first}
    if isinstance(first, tuple):
        return tuple(mapped(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def clipped(gradient: Any, max_norm: float) -> Any:
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in leaves_of(gradient)))
    return mapped(lambda leaf: leaf * min(1.0, max_norm / (norm + 1e-6)), gradient)


def adamw(values: Any, gradient: Any, moments: Any, rate: float, weight_decay: float) -> tuple[Any, Any]:
    """New values and `(m, v, count)`."""
    m, v, count = moments
    count += 1
    m = mapped(lambda old, g: 0.9 * old + 0.1 * g, m, gradient)
    v = mapped(lambda old, g: 0.999 * old + 0.001 * g**2, v, gradient)

    def move(x: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        direction = (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return x - rate * (direction + weight_decay * x)

    return mapped(move, values, m, v), (m, v, count)


# The step


def step(problem: Problem, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The new state and the metrics.

    Args:
        problem: see `Problem`.
        state: `components` {site: (V, U)}, `ci_fn`, `components_moments` and `ci_fn_moments` (m, v, count), and
            `adversaries` {term: state}.
    """
    components, ci_fn = state["components"], state["ci_fn"]
    inputs = {"one": problem.x, "two": problem.x @ problem.W["one"]}

    def logits_of(components: Any, ci_fn: Any) -> Arrays:
        return problem.logits(ci_fn, {site: components[site][0] for site in SITES}, inputs)

    logits = logits_of(components, ci_fn)
    g, u = mapped(lower, logits), mapped(upper, logits)

    adversaries: dict[str, Any] = {}
    for name, before in state["adversaries"].items():
        how, after = problem.terms[name].adversary, before
        for _ in range(how.ascents):
            slope = differences(lambda leaves, h=how: worst_case(problem, components, g, h, leaves), after["sources"])
            after = ascend(after, slope, how)
        adversaries[name] = after

    found = {name: _found(problem, components, g, term, adversaries.get(name)) for name, term in problem.terms.items()}

    def values_of(components: Any, g: Arrays, u: Arrays) -> dict[str, float]:
        activity, frequency = minimality(problem, u)
        values = {n: term_value(problem, components, g, term, found[n]) for n, term in problem.terms.items()}
        return values | {
            "faithfulness": faithfulness(problem.W, components),
            "minimality": activity,
            "frequency": frequency,
        }

    coefficients = {name: term.coefficient for name, term in problem.terms.items()} | {
        name: getattr(problem, name) for name in ("faithfulness", "minimality", "frequency")
    }

    def total(parts: Any) -> float:
        return sum(coefficients[name] * value for name, value in values_of(*parts).items())

    direct, by_g, by_u = differences(total, (components, g, u))
    by_logits = {s: lower_pull(logits[s], by_g[s]) + upper_pull(logits[s], by_u[s]) for s in SITES}

    def pulled(parts: Any) -> float:
        return float(sum(np.sum(by_logits[site] * x) for site, x in logits_of(*parts).items()))

    through, by_ci_fn = differences(pulled, (components, ci_fn))
    by_components = mapped(np.add, direct, through)

    climbed: dict[str, Any] = {}
    for name, after in adversaries.items():
        term = problem.terms[name]
        slope = differences(
            lambda leaves, t=term: term_value(problem, components, g, t, [leaves] * len(t.forwards)), after["sources"]
        )
        climbed[name] = ascend(after, slope, term.adversary)

    moments = state["components_moments"], state["ci_fn_moments"]
    by_components = clipped(by_components, problem.max_norm)
    new_components, components_moments = adamw(components, by_components, moments[0], problem.rate, 0.0)
    new_ci_fn, ci_fn_moments = adamw(ci_fn, by_ci_fn, moments[1], problem.rate, problem.weight_decay)
    new = {
        "components": new_components,
        "ci_fn": new_ci_fn,
        "components_moments": components_moments,
        "ci_fn_moments": ci_fn_moments,
        "adversaries": climbed,
    }
    values = values_of(components, g, u)
    active = {f"l0/{site}": float((g[site] > 0).sum(axis=-1).mean()) for site in SITES}
    return new, {"total": total((components, g, u)), **values, **active}


def _found(problem: Problem, components: Any, g: Arrays, term: Term, kept: Any) -> list[Arrays]:
    """The sources of an adversary in each forward, for the value and its gradient."""
    if term.adversary is None:
        return []
    if not term.adversary.fresh:
        return [kept["sources"]] * len(term.forwards)
    how, positions = term.adversary, problem.x.shape[:-1]
    return [
        attack(
            lambda leaves, f=forward: forward_value(problem, components, g, f, spread(leaves, how, positions)),
            how,
            dict(forward.start),
        )
        for forward in term.forwards
    ]
