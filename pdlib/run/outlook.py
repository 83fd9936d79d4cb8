"""What a run would be, before it is: each value with its origin, sites, bytes, devices; computes and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pdlib.items.state import Site
from pdlib.run.build import task_of
from pdlib.run.problem import Problem
from pdlib.run.spec import RunSpec, flat, load_run_spec, origins
from pdlib.store.decomposition import PROCESS, PRODUCT
from pdlib.store.ledger import size as shown_size


@dataclass(frozen=True)
class Outlook:
    """A run that is not started.

    Attributes:
        spec: every value.
        origin: where each value comes from, by its dotted key: `--set`, the file, or `default`.
        sites: shape and C of each site.
        nbytes: of each item of a step.
        disk: bytes of all products, and of the processes that are kept, when the run is complete.
        devices: how many, of what kind.
        mesh: axis → size.
    """

    spec: RunSpec
    origin: dict[str, str]
    sites: dict[str, Site]
    nbytes: dict[str, int]
    disk: dict[str, int]
    devices: str
    mesh: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        values = flat(self.spec)
        return {
            "values": {key: {"value": value, "origin": self.origin[key]} for key, value in values.items()},
            "sites": {name: site._asdict() for name, site in self.sites.items()},
            "bytes": self.nbytes,
            "disk": self.disk,
            "devices": self.devices,
            "mesh": self.mesh,
        }

    def render(self) -> str:
        """All of it, for a person."""
        values = flat(self.spec)
        width = max(map(len, values))
        shown = {key: "none" if value is None else repr(value) for key, value in values.items()}
        room = min(40, max(map(len, shown.values())))
        lines = [f"  {key:<{width}}  {shown[key]:<{room}}  {self.origin[key]}".rstrip() for key in values]
        sites = [f"  {name:<{width}}  {site.d_in} → {site.d_out}, C {site.C}" for name, site in self.sites.items()]
        sizes = [f"  {item:<{width}}  {shown_size(size)} a step" for item, size in self.nbytes.items()]
        sizes += [f"  {what:<{width}}  {shown_size(size)}" for what, size in self.disk.items()]
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return "\n".join([
            f"{self.spec.name}: would run {self.spec.training.steps} steps on {self.devices}, as {mesh}",
            "values:", *lines, "sites:", *sites, "bytes:", *sizes,
        ])  # fmt: skip


def outlook(name_or_path: str, *, overrides: Sequence[str] = (), devices: Sequence[Any] | None = None) -> Outlook:
    """What `pdlib train` would do with this specification.

    Raises:
        RunSpecError, NoSuchSite: what is wrong with it.
    """
    spec = load_run_spec(name_or_path, overrides=overrides)
    task = task_of(spec)
    params = jax.eval_shape(task.pretrain, jax.random.key(0)) if task.shapes is None else task.shapes
    problem = Problem(spec, task, params, devices)
    state = problem.abstract_state()
    nbytes = {PRODUCT: _nbytes(state.decomposition), PROCESS: _nbytes(state.training)}
    saving, steps = spec.saving, spec.training.steps
    products = 1 + -(-steps // saving.product_every)
    processes = min(saving.keep_processes, 1 + -(-steps // saving.process_every))
    disk = {
        f"{products} products": products * nbytes[PRODUCT],
        f"{processes} processes": processes * nbytes[PROCESS],
    }
    found = problem.mesh.devices.ravel()
    kind = f"{len(found)} × {found[0].device_kind}"
    return Outlook(
        spec, origins(name_or_path, spec, overrides), problem.shapes, nbytes, disk, kind, dict(problem.mesh.shape)
    )


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
