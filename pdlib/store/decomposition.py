"""Saves and restores the two items of parameter decomposition by name; everything else is the `Manager`'s."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdlib.errors import NoCheckpoint
from pdlib.items.state import Decomposition, Factors, TrainState
from pdlib.store.checkpoint import Manager
from pdlib.store.find import PRODUCT as PRODUCT
from pdlib.store.find import find_run
from pdlib.store.notes import stripped
from pdlib.store.places import locate

PROCESS = "training"


def save_state(
    manager: Manager, step: int, state: TrainState, *, process: bool = True, background: bool = False
) -> None:
    """Save a training state at a step.

    Args:
        manager: of the run's `ckpts`.
        step: see `Manager.save`.
        state: the two items.
        process: whether to save `training` too; without it the step holds the product alone.
        background: see `Manager.save`.
    """
    items = {PRODUCT: state.decomposition, **({PROCESS: state.training} if process else {})}
    manager.save(step, items, background=background)


def restore_step(manager: Manager, step: int, abstract: TrainState, *, mesh: Any = None) -> TrainState:
    """Restore a training state as owned, donatable arrays.

    Args:
        manager: of the run's `ckpts`.
        step: one that holds both items.
        abstract: `jax.eval_shape` of the initial state, or any twin; see `Manager.restore`.
        mesh: see `Manager.restore`.
    """
    items = {PRODUCT: abstract.decomposition, PROCESS: abstract.training}
    restored = manager.restore(step, items, mesh=mesh)
    return TrainState(restored[PRODUCT], restored[PROCESS])


def restore_latest(
    manager: Manager, abstract: TrainState, *, mesh: Any = None, fallback: bool = False
) -> tuple[int, TrainState]:
    """Restore the newest step that holds both items, and let the manager go on saving from there.

    Raises:
        NoCheckpoint: no step holds both items.
        TornStep: a step at least as new is not whole, and `fallback` is not set.
    """
    step = manager.latest(items=(PRODUCT, PROCESS), fallback=fallback)
    if step is None:
        held = ", ".join(map(str, manager.steps())) or "none"
        raise NoCheckpoint(
            f"{manager.directory} holds no step with both {PRODUCT} and {PROCESS}; steps: {held}. {_why(manager)}"
            "Start anew in another directory, or from a product with init_from_parent."
        )
    state = restore_step(manager, step, abstract, mesh=mesh)
    if not manager.read_only:
        manager.resume_at(step)
    return step, state


def restore_decomposition(
    manager: Manager,
    step: int | None = None,
    *,
    sites: str | Sequence[str] | None = None,
    dtype: Any = None,
    mesh: Any = None,
) -> Decomposition:
    """Open the product as JAX arrays; on CPU without a copy wherever one file is a leaf. Never looks at the process.

    Args:
        manager: of the run's `ckpts`.
        step: the newest that holds a product when None.
        sites: only this site's or these sites' factors; all when None. The importance function always comes whole.
        dtype: cast floating-point leaves; the stored dtype when None.
        mesh: see `Manager.open`.

    Raises:
        NoCheckpoint: there is no product, or a site is not in it.
    """
    step = _product_step(manager, step)
    where = None if sites is None else _where(manager, step, sites, ci_fn=True)
    return _decomposition(manager.open(step, PRODUCT, mesh=mesh, dtype=dtype, where=where))


def restore_decomposition_to_host(
    manager: Manager, step: int | None = None, *, sites: str | Sequence[str] | None = None, mapped: bool = False
) -> Decomposition:
    """The product as NumPy arrays; see `restore_decomposition` and `Manager.restore_to_host`."""
    step = _product_step(manager, step)
    where = None if sites is None else _where(manager, step, sites, ci_fn=True)
    return _decomposition(manager.restore_to_host(step, PRODUCT, mapped=mapped, where=where))


def restore_factors(
    manager: Manager, sites: str | Sequence[str], *, step: int | None = None, dtype: Any = None, mesh: Any = None
) -> dict[str, Factors]:
    """V and U of one site or several as JAX arrays, and nothing else; see `restore_decomposition`."""
    step = _product_step(manager, step)
    opened = manager.open(step, PRODUCT, mesh=mesh, dtype=dtype, where=_where(manager, step, sites, ci_fn=False))
    return _decomposition(opened).components


def init_from_parent(
    parent: Manager | str | Path, abstract: Decomposition, *, step: int | None = None, mesh: Any = None
) -> Decomposition:
    """The product of a finished run as the start of another: owned, donatable arrays. Its process stays behind (S33).

    Args:
        parent: a run directory, or a manager of its `ckpts`; it is only read.
        abstract: what the new run's `init_decomposition` would give; sites, C and importance function must agree.
        step: the parent's newest when None.
        mesh: see `Manager.restore`.

    Raises:
        SpecMismatch: the parent's product has another structure; lists every leaf.
        NotARun, NoCheckpoint: there is no such parent.
    """
    if not isinstance(parent, Manager):
        parent = Manager(find_run(locate(parent)) / "ckpts", read_only=True)
    step = _product_step(parent, step)
    return parent.restore(step, {PRODUCT: abstract}, mesh=mesh)[PRODUCT]


def _why(manager: Manager) -> str:
    """Why steps lack their process, as far as they say so themselves."""
    notes = {step: stripped(manager.directory / str(step)) for step in manager.steps()}
    when = [f"{step} at {note['at']}" for step, note in notes.items() if note and PROCESS in note["items"]]
    return f"It cannot resume: {PROCESS} was stripped of {', '.join(when)}. " if when else ""


def _product_step(manager: Manager, step: int | None) -> int:
    step = manager.latest(items=(PRODUCT,)) if step is None else step
    if step is None:
        raise NoCheckpoint(f"{manager.directory} holds no step with a {PRODUCT}; train first, or check the path")
    return step


def _where(
    manager: Manager, step: int, sites: str | Sequence[str], *, ci_fn: bool
) -> Callable[[tuple[str, ...]], bool]:
    sites = [sites] if isinstance(sites, str) else sites
    stored = manager.describe(step, PRODUCT)
    known = {leaf.path[1] for leaf in stored.leaves if leaf.path[0] == "components"}
    for site in sites:
        if site not in known:
            near = difflib.get_close_matches(site, known, n=3) or sorted(known)
            raise NoCheckpoint(
                f"step {step} of {manager.directory} has no site {site!r}; did you mean {' or '.join(near)}?"
            )
    wanted = set(sites)
    return lambda keys: keys[1] in wanted if keys[0] == "components" else ci_fn


def _decomposition(tree: Any) -> Decomposition:
    fields = tree._asdict() if hasattr(tree, "_asdict") else tree
    components = {
        site: Factors(**(pair._asdict() if hasattr(pair, "_asdict") else pair))
        for site, pair in (fields.get("components") or {}).items()
    }
    ci_fn = fields.get("ci_fn")
    return Decomposition(components, {} if ci_fn is None else ci_fn)
