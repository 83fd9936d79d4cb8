"""Each value of each table changes the target, the start or the program of a run, for every kind of table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdlib.errors import NoSuchSite, RunSpecError
from pdlib.run import tables
from pdlib.run.build import task_of
from pdlib.run.loop import train
from pdlib.run.metrics import read_rows
from pdlib.run.problem import Inputs, Problem, pretrain
from pdlib.run.spec import RunSpec, load_run_spec
from pdlib.targets.llama import Shape
from pdlib.targets.task import Task
from tests.run.test_run import SMALL, Silent, both_items
from tests.targets.files import checkpoint, write_checkpoint, write_tokens

TINY = ("target.pretraining.steps=2", "target.pretraining.batch=4", "training.batch=8", "training.steps=8")
TOKENS = (
    'target={kind="function", function="tests.run.own:language", arguments={width=4}}',
    'importance={kind="transformer", width=4, blocks=1, heads=1, hidden=4, '
    'chunks=[{sites=["up", "down"], taps=["stream"]}]}',
    "decomposition.init='normal'",
    'terms.hostile={kind="reconstruction", adversary={kind="persistent", ascents=1}}',
    "training.batch=8",
    "training.steps=8",
)
TERM = "kind='reconstruction'"
MODEL = (
    "weights='w.safetensors', tokens='t.npy', vocabulary=13, width=8, heads=2, groups=1, inner=12, layers=1, length=4, "
    "base=1e6"
)
LANGUAGE = (
    'importance={kind="layerwise_mlp", hidden=[3]}', "decomposition.init='normal'", "decomposition.C=4",
    "training.batch=8", "training.steps=8",
)  # fmt: skip
OTHER_MODEL = {
    "target.weights": "'v.safetensors'", "target.tokens": "'s.npy'", "target.length": "5", "target.vocabulary": "14",
    "target.width": "12", "target.layers": "2", "target.heads": "1", "target.groups": "2", "target.inner": "11",
    "target.base": "3.0", "target.epsilon": "0.1",
}  # fmt: skip
# what a run is → value of it → another
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "tms": ("tms_5-2", (
        *TINY, "decomposition.C=6", "importance.hidden=2", "warm_up.steps=2", "terms.minimality.final_parameter=0.5",
    ), {
        "seed": "3", "target.features": "6", "target.hidden": "3", "target.probability": "0.5",
        "target.identity": "true",
        "target.pretraining.attempts": "2", "target.pretraining.steps": "3", "target.pretraining.batch": "5",
        "target.pretraining.learning_rate": "0.1", "target.pretraining.weight_decay": "0.9",
        "decomposition.C": "7", "decomposition.C_of": '{"*1"=7}', "decomposition.sites": '["linear1"]',
        "decomposition.init": '"normal"', "importance.hidden": "3",
        "terms.faithfulness.coefficient": "3.0", "terms.faithfulness.relative": "true",
        "terms.minimality.coefficient": "0.1", "terms.minimality.ramp": "0.25",
        "terms.minimality.penalty": '"smooth_l0"',
        "terms.minimality.parameter": "2.0", "terms.minimality.final_parameter": "0.7",
        "terms.minimality.frequency": "0.1", "terms.minimality.reference": "7.0",
        "terms.stochastic.coefficient": "5.0", "terms.stochastic.plan": '"layerwise"',
        "terms.stochastic.routing": '"subset"', "terms.stochastic.source": '"bernoulli"',
        "optimizers.components.learning_rate": "0.1", "optimizers.components.final_fraction": "0.9",
        "optimizers.components.weight_decay": "0.9", "optimizers.components.max_norm": "0.1",
        "optimizers.ci_fn.learning_rate": "0.1", "warm_up.steps": "3", "warm_up.learning_rate": "0.5",
        "training.steps": "12", "training.batch": "16", "training.compute_dtype": '"bfloat16"', "training.fsdp": "2",
    }),
    "residual": ("resid_mlp_1", (
        *TINY, "target.features=6", "target.width=8", "target.neurons=4", "decomposition.C=8",
        'importance={kind="layerwise_mlp", hidden=[3]}',
        f"terms.grouped={{{TERM}, plan='groups', group_size=1, routing='bernoulli', routing_probability=0.5}}",
        f"terms.fresh={{{TERM}, fraction=0.5, adversary={{kind='fresh', scope='nsc', sources=2, steps=1}}}}",
    ), {
        "target.features": "7", "target.width": "9", "target.layers": "2", "target.neurons": "5",
        "target.probability": "0.5", "importance.hidden": "[4]", "terms.grouped.group_size": "2",
        "terms.grouped.routing_probability": "0.25", "terms.fresh.fraction": "0.25",
        "terms.fresh.adversary.scope": '"c"', "terms.fresh.adversary.sources": "4", "terms.fresh.adversary.steps": "2",
        "terms.fresh.adversary.learning_rate": "0.2",
        "importance": '{kind="global_mlp", hidden=[3]}',
        "terms.fresh.source": '"tests.run.own:halves"',
    }),
    "joined": ("resid_mlp_1", (
        *TINY, "target.features=6", "target.width=8", "target.neurons=4", "decomposition.C=8",
        'importance={kind="global_mlp", hidden=[3]}',
        'terms.own={kind="function", function="tests.run.own:largest", arguments={power=2}}',
    ), {
        "importance.hidden": "[4]", "terms.own.coefficient": "0.5", "terms.own.arguments": "{power=3}",
        "importance": '{kind="function", function="tests.run.own:narrow"}',
    }),
    "tokens": ("tms_5-2", TOKENS, {
        "target.arguments": "{width=5}", "importance.width": "8", "importance.blocks": "2", "importance.heads": "2",
        "importance.hidden": "5", "importance.chunks": '[{sites=["up", "down"], taps=["up"]}]',
        "terms.hostile.adversary": '{kind="fresh", scope="sc", steps=1}',
        "terms.hostile.adversary.scope": '"bsc"', "terms.hostile.adversary.ascents": "2",
        "terms.hostile.adversary.learning_rate": "0.2", "terms.hostile.adversary.warm_up": "0.9",
        "terms.hostile.adversary.ascent": '"sign"', "terms.hostile.adversary.sigmoid": "true",
        "terms.hostile.adversary.dtype": '"bfloat16"',
    }),
    "simple language model": (
        "tms_5-2",
        (f"target={{kind='llama_simple_mlp', {MODEL}}}", *LANGUAGE),
        OTHER_MODEL | {"target.stretched": "true"},
    ),
    "language model": (
        "tms_5-2", (f"target={{kind='llama', {MODEL}}}", *LANGUAGE), OTHER_MODEL | {"target.stretched": "false"}
    ),
    "shared sources": ("tms_5-2", (*TOKENS, "terms.hostile.adversary.scope='nsc'"), {
        "terms.hostile.adversary.sources": "4",
    }),
}  # fmt: skip
ROWS = [(case, key) for case, (_, _, others) in CASES.items() for key in others]


def spec_of(case: str, *overrides: str) -> RunSpec:
    name, base, _ = CASES[case]
    return load_run_spec(name, overrides=[*base, *overrides])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def bring(spec: RunSpec) -> None:
    """Write the files that the spec's target is read from, each with contents of its own."""
    table = spec.target
    if isinstance(table, tables.LlamaSpec | tables.LlamaSimpleMlpSpec):
        sizes = table.model_dump(exclude={"kind", "weights", "tokens", "length"})
        shape = Shape(**sizes, simple=table.kind == "llama_simple_mlp")
        write_checkpoint(Path(table.weights), checkpoint(shape, seed=ord(table.weights[0])))
        write_tokens(Path(table.tokens), shape, seed=ord(table.tokens[0]))


