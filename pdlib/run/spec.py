"""What a run is, parsed strictly from `specs/runs/*.toml` or a file of the user's; knows no method."""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import tomli_w
from pydantic import ValidationError

from pdlib.errors import RunSpecError
from pdlib.items.contracts import specs_dir
from pdlib.run.tables import RunSpec, Table


def load_run_spec(name_or_path: str | Path, *, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run's specification.

    Args:
        name_or_path: the name of one of pdlib's own, or the path of a TOML file.
        overrides: `table.key=value`, the value as TOML; a bare word is text.

    Raises:
        RunSpecError: no such specification, an unknown key (with the near match), or a bad value.
    """
    path = _find(name_or_path)
    table = _read(path)
    for override in overrides:
        _override(table, override)
    return parse_run_spec({"name": path.stem, **table}, source=str(path))


def parse_run_spec(table: Mapping[str, Any], *, source: str) -> RunSpec:
    """Check a parsed table; `source` is what errors name."""
    try:
        return RunSpec.model_validate(table)
    except ValidationError as error:
        lines = [_explain(entry) for entry in error.errors()]
        body = "\n".join(f"  {line}" for line in lines)
        raise RunSpecError(
            f"{source}: {len(lines)} wrong\n{body}\nMend the file, or pass --set table.key=value."
        ) from error


def origins(name_or_path: str | Path, spec: RunSpec, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Where each value of a specification comes from, by its dotted key: `--set`, the file, or `default`."""
    path = _find(name_or_path)
    given = dict(_flat(_read(path), ()))
    set_here: dict[str, Any] = {}
    for override in overrides:
        _override(set_here, override)
    asked = dict(_flat(set_here, ()))

    def origin(key: str) -> str:
        return "--set" if key in asked else path.name if key in given else "default"

    return {key: origin(key) for key in flat(spec)}


def summaries() -> dict[str, str]:
    """The runs that have names → the comment that each begins with."""
    found: dict[str, str] = {}
    for path in sorted((specs_dir() / "runs").glob("*.toml")):
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
        found[path.stem] = " ".join(line.removeprefix("#").strip() for line in lines)
    return found


def flat(spec: RunSpec) -> dict[str, Any]:
    """Every value of a specification by its dotted key."""
    return dict(_flat(spec.model_dump(), ()))


def to_toml(spec: RunSpec) -> str:
    """A specification as TOML, every default written out; `load_run_spec` reads it back equal."""
    return tomli_w.dumps(spec.model_dump(exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunSpecError(f"{path}: {error}; a run specification is a UTF-8 TOML file") from error


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


def _explain(entry: Mapping[str, Any]) -> str:
    place, kind = entry["loc"], entry["type"]
    steps = list(_walk(place))
    key = ".".join(step.name for step in steps)
    if kind == "union_tag_not_found":
        known = [repr(_tag(table)) for table in _tables(steps[-1].value)]
        return f"{key}.kind: missing; one of {', '.join(known)}"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {entry['ctx']['tag']!r} is none of {entry['ctx']['expected_tags']}"
    if kind != "extra_forbidden":
        return f"{key or 'the file'}: {entry['msg'].removeprefix('Value error, ')}"
    fields = steps[-1].table.model_fields
    near = difflib.get_close_matches(str(place[-1]), fields, n=1)
    return f"{key}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}")


class _Step(NamedTuple):
    name: str
    table: type[Table]
    value: Any  # the annotation of what stands there


def _walk(place: Sequence[int | str]) -> Iterator[_Step]:
    """Each key of an error's place with the table that it belongs to, without the tags that pydantic puts between."""
    table: type[Table] = RunSpec
    inside: Any = RunSpec
    for name in map(str, place):
        tagged = [kind for kind in _tables(inside) if _tag(kind) == name]
        if tagged and len(_tables(inside)) > 1:
            table = inside = tagged[0]
            continue
        if isinstance(inside, type) and issubclass(inside, Table):
            field = inside.model_fields.get(name)
            inside = None if field is None else field.annotation
        else:  # a key of a mapping
            inside = get_args(inside)[-1] if get_args(inside) else None
        yield _Step(name, table, inside)
        alone = _tables(inside)
        if len(alone) == 1 and not _is_mapping(inside):
            table = inside = alone[0]


def _tables(annotation: Any) -> list[type[Table]]:
    """The tables that an annotation is made of; a mapping's are those of its values, one key further down."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [] if _is_mapping(annotation) else [table for one in get_args(annotation) for table in _tables(one)]


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _tag(table: type[Table]) -> str | None:
    kind = table.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind is not None else None


def _flat(table: Mapping[str, Any], prefix: tuple[str, ...]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        rows += _flat(value, (*prefix, key)) if isinstance(value, dict) else [(".".join((*prefix, key)), value)]
    return rows
