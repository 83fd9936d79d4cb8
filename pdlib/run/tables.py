"""The tables of a run's specification; every default stands here, once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_FUNCTION = Field(pattern=r"^[\w.]+:\w+$")
Natural = Annotated[int, Field(ge=1)]
Arguments = dict[str, int | float | bool | str | list[int] | list[float] | list[str]]


class Table(BaseModel):
    """A table: unknown keys, lax types, NaN and infinities are refused, and nothing changes after parsing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FunctionSpec(Table):
    """Something of your own: `module:function`, called with `arguments`."""

    kind: Literal["function"]
    function: str = _FUNCTION
    arguments: Arguments = Field(default_factory=dict)


class PretrainingSpec(Table):
    """How a toy target is trained first: of so many attempts the one with the least loss, by AdamW."""

    attempts: int = Field(1, ge=1)
    steps: int = Field(5_000, ge=1)
    batch: int = Field(1_024, ge=1)
    learning_rate: float = Field(5e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)


def _pretraining() -> PretrainingSpec:
    return PretrainingSpec.model_validate({})


class TmsSpec(Table):
    """The toy model of superposition; see `pdlib.targets.tms.Shape`."""

    kind: Literal["tms"]
    features: int = Field(ge=2)
    hidden: int = Field(ge=1)
    probability: float = Field(0.05, gt=0, le=1)
    identity: bool = False
    pretraining: PretrainingSpec = Field(default_factory=_pretraining)


class ResidMlpSpec(Table):
    """A residual MLP; see `pdlib.targets.resid_mlp.Shape`."""

    kind: Literal["resid_mlp"]
    features: int = Field(ge=2)
    width: int = Field(1_000, ge=1)
    layers: int = Field(ge=1)
    neurons: int = Field(ge=1)
    probability: float = Field(0.01, gt=0, le=1)
    pretraining: PretrainingSpec = Field(default_factory=_pretraining)


class LanguageModelSpec(Table):
    """A trained language model; `weights` and `tokens` are found from the current folder.

    `weights` is a safetensors file or a folder of them, with the names of the published checkpoint; `tokens` a `.npy`
    file of token ids, `[tokens]` or `[rows, length]`, of which a batch takes rows of `length`.
    """

    weights: str
    tokens: str


class LlamaSimpleMlpSpec(LanguageModelSpec):
    """LlamaSimpleMLP, with the sizes of the one trained on the Pile; see `pdlib.targets.llama.Shape`."""

    kind: Literal["llama_simple_mlp"]
    length: int = Field(512, ge=1)
    vocabulary: int = Field(50_277, ge=2)
    width: int = Field(768, ge=2)
    layers: int = Field(4, ge=1)
    heads: int = Field(6, ge=1)
    groups: int = Field(6, ge=1)
    inner: int = Field(3_072, ge=1)
    base: float = Field(1e4, gt=1)
    stretched: bool = False
    epsilon: float = Field(1e-6, gt=0)


class LlamaSpec(LanguageModelSpec):
    """Llama, with the sizes of Llama-3.1-8B; see `pdlib.targets.llama.Shape`."""

    kind: Literal["llama"]
    length: int = Field(2_048, ge=1)
    vocabulary: int = Field(128_256, ge=2)
    width: int = Field(4_096, ge=2)
    layers: int = Field(32, ge=1)
    heads: int = Field(32, ge=1)
    groups: int = Field(8, ge=1)
    inner: int = Field(14_336, ge=1)
    base: float = Field(5e5, gt=1)
    stretched: bool = True
    epsilon: float = Field(1e-5, gt=0)


TargetSpec = Annotated[
    TmsSpec | ResidMlpSpec | LlamaSimpleMlpSpec | LlamaSpec | FunctionSpec, Field(discriminator="kind")
]