def read(task: Task) -> str:
    """What a task reads from files."""
    if task.corpus is None:
        return ""
    batch = jnp.asarray(task.corpus.batch(0, 0, 8))
    return f"{batch} {task.apply(task.pretrain(None), batch)}"


def problem_of(spec: RunSpec) -> Problem:
    """The spec's problem around a target of zeros."""
    task = task_of(spec)
    bring(spec)
    params = jax.eval_shape(task.pretrain, jax.random.key(0))
    return Problem(spec, task, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), jax.devices()[:2])


def programs(spec: RunSpec) -> str:
    """What trains the target, what makes the state before step 0, and what updates it; each holds its values."""
    problem = problem_of(spec)
    made = jax.make_jaxpr(lambda: problem.initial_state(problem.initial_product()))()
    inputs = Inputs(problem.params)
    if problem.task.corpus is not None:
        batches = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), problem.abstract_batch)
        inputs = Inputs(problem.params, batches, jnp.int32(0))
    loop = jax.make_jaxpr(problem.loop)(problem.abstract_state(), inputs, 3)
    return "\n".join(map(str, (jax.make_jaxpr(lambda: pretrain(spec))(), made, loop, read(problem.task))))


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(("case", "key"), ROWS, ids=str)
def test_every_value_changes_what_a_run_computes(plain, case, key):
    plain.setdefault(case, programs(spec_of(case)))
    assert programs(spec_of(case, f"{key}={CASES[case][2][key]}")) != plain[case]


def test_equal_specs_have_equal_programs():
    assert programs(spec_of("tms")) == programs(spec_of("tms"))


def covered(spec: RunSpec, keys: Any) -> Any:
    """(table, field) of each key."""
    for key in keys:
        table: Any = spec
        *path, field = key.split(".")
        for name in path:
            table = table[name] if isinstance(table, dict) else getattr(table, name)
        if isinstance(table, tables.Table):
            yield type(table).__name__, field


