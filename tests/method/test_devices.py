"""A run is the same whatever the number of devices, and however batch and components lie on them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdlib.items.state import Factors, Site, init_decomposition
from pdlib.method import losses, routing, schedule
from pdlib.method.adversary import Fresh, Persistent, Scope
from pdlib.method.importance import layerwise_mlp
from pdlib.method.objective import faithfulness, minimality, reconstruction
from pdlib.method.reconstruction import Reconstruction, all_sites
from pdlib.method.step import init_adversaries, init_state, make_loop, make_step
from tests.method.problems import KEY, NAMES, OPTIMIZERS, PARAMS, model_of, sampler

SHAPES = {"one": Site(4, 3, 8), "two": Site(3, 4, 8)}
COUNTS = {name: site.C for name, site in SHAPES.items()}
IMPORTANCE = layerwise_mlp([3])
BATCH, UPDATES = (8,), 3
PERSISTENT = Persistent(Scope("c"), schedule.constant(0.05), 1)
EACH = Persistent(Scope("bc"), schedule.constant(0.05), 0)


def terms() -> Any:
    cost = losses.smooth_l0(schedule.constant(0.5))
    subset = routing.uniform_k_subset
    plans = {
        "persistent": Reconstruction(all_sites(NAMES), subset, adversary=PERSISTENT),
        "merged": Reconstruction(all_sites(NAMES), subset, adversary=EACH, fraction=0.5),
        "fresh": Reconstruction(all_sites(NAMES), adversary=Fresh(Scope("c"), 2, 0.1)),
    }
    return {
        "faithfulness": faithfulness(schedule.constant(1.0)),
        **minimality(schedule.constant(0.05), schedule.constant(0.02), penalty=cost, reference=32.0),
        **{name: reconstruction(schedule.constant(0.5), plan) for name, plan in plans.items()},
    }


def placed(state: Any, mesh: Mesh) -> Any:
    """The state on a mesh: components split by C, sources of an element with it, all else whole on each device."""
    spec = {"V": PartitionSpec(None, "components"), "U": PartitionSpec("components", None)}

    def one(path: Any, x: Any) -> Any:
        name = getattr(path[-1], "name", "")
        own = any(getattr(key, "key", "") == "merged" for key in path) and x.ndim
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if own else spec.get(name, PartitionSpec())))

    return jax.tree_util.tree_map_with_path(one, state)


def trajectory(devices: Any, shape: tuple[int, int]) -> Any:
    """State and metrics after some steps on a mesh of so many devices for the batch, and for the components."""
    mesh = Mesh(np.array(devices[: shape[0] * shape[1]]).reshape(shape), ("data", "components"))
    over_data = NamedSharding(mesh, PartitionSpec("data"))

    def sample(key: Any) -> Any:
        return jax.lax.with_sharding_constraint(sampler(BATCH)(key), over_data)

    objective = terms()
    product = init_decomposition(jax.random.key(1), SHAPES, IMPORTANCE.init)
    adversaries = init_adversaries(objective, KEY, dict.fromkeys(NAMES, BATCH), COUNTS)
    state = placed(init_state(product, OPTIMIZERS, adversaries), mesh)
    V = state.decomposition.components["one"].V
    assert V.addressable_shards[0].data.shape == (4, 8 // shape[1])
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    loop = make_loop(make_step(model_of(BATCH), IMPORTANCE, objective, OPTIMIZERS, sample, KEY))
    return jax.tree.map(np.asarray, loop(state, params, UPDATES))


@pytest.fixture(scope="module")
def single(devices: Any) -> Any:
    return trajectory(devices, (1, 1))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)], ids=str)
def test_a_trajectory_does_not_depend_on_the_devices(devices, single, shape):
    found = trajectory(devices, shape)
    assert jax.tree.structure(found) == jax.tree.structure(single)
    assert isinstance(found[0].decomposition.components["one"], Factors)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(single), strict=True):
        scale = float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))
