"""What a run is: parsed strictly from `specs/runs/*.toml` or a file of the user's; every default stands here, once."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdlib.errors import RunSpecError
from pdlib.items.contracts import specs_dir


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSpec(_Table):
    """The toy model of superposition to decompose, and how it is trained first."""

    features: int = Field(ge=2)
    hidden: int = Field(ge=1)
    feature_probability: float = Field(gt=0, le=1)
    pretrain_steps: int = Field(5_000, ge=1)
    pretrain_batch: int = Field(1_024, ge=1)
    pretrain_learning_rate: float = Field(5e-3, gt=0)
    pretrain_weight_decay: float = Field(0.01, ge=0)


class DecompositionSpec(_Table):
    """The components of each site and the importance function."""

    C: int = Field(ge=1)
    importance_hidden: int = Field(16, ge=1)
    init: Literal["normal", "spread"] = "normal"


class LossSpec(_Table):
    """The coefficient of each loss term; minimality has a power, and a ramp over a fraction of the run."""

    faithfulness: float = Field(1.0, ge=0)
    minimality: float = Field(gt=0)
    minimality_power: float = Field(1.0, gt=0)
    minimality_ramp: float = Field(0.0, ge=0, le=1)
    stochastic: float = Field(1.0, ge=0)
    stochastic_layerwise: float = Field(1.0, ge=0)


class TrainingSpec(_Table):
    """Steps, batch, and the learning rate of both optimizers: cosine to a fraction of its peak."""

    steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    final_fraction: float = Field(0.1, ge=0, le=1)
    warmup_steps: int = Field(200, ge=0)
    warmup_learning_rate: float = Field(0.01, gt=0)


class SavingSpec(_Table):
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


class RunSpec(_Table):
    """One run; `seed` and the other values determine every number it computes."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    target: TargetSpec
    decomposition: DecompositionSpec
    losses: LossSpec
    training: TrainingSpec
    saving: SavingSpec = Field(default_factory=lambda: SavingSpec.model_validate({}))


def load_run_spec(name_or_path: str | Path, *, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run's specification.

    Args:
        name_or_path: the name of one of pdlib's own, or the path of a TOML file.
        overrides: `table.key=value`, the value as TOML; a bare word is text.

    Raises:
        RunSpecError: no such specification, an unknown key (with the near match), or a bad value.
    """
    path = _find(name_or_path)
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunSpecError(f"{path}: {error}; a run specification is a UTF-8 TOML file") from error
    for override in overrides:
        _override(table, override)
    return parse_run_spec({"name": path.stem, **table}, source=str(path))


def parse_run_spec(table: Mapping[str, Any], *, source: str) -> RunSpec:
    """Check a parsed table; `source` is what errors name."""
    try:
        return RunSpec.model_validate(table)
    except ValidationError as error:
        lines = [_explain(entry["loc"], entry["msg"], entry["type"]) for entry in error.errors()]
        body = "\n".join(f"  {line}" for line in lines)
        raise RunSpecError(
            f"{source}: {len(lines)} wrong\n{body}\nMend the file, or pass --set table.key=value."
        ) from error


def flat(spec: RunSpec) -> dict[str, Any]:
    """Every value of a specification by its dotted key."""
    return dict(_flat(spec.model_dump(), ()))


def to_toml(spec: RunSpec) -> str:
    """A specification as TOML, every default written out; `load_run_spec` reads it back equal."""
    table = spec.model_dump()
    top = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            top += ["", f"[{key}]", *(f"{inner} = {_value(v)}" for inner, v in value.items())]
    return "\n".join(top) + "\n"


def _find(name_or_path: str | Path) -> Path:
    folder = specs_dir() / "runs"
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if str(name_or_path) in known:
        return folder / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    near = difflib.get_close_matches(str(name_or_path), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"pdlib has {', '.join(known)}"
    raise RunSpecError(f"{str(name_or_path)!r} is neither a run specification of pdlib nor a file; {hint}")


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RunSpecError(f"--set {text!r}: write table.key=value, for example training.steps=100")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *tables, last = key.split(".")
    for name in tables:
        inner: Any = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise RunSpecError(f"--set {text!r}: {name!r} is a value, not a table")
        table = inner
    table[last] = parsed


def _explain(place: tuple[int | str, ...], message: str, kind: str) -> str:
    key = ".".join(map(str, place))
    if kind != "extra_forbidden":
        return f"{key or 'the table'}: {message}"
    model: Any = RunSpec
    for name in place[:-1]:
        model = model.model_fields[name].annotation
    near = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f"{key}: unknown key; " + (
        f"did you mean {near[0]!r}?" if near else f"known: {', '.join(model.model_fields)}"
    )


def _flat(table: Mapping[str, Any], prefix: tuple[str, ...]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        rows += _flat(value, (*prefix, key)) if isinstance(value, dict) else [(".".join((*prefix, key)), value)]
    return rows


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
