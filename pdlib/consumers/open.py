"""Opens a run's product for use; reads nothing of the process and imports no training code."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pdlib.errors import ContractError, NoCheckpoint, PdlibError
from pdlib.items.state import Decomposition, Factors
from pdlib.store.checkpoint import Manager
from pdlib.store.decomposition import PRODUCT, restore_decomposition, restore_decomposition_to_host
from pdlib.store.find import find_run
from pdlib.store.places import locate


@dataclass(frozen=True)
class OpenedRun:
    """A run opened for reading.

    Attributes:
        path: the run directory.
        step: the step whose product this is.
        decomposition: the product.
    """

    path: Path
    step: int
    decomposition: Decomposition

    @property
    def components(self) -> dict[str, Factors]:
        """`Factors` of each opened site."""
        return self.decomposition.components

    @property
    def ci_fn(self) -> Any:
        """Parameters of the causal-importance function."""
        return self.decomposition.ci_fn

    @property
    def sites(self) -> tuple[str, ...]:
        """The opened sites."""
        return tuple(self.components)

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The run's pinned `run.toml` as plain values; empty for a run that has none."""
        path = self.path / "run.toml"
        return tomllib.loads(path.read_text("utf-8")) if path.exists() else {}

    def __repr__(self) -> str:
        rows = [
            f"  {site}  V {list(f.V.shape)}  U {list(f.U.shape)}  {f.V.dtype}" for site, f in self.components.items()
        ]
        return "\n".join([f"OpenedRun({str(self.path)!r}, step={self.step})", *rows])


def open_run(
    path: str | Path,
    *,
    step: int | None = None,
    sites: str | list[str] | None = None,
    dtype: Any = None,
    mesh: Any = None,
    verify: bool = False,
    host: bool = False,
) -> OpenedRun:
    """Open the product of a run: on CPU in milliseconds whatever its size, safe while the run is training.

    Args:
        path: the run directory.
        step: the newest that holds a product when None.
        sites: only this site, or these; all when None.
        dtype: cast floating-point leaves; the stored dtype when None.
        mesh: shard over this mesh as the contract says.
        verify: first compare every byte of the product with its manifest.
        host: read-only NumPy arrays over the files instead of JAX arrays; `dtype` and `mesh` do not go with it.

    Raises:
        NotARun, NoCheckpoint, TornStep, ForeignLayout: there is no such product; the text says where to look.
        CorruptItem: `verify` found bytes that are not those written.
        ContractError: `host` together with `dtype` or `mesh`.
    """
    run = find_run(locate(path))
    if host and (dtype is not None or mesh is not None):
        raise ContractError("open_run(host=True) gives the stored arrays: leave dtype and mesh out, or host")
    with Manager(run / "ckpts", read_only=True) as manager:
        while True:
            newest = manager.latest(items=(PRODUCT,)) if step is None else step
            if newest is None:
                raise NoCheckpoint(f"{run} holds no product yet; let it train to its first save")
            try:
                if verify:
                    manager.verify(newest, items=(PRODUCT,)).require()
                if host:
                    product = restore_decomposition_to_host(manager, newest, sites=sites, mapped=True)
                else:
                    product = restore_decomposition(manager, newest, sites=sites, dtype=dtype, mesh=mesh)
            except PdlibError:
                if step is None and PRODUCT not in manager.items(newest):
                    continue  # a live run pruned it between choosing and opening: there is a newer one
                raise
            return OpenedRun(run, newest, product)
