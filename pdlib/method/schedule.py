"""What changes over a run, as functions of the step; knows no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

Schedule = Callable[[Any], Any]


def cosine(peak: float, steps: int, *, final_fraction: float) -> Schedule:
    """From `peak` at step 0 by half a cosine to `final_fraction · peak` at step `steps − 1`."""

    def at(step: Any) -> Any:
        progress = jnp.clip(step / max(steps - 1, 1), 0, 1)
        return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return at


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return lambda _: value


def warm_up(peak: float, steps: int, *, fraction: float) -> Schedule:
    """From 0 at step 0 linearly to `peak` over the first `fraction` of the run; constant after."""
    length = fraction * steps

    def at(step: Any) -> Any:
        return peak * jnp.minimum(1.0, step / length) if length > 0 else jnp.float32(peak)

    return at


def anneal(start: float, final: float, steps: int) -> Schedule:
    """From `start` at step 0 linearly to `final` at step `steps − 1`; constant after, and everywhere if equal."""
    if start == final:
        return constant(start)  # known when a step is compiled: a power of 1 or 2 then costs nothing

    def at(step: Any) -> Any:
        return start + (final - start) * jnp.clip(step / max(steps - 1, 1), 0, 1)

    return at


def ramp(final: float, steps: int, *, fraction: float) -> Schedule:
    """From 0 linearly to `final` over the first `fraction` of the run; constant after, or from the start if 0."""
    length = fraction * steps

    def at(step: Any) -> Any:
        return final * jnp.minimum(1.0, (step + 1) / length) if length >= 1 else jnp.float32(final)

    return at