class DecompositionSpec(Table):
    """Which sites, by globs; C, the number of components, and `C_of` for sites that a glob names; how V and U start."""

    C: int = Field(ge=1)
    C_of: dict[str, Natural] = Field(default_factory=dict)
    sites: list[str] = Field(default_factory=lambda: ["*"], min_length=1)
    init: Literal["normal", "spread"] = "normal"


class PerComponentSpec(Table):
    """One small MLP a component."""

    kind: Literal["per_component_mlp"]
    hidden: int = Field(16, ge=1)


class LayerwiseSpec(Table):
    """One MLP a site."""

    kind: Literal["layerwise_mlp"]
    hidden: list[Natural]


class GlobalSpec(Table):
    """One MLP from all sites to all sites."""

    kind: Literal["global_mlp"]
    hidden: list[Natural]


class ChunkSpec(Table):
    """Sites, and what they are predicted from: sites or named activations, else the chunk's own sites; all by globs."""

    sites: list[str] = Field(min_length=1)
    taps: list[str] = Field(default_factory=list)


class TransformerSpec(Table):
    """A transformer over sequences for each chunk of sites; one chunk of all sites without `chunks`."""

    kind: Literal["transformer"]
    chunks: list[ChunkSpec] = Field(default_factory=lambda: [ChunkSpec(sites=["*"])], min_length=1)
    width: int = Field(ge=2)
    blocks: int = Field(ge=1)
    heads: int = Field(ge=1)
    hidden: int = Field(ge=1)


ImportanceSpec = Annotated[
    PerComponentSpec | LayerwiseSpec | GlobalSpec | TransformerSpec | FunctionSpec, Field(discriminator="kind")
]


class FreshSpec(Table):
    """Projected gradient ascent by sign that starts anew in each forward."""

    kind: Literal["fresh"]
    scope: Literal["c", "bc", "sc", "bsc", "nsc"] = "bsc"
    sources: int = Field(1, ge=1)
    steps: int = Field(ge=1)
    learning_rate: float = Field(0.1, gt=0)


class PersistentSpec(Table):
    """Sources that are kept from step to step; the rate rises linearly over `warm_up`, a fraction of the run."""

    kind: Literal["persistent"]
    scope: Literal["c", "bc", "sc", "bsc", "nsc"] = "sc"
    sources: int = Field(1, ge=1)
    ascents: int = Field(2, ge=0)
    learning_rate: float = Field(0.01, gt=0)
    warm_up: float = Field(0.025, ge=0, le=1)
    ascent: Literal["adam", "sign"] = "adam"
    sigmoid: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"


AdversarySpec = Annotated[FreshSpec | PersistentSpec, Field(discriminator="kind")]


class FaithfulnessSpec(Table):
    """What the components leave of the weights; `relative` divides each site's part by its weight's norm."""

    kind: Literal["faithfulness"]
    coefficient: float = Field(1.0, ge=0)
    relative: bool = False


class MinimalitySpec(Table):
    """How much is important: `penalty` of each upper importance, annealed from `parameter` to `final_parameter`.

    The parameter is the exponent p of `power`, or the width γ of `smooth_l0`. The coefficients of both parts rise
    linearly over `ramp`, a fraction of the run.
    """

    kind: Literal["minimality"]
    coefficient: float = Field(ge=0)
    ramp: float = Field(0.0, ge=0, le=1)
    penalty: Literal["power", "smooth_l0"] = "power"
    parameter: float = Field(1.0, gt=0)
    final_parameter: float | None = Field(None, gt=0)
    frequency: float | None = Field(None, ge=0)
    reference: float = Field(1.0, gt=0)