def test_every_field_of_every_table_is_among_them():
    seen = {pair for case, (_, _, others) in CASES.items() for pair in covered(spec_of(case), others)}
    # whole, in the values of others: lists of tables, functions, and tables of tables
    seen |= {("ChunkSpec", name) for name in ("sites", "taps")} | {("TermFunctionSpec", "function")}
    seen |= {("RunSpec", name) for name in tables.RunSpec.model_fields}
    seen |= {("FunctionSpec", "function"), ("OptimizersSpec", "components"), ("OptimizersSpec", "ci_fn")}
    seen |= {("LanguageModelSpec", name) for name in tables.LanguageModelSpec.model_fields}  # by both of its kinds
    seen |= {("TmsSpec", "pretraining"), ("ResidMlpSpec", "pretraining"), ("ReconstructionSpec", "adversary")}
    seen |= {("SavingSpec", name) for name in tables.SavingSpec.model_fields}  # below
    every = {
        (table.__name__, name)
        for table in vars(tables).values()
        if isinstance(table, type) and issubclass(table, tables.Table)
        for name in table.model_fields
        if name != "kind"
    }
    assert every - seen == set()


def test_every_value_of_saving_changes_what_is_kept(tmp_path):
    import pdlib

    def kept(*overrides: str) -> Any:
        run = tmp_path / "_".join(("run", *overrides))
        small = ("training.steps=8", "saving.process_every=4", "saving.product_every=4")
        train(
            load_run_spec("tms_5-2", overrides=[*SMALL, *small, *overrides]), run, Silent(), devices=jax.devices()[:1]
        )
        with pdlib.Manager(run / "ckpts", read_only=True) as manager:
            return {s: manager.items(s) for s in manager.steps()}, list(read_rows(run / "metrics.jsonl"))

    others = ("product_every=2", "process_every=8", "keep_processes=1", "metrics_every=3")
    assert {other.split("=")[0] for other in others} == set(tables.SavingSpec.model_fields)
    plain = kept()
    for other in others:
        assert kept(f"saving.{other}") != plain, other


@pytest.mark.parametrize("case", ["residual", "joined", "tokens", "simple language model", "language model"])
def test_every_kind_of_run_trains_and_resumes_to_the_bit(tmp_path, case):
    spec, one = spec_of(case, "saving.product_every=4", "saving.process_every=4"), jax.devices()[:1]
    bring(spec)
    train(spec, tmp_path / "whole", Silent(), devices=one)
    train(spec, tmp_path / "cut", Silent(), devices=one, stop_after=3)
    outcome = train(spec, tmp_path / "cut", Silent(), devices=one)
    assert outcome.results is not None
    for item, tree in both_items(tmp_path / "whole", 8).items():
        other = both_items(tmp_path / "cut", 8)[item]
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_run_resumes_on_another_number_of_devices(tmp_path, fsdp):
    spec = spec_of("tms", f"training.fsdp={fsdp}", "saving.product_every=4", "saving.process_every=4")
    train(spec, tmp_path / "one", Silent(), devices=jax.devices()[:fsdp])
    train(spec, tmp_path / "cut", Silent(), devices=jax.devices()[:4], stop_after=4)
    train(spec, tmp_path / "cut", Silent(), devices=jax.devices()[:2])
    for item, tree in both_items(tmp_path / "one", 8).items():
        other = both_items(tmp_path / "cut", 8)[item]
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(a).max(initial=0)))


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (("decomposition.sites=['linaer1']",), NoSuchSite, "did you mean 'linear1' or 'linear2'?"),
        (("decomposition.sites=['*', '!lin*']",), NoSuchSite, "leave no site of decomposition.sites"),
        (("decomposition.C_of={x=3}",), NoSuchSite, "site of decomposition.C_of"),
        (("decomposition.C=1",), RunSpecError, "'spread' needs C of at least 2 at linear"),
        (("training.batch=7",), RunSpecError, "7 is not split evenly over 2 of the 2 devices"),
        (("training.fsdp=3",), RunSpecError, "3 does not divide the 2 devices"),
        (("training.fsdp=2", "decomposition.C=5"), RunSpecError, "C = 5 of linear1 is not split evenly"),
        (("terms.stochastic.source='unifrom'",), RunSpecError, "'unifrom' is not known; write one of ci_masked"),
        (("target={kind='function', function='tests.run.own:nothing'}",), RunSpecError, "returned NoneType, want Task"),
        (("target={kind='function', function='tests.run.own:nobody'}",), RunSpecError, "has no attribute 'nobody'"),
        ((f"target={{kind='llama', {MODEL}}}", "target.groups=3"), RunSpecError, "3 groups have to divide 2 heads"),
        ((f"target={{kind='llama', {MODEL}}}", "target.width=9"), RunSpecError, "and twice the heads the width, 9"),
        (("target={kind='function', function='nowhere:f'}",), RunSpecError, "No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(overrides, error, text):
    spec = spec_of("tms", *overrides) if "target" not in overrides[0] else load_run_spec("tms_5-2", overrides=overrides)
    with pytest.raises(error) as caught:
        programs(spec)
    assert text in str(caught.value)
