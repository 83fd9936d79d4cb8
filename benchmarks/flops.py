"""FLOPs of matrix products: those that a compiled program does, and those that a training step cannot do without.

A product of `[m, k]` by `[k, n]` takes `2 m k n`; one with k = 1 is elementwise, and nothing elementwise is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

Products = dict[tuple[str, ...], float]  # what is multiplied → FLOPs; equal keys are one product, needed once

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (?:\w+\[([\d,]*)\])?")
_DOT = re.compile(r" dot\(%?([\w.-]+),.*?lhs_contracting_dims=\{([\d,]*)\}")
_CALL = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')


def of_program(text: str) -> float:
    """FLOPs of the dots in optimized HLO, those inside a loop as often as it is known to run."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and "->" in line and " = " not in line.partition("->")[0]:
            name = line.removeprefix("ENTRY ").strip().partition(" ")[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    known: dict[str, float] = {}

    def count(name: str) -> float:
        if name not in known:
            known[name] = _of_lines(bodies[name], count)
        return known[name]

    return count(entry)


def _of_lines(lines: Sequence[str], count: Callable[[str], float]) -> float:
    shapes: dict[str, list[int]] = {}
    total = 0.0
    for line in lines:
        if not (found := _LINE.match(line)):
            continue
        shapes[found[1]] = [int(size) for size in (found[2] or "").split(",") if size]
        if dot := _DOT.search(line):
            contracted = prod(shapes[dot[1]][int(axis)] for axis in dot[2].split(",") if axis)
            total += 2.0 * prod(shapes[found[1]]) * contracted * (contracted > 1)
        if called := _CALL.search(line):
            trips = int(known[1]) if (known := _TRIPS.search(line)) else 1
            total += trips * sum(count(name) for name in re.findall(r"[\w.-]+", called[1]))
    return total


class Product(NamedTuple):
    """One product by a weight; what stands on one stage runs side by side, on what the stages before it made."""

    name: str
    stage: int
    d_in: int
    d_out: int


class Attention(NamedTuple):
    """Scores and mixing of one attention, over all pairs of positions."""

    stage: int
    width: int


class Network(NamedTuple):
    """A target as products.

    Attributes:
        parts: its operations.
        positions: of a batch, in all.
        length: of a sequence.
        counts: C of each site.
    """

    parts: tuple[Product | Attention, ...]
    positions: int
    length: int
    counts: Mapping[str, int]

    def clean(self) -> Products:
        """The frozen forward."""
        return {("frozen", str(part)): flops for part in self.parts for flops in [self._forward(part)]}

    def faithfulness(self) -> Products:
        """`V U` of each site, and the gradients of V and U."""
        sites = [part for part in self.parts if isinstance(part, Product) and part.name in self.counts]
        return {("VU", p.name, which): 2.0 * p.d_in * self.counts[p.name] * p.d_out for p in sites for which in "yVU"}

    def masked(self, live: Iterable[str], tag: str, *, learn: bool = True) -> Products:
        """One masked forward with its gradients: by masks, and with `learn` by V and U.

        What the first live sites read is clean: their `x V` and `x W` are those of every other forward, and no gradient
        goes further back. Frozen weights have no gradient, and nothing before a live site runs.
        """
        live, N = set(live), self.positions
        first = min(part.stage for part in self.parts if isinstance(part, Product) and part.name in live)
        found: Products = {}
        for part in self.parts:
            name, moved = str(part), part.stage > first
            own = (tag,) if moved else ()
            if isinstance(part, Product) and part.name in live:
                into, out = (2.0 * N * size * self.counts[part.name] for size in (part.d_in, part.d_out))
                found |= {(*own, "xV", part.name): into, (*own, "frozen", name): self._forward(part)}
                found |= {(tag, "hU", name): out, (tag, "dh", name): out}
                found |= {(tag, "dU", name): out, (tag, "dV", name): into} if learn else {}
                found |= {(tag, "dx", name): into, (tag, "frozen dx", name): self._forward(part)} if moved else {}
            elif moved:
                twice = 2 if isinstance(part, Attention) else 1
                found |= {(tag, "frozen", name): self._forward(part)}
                found |= {(tag, "dx", name): twice * self._forward(part)}
        return found

    def _forward(self, part: Product | Attention) -> float:
        if isinstance(part, Attention):
            return 4.0 * self.positions * self.length * part.width
        return 2.0 * self.positions * part.d_in * part.d_out

    def per_component_mlp(self, hidden: int) -> Products:
        """Importance by one MLP a component, from `x V`: its way out, and three gradients and that of V."""
        found: Products = {}
        for part in self.parts:
            if isinstance(part, Product) and (C := self.counts.get(part.name)):
                into, units = 2.0 * self.positions * part.d_in * C, 2.0 * self.positions * C * hidden
                found |= {("xV", part.name): into, ("ci", part.name, "dV"): into}
                found |= {("ci", part.name, which): units for which in ("out", "dw_out", "dw_in", "dx")}
        return found

    def transformer(self, taps: int, width: int, blocks: int, hidden: int) -> Products:
        """Importance by a transformer of one chunk: forward, and two gradients of each product but the first.

        Its blocks' insides are not kept: all but the last product of a block is needed once more for the backward.
        """
        N = self.positions
        block = N * (8.0 * width**2 + 4.0 * width * hidden)
        attention = 4.0 * N * self.length * width
        heads = 2.0 * N * width * sum(self.counts.values())
        first = 2.0 * N * taps * width
        return {
            ("ci", "input"): 2 * first,
            ("ci", "heads"): 3 * heads,
            ("ci", "blocks"): blocks * 3 * (block + attention),
            ("ci", "blocks again"): blocks * (block + attention - 2.0 * N * width * hidden),
        }
