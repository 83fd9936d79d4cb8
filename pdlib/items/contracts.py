"""Reads contracts from `specs/`, found by their owner's mark beside the package, never through the current folder."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlib.errors import ContractError
from pdlib.items.specs import Change, ItemSpec, LeafSpec

if TYPE_CHECKING:
    from pdlib.items.registry import Registry

_OWNER = "pdlib: parameter decomposition of Haiku models"


@cache
def specs_dir() -> Path:
    """The folder of specs that belongs to this installation: in a wheel inside the package, in a checkout beside it.

    Raises:
        ContractError: neither place holds a `catalog.toml` with pdlib's owner mark.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "_specs", package.parent / "specs")
    for place in places:
        if _owner(place / "catalog.toml") == _OWNER:
            return place
    raise ContractError(
        f"pdlib's specs are in neither {places[0]} nor {places[1]}: the installation is incomplete; install pdlib again"
    )


def load_contract(name: str, version: int | None = None) -> ItemSpec:
    """Read one of pdlib's contracts and hold it to the digest that the catalog pins.

    Args:
        name: `decomposition` or `training`.
        version: the newest when None.

    Raises:
        ContractError: no such contract, or its file was changed after its digest was pinned.
    """
    pinned = _catalog()["items"]
    versions = sorted(int(key.rpartition(".v")[2]) for key in pinned if key.rpartition(".v")[0] == name)
    if not versions or version not in (None, *versions):
        near = difflib.get_close_matches(name, {key.rpartition(".v")[0] for key in pinned}, n=1)
        hint = (
            f"versions of {name}: {versions}" if versions else f"did you mean {near[0]!r}?" if near else sorted(pinned)
        )
        raise ContractError(f"no contract {name!r} with version {version or 'any'}; {hint}")
    key = f"{name}.v{version or versions[-1]}"
    path = specs_dir() / "items" / f"{key}.toml"
    spec = read_contract(path)
    if spec.digest != pinned[key]:
        raise ContractError(
            f"{path}: digest {spec.digest}, the catalog pins {pinned[key]}\n"
            "A contract that was used is never changed: restore the file, and add a new version beside it."
        )
    return spec


def read_contract(path: Path) -> ItemSpec:
    """Parse a contract file, one of pdlib's or of a user's own.

    Raises:
        ContractError: the file is no TOML, or a key of it is unknown.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ContractError(f"{path}: {error}; a contract is a UTF-8 TOML file") from error
    _known(path, table, {"item", "version", "role", "leaf", "change"})
    rows = _tables(path, table, "leaf", {"path", "dims", "dtype", "shard", "optional", "like"})
    steps = _tables(path, table, "change", {"before", "path", "to", "drop"})
    try:
        leaves, changes = [LeafSpec(**row) for row in rows], [Change(**step) for step in steps]
        return ItemSpec(
            name=table["item"], version=table["version"], role=table["role"], leaves=leaves, changes=changes
        )
    except KeyError as error:
        raise ContractError(f"{path}: {error.args[0]!r} is missing") from error
    except (ContractError, TypeError) as error:
        raise ContractError(f"{path}: {error}") from error


@cache
def default_registry() -> Registry:
    """The registry of parameter decomposition: the newest `decomposition` and `training`."""
    from pdlib.items.registry import Registry

    return Registry((load_contract("decomposition"), load_contract("training")))


def _tables(path: Path, table: dict[str, Any], name: str, allowed: set[str]) -> list[dict[str, Any]]:
    rows = table.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ContractError(f"{path}: {name} = {rows!r}; write each {name} row as a table [[{name}]]")
    for row in rows:
        _known(path, row, allowed)
    return rows


def _known(path: Path, table: dict[str, Any], allowed: set[str]) -> None:
    for key in table:
        if key not in allowed:
            raise ContractError(f"{path}: unknown key {key!r}; known: {', '.join(sorted(allowed))}")


def _owner(catalog: Path) -> str | None:
    try:
        return tomllib.loads(catalog.read_text("utf-8")).get("owner")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None


def _catalog() -> dict[str, Any]:
    return tomllib.loads((specs_dir() / "catalog.toml").read_text("utf-8"))