class ReconstructionSpec(Table):
    """The mean loss of masked forwards against the clean output; see `pdlib.method.reconstruction.Reconstruction`."""

    kind: Literal["reconstruction"]
    coefficient: float = Field(1.0, ge=0)
    plan: Literal["all", "layerwise", "groups"] = "all"
    group_size: int | None = Field(None, ge=1)
    routing: Literal["everywhere", "subset", "bernoulli"] = "everywhere"
    routing_probability: float | None = Field(None, gt=0, le=1)
    source: str = "uniform"
    adversary: AdversarySpec | None = None
    fraction: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.plan == "groups") != (self.group_size is not None):
            raise ValueError("plan = 'groups' and group_size belong together")
        if (self.routing == "bernoulli") != (self.routing_probability is not None):
            raise ValueError("routing = 'bernoulli' and routing_probability belong together")
        if self.adversary is None and self.fraction is not None:
            raise ValueError("fraction is the adversary's part of the batch; give an adversary")
        if self.adversary is not None and self.fraction is None and self.source != "uniform":
            raise ValueError("the adversary takes the place of source; give fraction to have both")
        return self


class TermFunctionSpec(FunctionSpec):
    """A term of your own: `module:function`, called with `arguments`, returns a `pdlib.method.objective.Value`."""

    coefficient: float = Field(1.0, ge=0)


TermSpec = Annotated[
    FaithfulnessSpec | MinimalitySpec | ReconstructionSpec | TermFunctionSpec, Field(discriminator="kind")
]


class OptimizerSpec(Table):
    """AdamW: cosine from the learning rate to a fraction of it; gradients clipped to a global norm."""

    learning_rate: float = Field(1e-3, gt=0)
    final_fraction: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    max_norm: float | None = Field(None, gt=0)


def _optimizer() -> OptimizerSpec:
    return OptimizerSpec.model_validate({})


class OptimizersSpec(Table):
    """One optimizer for V and U, one for the importance function."""

    components: OptimizerSpec = Field(default_factory=_optimizer)
    ci_fn: OptimizerSpec = Field(default_factory=_optimizer)


class WarmUpSpec(Table):
    """V and U are first trained for faithfulness alone, with an optimizer that is thrown away."""

    steps: int = Field(200, ge=0)
    learning_rate: float = Field(0.01, gt=0)


class TrainingSpec(Table):
    """Steps, batch, the dtype that forwards run in, and how many devices share each site's C.

    Losses, parameters and moments are float32. The devices that do not share C split the batch.
    """

    steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    fsdp: int = Field(1, ge=1)


class SavingSpec(Table):
    """How often, in steps, each item is saved and metrics are written; how many processes are kept."""

    product_every: int = Field(1_000, ge=1)
    process_every: int = Field(2_000, ge=1)
    keep_processes: int = Field(2, ge=1)
    metrics_every: int = Field(200, ge=1)

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if self.process_every % self.product_every:
            raise ValueError("process_every must be a multiple of product_every: a process continues a product")
        return self


def _kinds(terms: dict[str, Any]) -> list[str]:
    return [term.kind for term in terms.values()]


class RunSpec(Table):
    """One run; `seed` and the other values determine every number it computes."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    target: TargetSpec
    decomposition: DecompositionSpec
    importance: ImportanceSpec
    terms: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], TermSpec]
    optimizers: OptimizersSpec = Field(default_factory=lambda: OptimizersSpec.model_validate({}))
    warm_up: WarmUpSpec = Field(default_factory=lambda: WarmUpSpec.model_validate({}))
    training: TrainingSpec
    saving: SavingSpec = Field(default_factory=lambda: SavingSpec.model_validate({}))

    @model_validator(mode="after")
    def _objective(self) -> Self:
        kinds = _kinds(self.terms)
        for kind in ("faithfulness", "minimality"):
            if kinds.count(kind) != 1:
                raise ValueError(f"a run has exactly one term of kind {kind!r}, this has {kinds.count(kind)}")
        if "reconstruction" not in kinds:
            raise ValueError("a run has at least one term of kind 'reconstruction', this has none")
        taken = {"total", "frequency", "data"} & self.terms.keys()
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))}: the name is taken; name the term otherwise")
        return self
