"""The strictness that the other tests rely on is really on."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from pdlib.items.state import Factors
from pdlib.method.masks import SiteMask, masked_linear
from pdlib.targets import tms


def test_runtime_shape_checks_fire():
    factors = Factors(jnp.ones((4, 2)), jnp.ones((2, 3)))
    mask = SiteMask(jnp.ones((5, 2)), jnp.ones((5, 1)))
    masked_linear(jnp.ones((5, 4)), jnp.ones((4, 3)), factors, mask)
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_linear(jnp.ones((5, 4)), jnp.ones((6, 3)), factors, mask)
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_linear(jnp.ones((5, 4)), jnp.ones((4, 3), jnp.int32), factors, mask)
    with pytest.raises(jaxtyping.TypeCheckError):
        tms.clean({"linear1": {"w": jnp.ones((4, 2))}, "linear2": {"w": jnp.ones((2, 4)), "b": 0}}, jnp.ones(4))


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="canary"):
        warnings.warn("canary", UserWarning, stacklevel=1)


def test_there_are_eight_devices():
    assert len(jax.devices()) == 8
