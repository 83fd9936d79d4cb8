"""The registry of item contracts, and everything derived from it; holds no array and touches no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pdlib.errors import ContractError, ShardingRefused, SpecMismatch
from pdlib.items.binding import Leaf, check_items, describe
from pdlib.items.specs import ItemSpec, Keys, LeafSpec, parse_dim
from pdlib.tree import flatten, map_with_keys, show


class Match(NamedTuple):
    """A row that is about a leaf: with what its path captures, and the leaf it repeats, if the row says `like`."""

    row: LeafSpec
    captures: Mapping[str, str]
    repeats: tuple[str, Keys] | None


@dataclass(frozen=True)
class Registry:
    """An immutable set of item contracts.

    Attributes:
        items: the contracts; names are unique.

    Raises:
        ContractError: at construction, for two items of one name or a `like` that names no item.
    """

    items: tuple[ItemSpec, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        names = [item.name for item in self.items]
        for name in names:
            if names.count(name) > 1:
                raise ContractError(f"two items are named {name!r}; an item's name is its directory, so it is unique")
        for item in self.items:
            for row in item.leaves:
                if row.like is not None and row.like.split("/")[0] not in names:
                    raise ContractError(
                        f"item {item.name}, row {row.path!r}: like={row.like!r} names no item of {names}"
                    )
                self._refuse_circle(item.name, row, ())

    def _refuse_circle(self, name: str, row: LeafSpec, seen: tuple[tuple[str, str], ...]) -> None:
        if row.like is None:
            return
        if (name, row.path) in seen:
            circle = " → ".join(f"{item}:{path}" for item, path in (*seen, (name, row.path)))
            raise ContractError(
                f"rows repeat each other in a circle: {circle}; let one of them say what the leaves are"
            )
        other, *prefix = row.like.split("/")
        for repeated in self[other].leaves if other in self.names else ():
            if repeated.may_begin(tuple(prefix)):
                self._refuse_circle(other, repeated, (*seen, (name, row.path)))

    def with_item(self, item: ItemSpec) -> Registry:
        """A new registry that has this item as well; an item of the same name is replaced."""
        return Registry((*(old for old in self.items if old.name != item.name), item))

    @property
    def names(self) -> tuple[str, ...]:
        """The item names, in order of registration."""
        return tuple(item.name for item in self.items)

    def __getitem__(self, name: str) -> ItemSpec:
        """The contract of an item.

        Raises:
            ContractError: the registry has no item of this name.
        """
        for item in self.items:
            if item.name == name:
                return item
        raise ContractError(f"no item {name!r} is registered; registered: {', '.join(self.names) or 'none'}")

    def matches(self, name: str, keys: Keys) -> list[Match]:
        """Every row of an item that is about the leaf at `keys`, in the contract's order."""
        return [match for row in self[name].leaves for match in self._match(row, keys)]

    def check(self, trees: Mapping[str, Any], *, action: str = "") -> None:
        """Hold trees, concrete or abstract, to their contracts, together: a dimension shared by two items is one.

        Args:
            trees: item name → tree.
            action: what is being done, for the first line of the error.

        Raises:
            SpecMismatch: lists every difference, with path, found, wanted and who bound the dimension.
            ContractError: an item is not registered.
        """
        leaves: dict[str, list[Leaf]] = {}
        for name, tree in trees.items():
            flat = flatten(tree)
            leaves[name] = [describe(name, keys, leaf) for keys, leaf in zip(flat.paths, flat.leaves, strict=True)]
        self.check_leaves(leaves, action=action)

    def check_leaves(self, leaves: Mapping[str, Iterable[Leaf]], *, action: str = "") -> None:
        """`check` for leaves that are known by path, shape and dtype only."""
        found = {name: list(rows) for name, rows in leaves.items()}
        problems = check_items(self, found)
        if problems:
            titles = " and ".join(self[name].title for name in found)
            total = sum(map(len, found.values()))
            bad = len({line.split("  ")[0] for line in problems})
            subject = f"{action + ': ' if action else ''}{titles}: {bad} of {max(total, bad)} leaves differ"
            raise SpecMismatch(subject, problems, hint="Mend the tree, or register a contract that admits it.")

    def sharding(self, name: str, keys: Keys, shape: tuple[int, ...], mesh: Any) -> Any:
        """The `NamedSharding` of one leaf on a mesh: its row's axes where the mesh has them, replicated elsewhere.

        Raises:
            ShardingRefused: an axis does not divide its dimension.
        """
        import jax

        axes = self._axes(name, keys, len(shape))
        spec: list[Any] = []
        for size, wanted, dim in zip(shape, axes, range(len(shape)), strict=True):
            present = tuple(axis for axis in wanted if axis in mesh.shape)
            parts = 1
            for axis in present:
                parts *= mesh.shape[axis]
            if size % parts:
                raise ShardingRefused(
                    f"{name}:{show(keys)}: mesh axis {'×'.join(present)} of size {parts} does not divide dimension "
                    f"{dim} of size {size}; use a mesh whose axis divides it, or one without that axis"
                )
            spec.append(present[0] if len(present) == 1 else present or None)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def abstract(self, name: str, tree: Any, mesh: Any = None) -> Any:
        """The abstract twin of an item's tree: a `jax.ShapeDtypeStruct` a leaf, with its sharding on `mesh` if given.

        Args:
            name: the item.
            tree: concrete or abstract; it is checked against the contract. Python numbers stay what they are.
            mesh: a `jax.sharding.Mesh`.
        """
        import jax

        self.check({name: tree})

        def twin(keys: Keys, leaf: Any) -> Any:
            if type(leaf) in (bool, int, float):
                return leaf
            shape, dtype = tuple(leaf.shape), leaf.dtype
            sharding = None if mesh is None else self.sharding(name, keys, shape, mesh)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        return map_with_keys(twin, tree)

    def save_args(self, name: str, tree: Any) -> Any:
        """Orbax's `SaveArgs` for each leaf of an item's tree: stored with the dtype it has."""
        import orbax.checkpoint as ocp

        self.check({name: tree})
        return map_with_keys(lambda _keys, leaf: ocp.SaveArgs(dtype=getattr(leaf, "dtype", None)), tree)

    def restore_args(self, name: str, abstract: Any, mesh: Any = None) -> Any:
        """Orbax's `ArrayRestoreArgs` for each leaf of an abstract tree; shardings from `mesh` where it is given."""
        import orbax.checkpoint as ocp

        twin = self.abstract(name, abstract, mesh) if mesh is not None else abstract

        def args(_keys: Keys, leaf: Any) -> Any:
            if type(leaf) in (bool, int, float):
                return ocp.RestoreArgs(restore_type=type(leaf))
            return ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=leaf.sharding, global_shape=leaf.shape, strict=True)

        return map_with_keys(args, twin)

    def ledger(self, trees: Mapping[str, Any]) -> dict[str, int]:
        """Bytes of each item's arrays, concrete or abstract."""
        return {
            name: sum(describe(name, keys, leaf).nbytes for keys, leaf in zip(flat.paths, flat.leaves, strict=True))
            for name, flat in ((name, flatten(tree)) for name, tree in trees.items())
        }

    def table(self) -> str:
        """The contracts as a Markdown table: SPEC.md holds it, and a test holds SPEC.md to it."""
        lines = ["| item | role | leaf | dims | dtype | split over |", "|---|---|---|---|---|---|"]
        for item in self.items:
            for row in item.leaves:
                like = f"like `{row.like}`" if row.like else "any"
                dims = like if row.dims is None else f"`[{', '.join(row.dims)}]`"
                dtype = " or ".join(row.dtypes) or like
                split = ", ".join(f"{dim} over {'×'.join(axes)}" for dim, axes in row.shard.items()) or "–"
                path = f"`{row.path}`{' (optional)' if row.optional else ''}"
                lines.append(f"| {item.title} | {item.role} | {path} | {dims} | {dtype} | {split} |")
        return "\n".join(lines)

    @cached_property
    def scopes(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Item → dimension name → the captures that every row naming the dimension shares: what its size depends on."""
        result: dict[str, dict[str, frozenset[str]]] = {}
        for item in self.items:
            scope = result.setdefault(item.name, {})
            for row in self._rows_with_repeated(item):
                for text in row.dims or ():
                    dim = parse_dim(text)
                    if dim.kind == "name":
                        scope[dim.name] = scope.get(dim.name, row.captures) & row.captures
        return result

    def _rows_with_repeated(self, item: ItemSpec) -> Iterable[LeafSpec]:
        for row in item.leaves:
            yield row
            if row.like is not None:
                yield from self[row.like.split("/")[0]].leaves

    def _match(self, row: LeafSpec, keys: Keys) -> Iterable[Match]:
        if row.like is None:
            captures = row.match(keys)
            if captures is not None:
                yield Match(row, captures, None)
            return
        other, *prefix = row.like.split("/")
        for start in range(len(keys)):
            path = (*prefix, *keys[start:])
            if row.match(keys[:start]) is None:
                continue
            for found in self.matches(other, path):
                inherited = LeafSpec(
                    path=found.row.path,
                    dims=found.row.dims if row.dims is None else row.dims,
                    dtype=row.dtype or found.row.dtype,
                    shard=row.shard or found.row.shard,
                )
                yield Match(inherited, found.captures, (other, path))

    def _axes(self, name: str, keys: Keys, rank: int) -> list[tuple[str, ...]]:
        for match in self.matches(name, keys):
            dims = list(match.row.dims or ["..."])
            if "..." in dims:
                place = dims.index("...")
                dims[place : place + 1] = ["_"] * (rank - len(dims) + 1)
            if len(dims) == rank:
                return [tuple(match.row.shard.get(dim, ())) for dim in dims]
        return [()] * rank
