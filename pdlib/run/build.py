"""Makes what a specification's tables name: target, importance function, terms, optimizers; computes nothing."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pdlib.errors import NoSuchSite, RunSpecError
from pdlib.method import importance, losses, masks, objective, reconstruction, routing, schedule, transformer
from pdlib.method.adversary import Fresh, Persistent, Scope
from pdlib.method.objective import Term
from pdlib.method.optimizers import Optimizers, adamw
from pdlib.rewrite.sites import no_such
from pdlib.run import tables
from pdlib.run.tables import RunSpec
from pdlib.targets import llama, resid_mlp, tms
from pdlib.targets.task import Task
from pdlib.targets.tokens import Tokens


def task_of(spec: RunSpec) -> Task:
    """The target with what a run needs around it.

    Raises:
        RunSpecError: a function of the user's is not there, or returns something else.
    """
    table = spec.target
    if isinstance(table, tables.FunctionSpec):
        return _call(table, "target", Task)
    if isinstance(table, tables.LlamaSpec | tables.LlamaSimpleMlpSpec):
        return _language_model(table)
    pretraining = table.pretraining.model_dump()
    if isinstance(table, tables.TmsSpec):
        shape = tms.Shape(table.features, table.hidden, table.probability, table.identity)
        return tms.task(shape, tms.Pretraining(**pretraining))
    shape = resid_mlp.Shape(table.features, table.width, table.layers, table.neurons, table.probability)
    return resid_mlp.task(shape, resid_mlp.Pretraining(**pretraining))


def select_names(globs: Sequence[str], names: Sequence[str], *, what: str) -> tuple[str, ...]:
    """The names that globs fit, in the order of the names; `!glob` leaves out.

    Raises:
        NoSuchSite: a glob fits none, or nothing is left.
    """
    wanted = [glob for glob in globs if not glob.startswith("!")]
    unwanted = [glob[1:] for glob in globs if glob.startswith("!")]
    missing = [g for g in (*wanted, *unwanted) if not any(fnmatchcase(name, g) for name in names)]
    if missing:
        raise NoSuchSite("\n".join(no_such(what, glob, names) for glob in missing))
    found = [
        name
        for name in names
        if any(fnmatchcase(name, g) for g in wanted) and not any(fnmatchcase(name, g) for g in unwanted)
    ]
    if not found:
        raise NoSuchSite(f"the globs {list(globs)} leave no {what}; there are {', '.join(names)}")
    return tuple(found)


def counts_of(table: tables.DecompositionSpec, sites: Sequence[str]) -> dict[str, int]:
    """C of each site.

    Raises:
        NoSuchSite: a glob of `C_of` fits no site.
    """
    counts = dict.fromkeys(sites, table.C)
    for glob, C in table.C_of.items():
        counts |= dict.fromkeys(select_names([glob], sites, what="site of decomposition.C_of"), C)
    return counts


def importance_of(
    table: tables.ImportanceSpec, sites: Sequence[str], tap_widths: Mapping[str, int]
) -> importance.ImportanceFn:
    """The importance function.

    Args:
        table: what the specification says.
        sites: the decomposed sites.
        tap_widths: width of each tap that is no site.
    """
    if isinstance(table, tables.PerComponentSpec):
        return importance.per_component_mlp(table.hidden)
    if isinstance(table, tables.LayerwiseSpec):
        return importance.layerwise_mlp(table.hidden)
    if isinstance(table, tables.GlobalSpec):
        return importance.global_mlp(table.hidden)
    if isinstance(table, tables.FunctionSpec):
        return _call(table, "importance", importance.ImportanceFn)
    names = [*sites, *tap_widths]
    chunks: list[transformer.Chunk] = []
    for chunk in table.chunks:
        members = select_names(chunk.sites, sites, what="site of importance.chunks")
        taps = select_names(chunk.taps, names, what="tap of importance.chunks") if chunk.taps else members
        chunks.append(transformer.Chunk(taps, members))
    sizes = transformer.Sizes(table.width, table.blocks, table.heads, table.hidden)
    return transformer.chunkwise_transformer(chunks, sizes, tap_widths=tap_widths)


def terms_of(spec: RunSpec, sites: Sequence[str]) -> dict[str, Term]:
    """The objective, by the names of its terms."""
    steps = spec.training.steps
    found: dict[str, Term] = {}
    for name, table in spec.terms.items():
        if isinstance(table, tables.FaithfulnessSpec):
            found[name] = objective.faithfulness(schedule.constant(table.coefficient), relative=table.relative)
        elif isinstance(table, tables.MinimalitySpec):
            parts = _minimality(table, steps)
            found |= {name if part == "minimality" else part: term for part, term in parts.items()}
        elif isinstance(table, tables.ReconstructionSpec):
            term = _reconstruction(name, table, sites, steps)
            found[name] = objective.reconstruction(schedule.constant(table.coefficient), term)
        else:
            value: Callable[..., Any] = _call(table, f"terms.{name}", Callable)
            found[name] = Term(value, schedule.constant(table.coefficient))
    return found


def optimizers_of(spec: RunSpec) -> Optimizers:
    """AdamW for V and U, and for the importance function."""

    def one(table: tables.OptimizerSpec) -> Any:
        rate = schedule.cosine(table.learning_rate, spec.training.steps, final_fraction=table.final_fraction)
        return adamw(rate, weight_decay=table.weight_decay, max_norm=table.max_norm)

    return Optimizers(one(spec.optimizers.components), one(spec.optimizers.ci_fn))


def _language_model(table: tables.LlamaSpec | tables.LlamaSimpleMlpSpec) -> Task:
    if table.heads % table.groups or table.width % (2 * table.heads):
        raise RunSpecError(
            f"target: {table.groups} groups have to divide {table.heads} heads, and twice the heads the width, "
            f"{table.width}; change target.groups, target.heads or target.width"
        )
    sizes = table.model_dump(exclude={"kind", "weights", "tokens", "length"})
    shape = llama.Shape(**sizes, simple=table.kind == "llama_simple_mlp")
    return llama.task(shape, Path(table.weights), Tokens(Path(table.tokens), table.length, table.vocabulary))


def _minimality(table: tables.MinimalitySpec, steps: int) -> dict[str, Term]:
    final = table.parameter if table.final_parameter is None else table.final_parameter
    parameter = schedule.anneal(table.parameter, final, steps)
    penalty = losses.power_penalty if table.penalty == "power" else losses.smooth_l0

    def ramp(coefficient: float) -> schedule.Schedule:
        return schedule.ramp(coefficient, steps, fraction=table.ramp)

    frequency = None if table.frequency is None else ramp(table.frequency)
    return objective.minimality(
        ramp(table.coefficient), frequency, penalty=penalty(parameter), reference=table.reference
    )


def _reconstruction(
    name: str, table: tables.ReconstructionSpec, sites: Sequence[str], steps: int
) -> reconstruction.Reconstruction:
    plans = {"all": reconstruction.all_sites, "layerwise": reconstruction.layerwise}
    plan = reconstruction.groups(table.group_size) if table.group_size is not None else plans[table.plan]
    if table.routing_probability is not None:
        route = routing.bernoulli(table.routing_probability)
    else:
        route = routing.everywhere if table.routing == "everywhere" else routing.uniform_k_subset
    known = masks.SOURCES.get(table.source)
    source = known if known is not None else _resolve(table.source, f"terms.{name}.source", masks.SOURCES)
    return reconstruction.Reconstruction(plan(sites), route, source, _adversary(table.adversary, steps), table.fraction)


def _adversary(table: tables.AdversarySpec | None, steps: int) -> Fresh | Persistent | None:
    if table is None:
        return None
    scope = Scope(table.scope, table.sources)
    if isinstance(table, tables.FreshSpec):
        return Fresh(scope, table.steps, table.learning_rate)
    rate = schedule.warm_up(table.learning_rate, steps, fraction=table.warm_up)
    return Persistent(scope, rate, table.ascents, table.ascent, table.sigmoid, jnp.dtype(table.dtype))


def _call(table: tables.FunctionSpec, where: str, kind: Any) -> Any:
    made = _resolve(table.function, f"{where}.function", ())(**table.arguments)
    if not isinstance(made, kind):
        raise RunSpecError(
            f"{where}.function: {table.function}(…) returned {type(made).__name__}, want {kind.__name__}; see README"
        )
    return made


def _resolve(name: str, where: str, known: Sequence[str] | Mapping[str, Any]) -> Any:
    """A function of the user's by `module:function`, found where Python finds modules and then in this folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    hint = f"one of {', '.join(known)}, or " if known else ""
    if ":" not in name:
        raise RunSpecError(f"{where}: {name!r} is not known; write {hint}module:function")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise RunSpecError(f"{where}: {name!r}: {error}; write {hint}module:function that {here} imports") from error
