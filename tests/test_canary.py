"""The strictness that the other tests rely on is really on."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from pdlib.method import losses
from pdlib.method.initialise import spread_factors


def test_runtime_shape_checks_fire():
    losses.mean_squared_error(jnp.ones((5, 4)), jnp.ones((5, 4)))
    with pytest.raises(jaxtyping.TypeCheckError):
        losses.mean_squared_error(jnp.ones((5, 4)), jnp.ones((6, 4)))
    with pytest.raises(jaxtyping.TypeCheckError):
        losses.mean_squared_error(jnp.ones((5, 4)), jnp.ones((5, 4), jnp.int32))
    with pytest.raises(jaxtyping.TypeCheckError):
        spread_factors(jax.random.key(0), jnp.ones((5, 4, 3)), 8)


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="canary"):
        warnings.warn("canary", UserWarning, stacklevel=1)


def test_there_are_eight_devices():
    assert len(jax.devices()) == 8
