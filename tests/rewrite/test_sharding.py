"""C over one axis of a mesh and the batch over another: values and gradients are those of one device."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pdlib
from tests.rewrite.models import D, T
from tests.rewrite.oracle import factors_of

BATCH, WIDE = 8, 16


def net(x):
    x = hk.nets.MLP([WIDE, D])(x)
    x = hk.layer_stack(2)(lambda h: h + hk.nets.MLP([WIDE, D], name="m")(jnp.tanh(h)))(x)
    w = hk.get_parameter("heads", (D, 2, 4), init=hk.initializers.RandomNormal())
    return hk.remat(hk.Linear(3))(jnp.einsum("btd,dhk->bthk", x, w).reshape(x.shape))


@pytest.fixture(scope="module")
def problem():
    """Arguments of a loss on one device, and its value and gradients there."""
    transformed = hk.without_apply_rng(hk.transform(net))
    x = jax.random.normal(jax.random.key(0), (BATCH, T, D))
    params = transformed.init(jax.random.key(1), x)
    plan = pdlib.Target(transformed.apply, params).plan(x)
    sites = plan.sites("*")
    factors = factors_of(sites, components=WIDE)
    masks = {}
    for name, site in sites.items():
        front = site.positions[name]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), len(masks)), 3)
        masks[name] = {
            "mask": jax.random.uniform(keys[0], (*front, WIDE)),
            "delta": jax.random.uniform(keys[1], (*front, 1)),
            "route": jax.random.bernoulli(keys[2], 0.7, (*front, 1)),
        }
    arguments = (params, factors, masks, x)
    return transformed.apply, plan, arguments, gradient_of(plan)(*arguments)


def gradient_of(plan):
    def loss(params, factors, masks, x):
        return jnp.mean(plan.masked(params, factors, masks, x) ** 2)

    return jax.jit(jax.value_and_grad(loss, (1, 2), allow_int=True))


def spread(arguments, mesh):
    """The arguments on a mesh: the batch over `data`, C over `c`."""

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    params, factors, masks, x = arguments
    V_U = {
        name: pdlib.Factors(put(f.V, *[None] * (f.V.ndim - 1), "c"), put(f.U, *[None] * (f.U.ndim - 2), "c", None))
        for name, f in factors.items()
    }
    placed = {
        name: {
            part: put(value, *[None] * (value.ndim - 3), "data", None, "c" if part == "mask" else None)
            for part, value in mask.items()
        }
        for name, mask in masks.items()
    }
    return jax.tree.map(put, params), V_U, placed, put(x, "data")


@pytest.mark.parametrize(("data", "c"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)])
def test_on_a_mesh_values_and_gradients_are_those_of_one_device(problem, devices, data, c):
    _, plan, arguments, wanted = problem
    mesh = jax.sharding.Mesh(np.array(devices[: data * c]).reshape(data, c), ("data", "c"))
    placed = spread(arguments, mesh)
    check(gradient_of(plan)(*placed), wanted, placed)


@pytest.mark.parametrize(("data", "c"), [(1, 2), (2, 2), (2, 4)])
def test_with_explicit_axes_values_and_gradients_are_those_of_one_device(problem, devices, data, c):
    apply, _, arguments, wanted = problem
    mesh = jax.make_mesh(
        (data, c), ("data", "c"), devices=devices[: data * c], axis_types=(AxisType.Explicit, AxisType.Explicit)
    )
    placed = spread(arguments, mesh)
    with jax.set_mesh(mesh):
        plan = pdlib.Target(apply, placed[0]).plan(placed[-1])
        check(gradient_of(plan)(*placed), wanted, placed)


def check(found, wanted, placed):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    _, factors, masks, _ = placed
    for gradients, values in zip(found[1], (factors, masks), strict=True):
        for gradient, value in zip(jax.tree.leaves(gradients), jax.tree.leaves(values), strict=True):
            if gradient.dtype != jax.dtypes.float0:
                assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim), (
                    gradient.sharding,
                    value.sharding,
                )
