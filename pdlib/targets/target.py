"""A frozen model to decompose: a pure function and its parameters; nothing here changes either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A model as pdlib sees it.

    Attributes:
        apply: `apply(params, *batch) → output`, e.g. `hk.without_apply_rng(hk.transform(net)).apply`.
        params: the trained parameters, a Haiku mapping module → parameter → array.
    """

    apply: Callable[..., Any]
    params: Any
