"""A frozen model to decompose: a pure function and its parameters; nothing here changes either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdlib.rewrite.plan import Plan, make_plan


@dataclass(frozen=True)
class Target:
    """A model as pdlib sees it.

    Attributes:
        apply: `apply(params, *batch) → output`, e.g. `hk.without_apply_rng(hk.transform(net)).apply`; state and keys
            are parts of the batch. Arguments that choose the program, such as `is_training`, belong in a closure.
        params: the trained parameters, a Haiku mapping module → parameter → array, or abstract ones.
    """

    apply: Callable[..., Any]
    params: Any

    def plan(self, batch: Any) -> Plan:
        """Trace the model on the shapes of a batch, one argument or a tuple of several; computes and copies nothing.

        Raises:
            NameCollision: two parameters have one path.
        """
        return make_plan(self.apply, self.params, batch)
