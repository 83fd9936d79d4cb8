"""Makes trees of stored items, as JAX arrays owned or mapped, or as NumPy; knows no directory of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdlib.errors import ContractError
from pdlib.items.registry import Registry
from pdlib.store.arrays import default_sharding, make_array, no_ambient_mesh, python_number
from pdlib.store.mapped import map_leaf, read_leaves
from pdlib.store.remote import bring
from pdlib.store.request import Wanted, check_width
from pdlib.store.stored import StoredItem, StoredLeaf
from pdlib.tree import Keys, select, unflatten

Where = Callable[[Keys], bool]


def restore_item(registry: Registry, stored: StoredItem, wanted: Wanted, mesh: Any) -> Any:
    """A requested tree as owned, donatable JAX arrays; see `Manager.restore`."""
    bring(stored, [leaf for leaf in wanted.leaves if leaf is not None])
    with no_ambient_mesh():
        arrays = [
            None
            if leaf is None
            else make_array(stored, leaf, sharding or _sharding(registry, stored, leaf, mesh), own=True)
            for leaf, sharding in zip(wanted.leaves, wanted.shardings, strict=True)
        ]
    return jax.tree.unflatten(wanted.treedef, arrays)


def open_item(registry: Registry, stored: StoredItem, *, step: int, mesh: Any, dtype: Any, where: Where | None) -> Any:
    """A stored item as JAX arrays, mapped where they can be; see `Manager.open`."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ContractError(f"dtype={dtype!r}: floating-point leaves are cast to a floating-point dtype, e.g. bfloat16")
    chosen = _chosen(stored, where)
    check_width(stored, chosen.values(), step=step)
    bring(stored, chosen.values())
    found: dict[int, Any] = {}
    with no_ambient_mesh():
        for place, leaf in chosen.items():
            array = make_array(stored, leaf, _sharding(registry, stored, leaf, mesh), own=False)
            cast = dtype is not None and jnp.issubdtype(getattr(array, "dtype", np.int32), jnp.floating)
            found[place] = array.astype(dtype) if cast else array
    return _assemble(stored, found)


def host_item(stored: StoredItem, *, mapped: bool, where: Where | None) -> Any:
    """A stored item as NumPy arrays; see `Manager.restore_to_host`."""
    chosen = _chosen(stored, where)
    leaves = list(chosen.values())
    bring(stored, leaves)
    arrays = [map_leaf(stored, leaf) for leaf in leaves] if mapped else read_leaves(stored, leaves)
    found: dict[int, Any] = dict(zip(chosen, arrays, strict=True))
    found |= {place: python_number(stored, leaf) for place, leaf in chosen.items() if leaf.python}
    return _assemble(stored, found)


def _chosen(stored: StoredItem, where: Where | None) -> dict[int, StoredLeaf]:
    return {place: leaf for place, leaf in enumerate(stored.leaves) if where is None or where(leaf.path)}


def _sharding(registry: Registry, stored: StoredItem, leaf: StoredLeaf, mesh: Any) -> Any:
    if mesh is None:
        return default_sharding()
    return registry.sharding(stored.name, leaf.path, leaf.shape, mesh)


def _assemble(stored: StoredItem, found: Mapping[int, Any]) -> Any:
    tree = stored.tree if len(found) == len(stored.leaves) else select(stored.tree, found.__contains__)
    return {} if tree is None else unflatten(tree, [found.get(place) for place in range(len(stored.leaves))])
