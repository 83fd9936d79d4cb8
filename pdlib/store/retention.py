"""Which items a directory keeps, by role; plans only, and deletes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import assert_never

from pdlib.errors import ContractError


@dataclass(frozen=True)
class KeepAll:
    """Keep every step."""


@dataclass(frozen=True)
class KeepNewest:
    """Keep the newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ContractError(f"KeepNewest({self.count!r}): write how many steps to keep, a whole number from 1 up")


@dataclass(frozen=True)
class KeepMarked:
    """Keep only what the user marked with `Manager.keep`."""


Policy = KeepAll | KeepNewest | KeepMarked


@dataclass(frozen=True)
class Retention:
    """A policy a role. Marked steps, the newest step and the newest resumable step are kept whatever it says."""

    product: Policy = field(default_factory=KeepAll)
    process: Policy = field(default_factory=KeepAll)


def evictions(
    steps: Mapping[int, AbstractSet[str]], roles: Mapping[str, str], retention: Retention, *, marked: AbstractSet[int]
) -> list[tuple[int, str]]:
    """The (step, item) pairs to delete; a process goes before, and with, the product it continues.

    Args:
        steps: step → the items it holds.
        roles: item → role, for the items that are registered; others are left alone.
        retention: the policies.
        marked: steps that the user keeps.
    """
    everything = set(roles)
    resumable = [step for step, items in steps.items() if everything <= set(items)]
    safe = set(marked) | set(sorted(resumable)[-1:]) | set(sorted(steps)[-1:])
    kept: dict[str, set[int]] = {}
    for role, policy in (("product", retention.product), ("process", retention.process)):
        holding = sorted(s for s, items in steps.items() if any(roles.get(i) == role for i in items))
        kept[role] = safe | _kept(policy, holding)
    kept["process"] &= kept["product"] if "product" in roles.values() else kept["process"]
    return [
        (step, item)
        for step in sorted(steps)
        for item in sorted(steps[step], key=lambda item: roles.get(item) != "process")
        if item in roles and step not in kept[roles[item]]
    ]


def parse_policy(text: str) -> Policy:
    """`all`, `marked`, or how many of the newest to keep, as the command line takes it.

    Raises:
        ContractError: it is none of these.
    """
    if text == "all":
        return KeepAll()
    if text == "marked":
        return KeepMarked()
    if text.isascii() and text.isdigit():
        return KeepNewest(int(text))
    raise ContractError(f"{text!r} is no policy; write all, marked, or how many of the newest to keep")


def _kept(policy: Policy, holding: Sequence[int]) -> set[int]:
    match policy:
        case KeepAll():
            return set(holding)
        case KeepNewest(count):
            return set(holding[-count:])
        case KeepMarked():
            return set()
        case _:
            assert_never(policy)
