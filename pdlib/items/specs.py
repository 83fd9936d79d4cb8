"""Declares what an item's leaves look like, as plain data; knows no array, no file and no jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from pdlib.errors import ContractError
from pdlib.items.paths import CAPTURE, Keys, fill_keys, match_keys

Role = Literal["product", "process"]

_DIM = re.compile(r"(?P<rest>\.\.\.)|(?P<any>_)|(?P<size>\d+)|(?P<name>[A-Za-z]\w*)(?P<plus>[+-]\d+)?")
_ITEM_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DTYPE = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)|float(4|6|8)_e\dm\d\w*|key(<\w+>)?"
)


@dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One row of a contract: which leaves it is about, and what they must be.

    Attributes:
        path: keys joined by `/`. A key is a literal, `{name}` (captures one key), a glob with `*`
            (within one key) or `**` (any number of keys). `**` alone admits any tree.
        dims: one entry a dimension: a name (`C`), a name and an offset (`C+1`), a size (`1`), `_` (any size) or
            `...` (any number of dimensions, once). None admits any shape. A name has one size for equal values of
            the captures that every row naming it shares.
        dtype: a dtype name, several of which one must hold, `key` (any typed PRNG key), or None for any.
        shard: dimension name → mesh axis, or several, that the dimension is split over where the mesh has them.
        optional: whether the leaf may be absent where its captures are bound by another row.
        like: `item/prefix`: leaves at this path repeat the leaves under that prefix (an optimizer's moments repeat
            the parameters); what follows the path's `**` ends with the path of the leaf that is repeated, whose
            dims, dtype and shard hold here unless given.

    Raises:
        ContractError: at construction, for a row that says something impossible.
    """

    path: str
    dims: Sequence[str] | None = None
    dtype: str | Sequence[str] | None = None
    shard: Mapping[str, str | Sequence[str]] = field(default_factory=dict[str, "str | Sequence[str]"])
    optional: bool = False
    like: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        dims = None if self.dims is None else tuple(str(dim) for dim in self.dims)
        dtypes = (self.dtype,) if isinstance(self.dtype, str) else tuple(self.dtype or ())
        shard = {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in self.shard.items()}
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "dtype", dtypes or None)
        object.__setattr__(self, "shard", MappingProxyType(shard))
        self._check(dims, shard)

    def _check_types(self) -> None:
        given: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fits = {
            "path": isinstance(given["path"], str),
            "dims": given["dims"] is None or _is_list(given["dims"], str | int),
            "dtype": isinstance(given["dtype"], str | None) or _is_list(given["dtype"], str),
            "shard": isinstance(given["shard"], Mapping)
            and all(isinstance(axes, str) or _is_list(axes, str) for axes in given["shard"].values()),
            "optional": isinstance(given["optional"], bool),
            "like": isinstance(given["like"], str | None),
        }
        for name, right in fits.items():
            if not right:
                raise ContractError(f"leaf row {self.path!r}: {name}={given[name]!r}; write {_WRITE[name]}")

    def _check(self, dims: tuple[str, ...] | None, shard: Mapping[str, Keys]) -> None:
        where = f"leaf row {self.path!r}"
        if not self.path or "" in self.path.split("/"):
            raise ContractError(f"{where}: the path has an empty key; write keys joined by single slashes")
        for key in self.path.split("/"):
            if ("{" in key or "}" in key) and not CAPTURE.fullmatch(key):
                raise ContractError(f"{where}: {key!r} captures nothing; write {{name}} for one whole key")
        for dtype in self.dtypes:
            if not _DTYPE.fullmatch(dtype):
                raise ContractError(f"{where}: {dtype!r} is no dtype; write a name such as float32, or key")
        for dim in dims or ():
            if not _DIM.fullmatch(dim):
                raise ContractError(f"{where}: {dim!r} is no dimension; write a name, name+1, a size, _ or ...")
        if dims is not None and dims.count("...") > 1:
            raise ContractError(f"{where}: `...` stands twice in dims; one `...` takes all the remaining dimensions")
        strays = [] if self.like else [dim for dim in shard if dim not in (dims or ())]
        if strays:
            raise ContractError(f"{where}: shard names {strays[0]!r}, which dims does not; name it in dims")
        split = [axis for dim in dims or () for axis in shard.get(dim, ())]
        twice = next((axis for axis in split if split.count(axis) > 1), None)
        if twice is not None:
            raise ContractError(f"{where}: mesh axis {twice!r} would split two dimensions; an axis splits one")
        if self.like is not None and (not self.path.endswith("/**") or len(self.like.split("/")) < 2):
            raise ContractError(f"{where}: a row with `like` ends in /** and names item/prefix")

    def __hash__(self) -> int:
        return hash(json.dumps(self.as_dict(), sort_keys=True))

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """The keys of the path pattern."""
        return tuple(self.path.split("/"))

    @cached_property
    def captures(self) -> frozenset[str]:
        """The names that the path captures."""
        return frozenset(m[1] for s in self.segments if (m := CAPTURE.fullmatch(s)))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of which one must hold; empty for any."""
        return tuple(self.dtype or ())

    @property
    def exact(self) -> bool:
        """Whether the path has no wildcard, so that its captures alone give the leaf's path."""
        return not any("*" in segment for segment in self.segments)

    def match(self, keys: Keys) -> dict[str, str] | None:
        """The captures with which the path matches `keys`, or None."""
        found = next(match_keys(self.segments, keys), None)
        return None if found is None else {name: taken[0] for name, taken in found.items() if name != "**"}

    def may_begin(self, prefix: Keys) -> bool:
        """Whether some path below `prefix` matches."""
        return any(next(match_keys(self.segments[:n], prefix), None) is not None for n in range(len(self.segments) + 1))

    def fill(self, captures: Mapping[str, str]) -> Keys:
        """The path of an exact row for these captures."""
        return fill_keys(self.segments, {name: (key,) for name, key in captures.items()})

    def as_dict(self) -> dict[str, Any]:
        """The row as a contract file would hold it: only what differs from the default."""
        row: dict[str, Any] = {"path": self.path}
        if self.dims is not None:
            row["dims"] = list(self.dims)
        if self.dtypes:
            row["dtype"] = self.dtypes[0] if len(self.dtypes) == 1 else list(self.dtypes)
        if self.shard:
            row["shard"] = {dim: axes[0] if len(axes) == 1 else list(axes) for dim, axes in self.shard.items()}
        if self.optional:
            row["optional"] = True
        if self.like is not None:
            row["like"] = self.like
        return row


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of some leaves of earlier versions of an item, so that these open under today's contract.

    Attributes:
        before: the version that made the change; it is made to what earlier ones stored.
        path: which leaves, as `LeafSpec.path` has it.
        to: their path since then, with what `path` captures and its `**`; None where they are dropped.
        drop: why they are dropped.

    Raises:
        ContractError: at construction, unless exactly one of `to` and `drop` is given.
    """

    before: int
    path: str
    to: str | None = None
    drop: str = ""

    def __post_init__(self) -> None:
        if type(self.before) is not int or self.before < 2:
            raise ContractError(
                f"change of {self.path!r}: before={self.before!r}; write the version that made it, from 2"
            )
        if (self.to is None) == (not self.drop):
            raise ContractError(f"change of {self.path!r}: write either to = its new path, or drop = why it went")

    def as_dict(self) -> dict[str, Any]:
        """The change as a contract file would hold it."""
        where = {"drop": self.drop} if self.to is None else {"to": self.to}
        return {"before": self.before, "path": self.path, **where}


@dataclass(frozen=True, kw_only=True)
class ItemSpec:
    """The contract of one stored item.

    Attributes:
        name: lower-case; the name of the item's directory in a step.
        version: from 1 up; a contract that was used to write is never changed, only succeeded.
        role: `product` (what a user of the result needs) or `process` (what only its continuation needs).
        leaves: the rows; the first that fits a leaf is its row, and a leaf that none matches is refused.
        changes: what became of leaves of earlier versions, in the order in which it happened.

    Raises:
        ContractError: at construction.
    """

    name: str
    version: int = 1
    role: Role = "product"
    leaves: Sequence[LeafSpec] = ()
    changes: Sequence[Change] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", tuple(self.leaves))
        object.__setattr__(self, "changes", tuple(self.changes))
        name: Any = self.name
        rows: Sequence[Any] = self.leaves
        if not isinstance(name, str) or not _ITEM_NAME.fullmatch(name):
            raise ContractError(
                f"item name {self.name!r}: use lower-case letters, digits and _, beginning with a letter"
            )
        if type(self.version) is not int or self.version < 1:
            raise ContractError(f"item {self.name}: version {self.version!r} is not a whole number from 1 up")
        if self.role not in ("product", "process"):
            raise ContractError(f"item {self.name}: role {self.role!r}; write 'product' or 'process'")
        if not self.leaves:
            raise ContractError(f"item {self.name} has no leaf row; LeafSpec(path='**') admits any tree")
        for row in rows:
            if not isinstance(row, LeafSpec):
                raise ContractError(f"item {self.name}: leaf row {row!r} is a {type(row).__name__}; write a LeafSpec")
        for change in self.changes:
            if change.before > self.version:
                raise ContractError(
                    f"item {self.name} v{self.version}: change of {change.path!r} is of version {change.before}; "
                    "write it into the contract of that version"
                )

    @property
    def title(self) -> str:
        """Name and version, as error messages and tables show them."""
        return f"{self.name} v{self.version}"

    def as_dict(self) -> dict[str, Any]:
        """The contract as its file would hold it."""
        return {
            "item": self.name,
            "version": self.version,
            "role": self.role,
            "leaf": [leaf.as_dict() for leaf in self.leaves],
            **({"change": [change.as_dict() for change in self.changes]} if self.changes else {}),
        }

    def moved(self, keys: Keys, *, version: int) -> Keys | None:
        """Where a leaf that an earlier version stored at `keys` is today; None where it was dropped."""
        for change in self.changes:
            if change.before <= version:
                continue
            captures = next(match_keys(tuple(change.path.split("/")), keys), None)
            if captures is not None:
                if change.to is None:
                    return None
                keys = fill_keys(tuple(change.to.split("/")), captures)
        return keys

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the contract's canonical JSON: changes with any row, not with comments or layout of its file."""
        from blake3 import blake3

        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return f"blake3:{blake3(text.encode()).hexdigest()}"


@dataclass(frozen=True)
class Dim:
    """One parsed entry of `dims`: `kind` is `rest`, `any`, `size` or `name`."""

    kind: str
    name: str
    offset: int


_WRITE = {
    "path": "keys joined by slashes, as text",
    "dims": "a list of dimensions, or leave it out",
    "dtype": "a dtype name, or a list of them",
    "shard": "dimension = mesh axis, or a list of axes",
    "optional": "true or false",
    "like": "item/prefix, as text",
}


def _is_list(value: Any, kind: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)


def parse_dim(text: str) -> Dim:
    """Read one entry of `LeafSpec.dims`; `size` keeps its number as the offset."""
    m = _DIM.fullmatch(text)
    if m is None:
        raise ContractError(f"{text!r} is no dimension; write a name, name+1, a size, _ or ...")
    if m["name"]:
        return Dim("name", m["name"], int(m["plus"] or 0))
    kind = "rest" if m["rest"] else "any" if m["any"] else "size"
    return Dim(kind, "", int(m["size"] or 0))
