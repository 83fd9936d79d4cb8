"""Eight simulated devices, runtime shape checks on, and JAX as strict as it can be, before anything imports it."""

from __future__ import annotations

import os
import random

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jaxtyping

_HOOK = jaxtyping.install_import_hook(["pdlib.method", "pdlib.targets"], "beartype.beartype")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "ci", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Give every run of the property tests a seed that its header prints; `--hypothesis-seed` gives it again."""
    if not hasattr(config, "workerinput") and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed."""
    return f"property tests: --hypothesis-seed={config.getoption('--hypothesis-seed')}"


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight simulated devices."""
    found = jax.devices()
    assert len(found) == 8
    return found


@pytest.fixture
def mesh_of(devices: list[jax.Device]):
    """Make a one-axis mesh over the first n devices."""

    def make(count: int, axis: str = "fsdp") -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(devices[:count]), (axis,))

    return make
