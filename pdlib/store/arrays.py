"""Makes JAX arrays from stored leaves, on any sharding; never rebuilds the mesh that saved them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from pdlib.store.mapped import map_region
from pdlib.store.stored import StoredItem, StoredLeaf


def no_ambient_mesh() -> AbstractContextManager[Any]:
    """A context in which a mesh that the caller has set changes nothing."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def default_sharding() -> Any:
    """Where arrays go when nothing says otherwise: whole, on this process's first device."""
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def make_array(item: StoredItem, leaf: StoredLeaf, sharding: Any, *, own: bool) -> Any:
    """One stored leaf as a JAX array.

    Args:
        item: the item that holds it.
        leaf: the leaf.
        sharding: a `jax.sharding.Sharding` or `Format` of the leaf as its user sees it.
        own: whether the buffers must be JAX's own, so that a step can reuse them when they are donated; without it,
            CPU buffers are the mapped file itself wherever it is one piece.
    """
    if leaf.python is not None:
        return python_number(item, leaf)
    target = sharding.sharding if hasattr(sharding, "layout") else sharding
    data_sharding = _key_data_sharding(target) if leaf.key_impl else target

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        places = zip(index or (), leaf.stored_shape, strict=True)
        return map_region(item, leaf, tuple(slice(*s.indices(size)[:2]) for s, size in places))

    array = jax.make_array_from_callback(leaf.stored_shape, data_sharding, part)
    if own and _on_cpu(data_sharding):
        array = jax.device_put(array, data_sharding, may_alias=False)
    if leaf.key_impl:
        array = jax.random.wrap_key_data(array, impl=leaf.key_impl)
    return jax.device_put(array, sharding) if array.sharding != target or sharding is not target else array


def python_number(item: StoredItem, leaf: StoredLeaf) -> bool | int | float:
    """A leaf that was saved as a Python number."""
    return map_region(item, leaf, ()).item()


def _on_cpu(sharding: Any) -> bool:
    return all(device.platform == "cpu" for device in sharding.addressable_devices)


def _key_data_sharding(sharding: Any) -> Any:
    """Key data has one dimension more than the keys, and that one is never split."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding  # a shorter PartitionSpec leaves trailing dimensions whole
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return sharding
    return default_sharding()
