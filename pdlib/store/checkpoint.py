"""Saves and restores the items of a registry, a directory a step; knows nothing of what the items mean.

A step is `<directory>/<step>/<item>/…`; every item is one that stock orbax restores too. A reader never writes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax

from pdlib.errors import ContractError, NoCheckpoint, PdlibError, ReadOnly, SaveFailed, StepRefused, TornStep
from pdlib.items.contracts import default_registry
from pdlib.items.registry import Registry
from pdlib.store import processes
from pdlib.store.arrays import no_ambient_mesh
from pdlib.store.commit import ItemImage, commit
from pdlib.store.digest import Verification, content_digest, verify_item
from pdlib.store.evolve import evolve
from pdlib.store.find import check_directory
from pdlib.store.orbax_format import for_orbax
from pdlib.store.places import is_remote, locate
from pdlib.store.prune import delete_items, unkept
from pdlib.store.remote import cached
from pdlib.store.request import match_request
from pdlib.store.restore import Where, host_item, open_item, restore_item
from pdlib.store.retention import Retention
from pdlib.store.snapshot import owned, refuse_tracers, snapshot
from pdlib.store.stored import KEEP_FILE, StoredItem, item_names, read_item, step_numbers
from pdlib.tree import flatten, stored_names

Layout = Literal["raw", "ocdbt"]


class Manager:
    """A directory of steps.

    Args:
        directory: where the steps are; made at the first save. A place in an object store (`s3://…`, `gs://…`) is read
            only: the files that are asked for come to a cache on this machine, each held to its manifest.
        registry: the items that it may hold; parameter decomposition's own when None.
        read_only: refuse whatever writes; the directory must exist then.
        layout: `raw` (a file a shard, opened by mapping) or `ocdbt` (orbax's default, for object stores). What is
            stored in either layout is read by any manager.
        retention: what to keep after each save.

    Raises:
        NotARun: the directory is another level of a run, or missing and `read_only`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        registry: Registry | None = None,
        read_only: bool = False,
        layout: Layout = "raw",
        retention: Retention | None = None,
    ) -> None:
        if layout not in ("raw", "ocdbt"):
            raise ContractError(f"layout {layout!r}; write 'raw' or 'ocdbt'")
        self.directory = locate(directory)
        if is_remote(self.directory) and not read_only:
            raise ContractError(
                f"{directory} is in an object store, where no save is atomic: pass read_only=True to read it, "
                "or save to a file system and copy the steps there"
            )
        self.registry = default_registry() if registry is None else registry
        self.read_only = read_only
        self.layout: Layout = layout
        self.retention = retention or Retention()
        if read_only or self.directory.exists():
            check_directory(self.directory)
        self._floor: int | None = None  # where training resumed; the newest step without it
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdlib-save")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for a background save and release the thread; raises what the save raised."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    # Saving

    def save(self, step: int, items: Mapping[str, Any], *, background: bool = False) -> None:
        """Save some or all items of a step, all or nothing.

        Args:
            step: above every step that is there (or, after `resume_at`, above that one).
            items: item name → tree of JAX or NumPy arrays, typed PRNG keys, Python numbers.
            background: return as soon as the leaves are copied; they may be donated or edited at once. The write is
                awaited, and its error raised, by the next call of any method.

        Raises:
            SpecMismatch, NameCollision, UnstorableLeaf: the trees do not fit; nothing is written.
            StepRefused: the step is not above the newest.
            ReadOnly: the manager only reads.
            SaveFailed: this save, or the last one in the background, could not be written.
        """
        self._writable("save")
        self.wait()
        step = _step_number(step)
        self._admit(step)
        if not items:
            raise StepRefused(f"step {step}: no item was given; name at least one of {', '.join(self.registry.names)}")
        refuse_tracers(items)
        self.registry.check(items, action=f"save of step {step}")
        with no_ambient_mesh():
            images = [self._image(name, tree, own=background) for name, tree in items.items()]
        token = processes.agreed_token()
        if background:
            try:
                self._pending = self._thread.submit(self._write, step, images, token)
            except RuntimeError as error:
                raise SaveFailed(f"step {step}: {self.directory} was closed; open another Manager to save") from error
        else:
            self._write(step, images, token)

    def wait(self) -> None:
        """Wait until the background save is on disk.

        Raises:
            SaveFailed: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except SaveFailed:
                raise
            except PdlibError as error:
                raise SaveFailed(f"the save in the background failed: {error}") from error

    def resume_at(self, step: int) -> None:
        """Allow saves above `step` although later steps exist: training continues from here.

        A later step that is there already must then hold equal values: it is completed with the items it lacks.
        """
        self._writable("resume_at")
        self._floor = _step_number(step)

    def keep(self, step: int, *, keep: bool = True) -> None:
        """Mark a step so that retention never deletes any of it, or take the mark back."""
        self._writable("keep")
        if step not in self.steps():
            raise NoCheckpoint(f"{self.directory} holds no step {step}; it holds {_listing(self.steps())}")
        mark = self.directory / str(step) / KEEP_FILE
        if keep:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def prune(self) -> list[tuple[int, str]]:
        """Delete what retention does not keep, the process before the product; returns the (step, item) pairs."""
        self._writable("prune")
        self.wait()
        return self._prune()

    def _prune(self) -> list[tuple[int, str]]:
        doomed = unkept(self.directory, {item.name: item.role for item in self.registry.items}, self.retention)
        delete_items(self.directory, doomed)
        return doomed

    # Looking

    def steps(self) -> list[int]:
        """The committed steps, ascending, that of a background save included: this waits for it."""
        self.wait()
        return step_numbers(self.directory)

    def items(self, step: int) -> list[str]:
        """The items that a step holds."""
        self.wait()
        return item_names(self.directory / str(step))

    def latest(self, *, items: tuple[str, ...] = (), fallback: bool = False) -> int | None:
        """The newest step that holds all of `items`, or None.

        Args:
            items: item names; none asks for any step. Only these are looked at: a damaged process hides no product.
            fallback: pass over steps that are not whole.

        Raises:
            TornStep: a step at least as new is not whole, and `fallback` is not set; names the last whole one.
        """
        while True:
            steps = self.steps()
            try:
                found = self._latest(steps, items, fallback=fallback)
            except TornStep:
                if set(steps) <= set(self.steps()):
                    raise
                continue
            if found is not None or set(steps) <= set(self.steps()):
                return found
            # a step was pruned between listing and looking: those that are there now are newer

    def _latest(self, steps: list[int], items: tuple[str, ...], *, fallback: bool) -> int | None:
        for step in reversed(steps):
            try:
                self._check_whole(step, items)
            except PdlibError as error:
                if fallback:
                    continue
                whole = self._latest(steps, items, fallback=True)
                raise TornStep(
                    f"the newest step, {step}, of {self.directory} is torn: {error}\n"
                    f"The last whole one is {whole}; pass fallback=True to take it."
                ) from error
            if set(items) <= set(self.items(step)):
                return step
        return None

    def describe(self, step: int, item: str) -> StoredItem:
        """What is stored of an item: contract, structure, leaves and files; reads no array.

        Of an item of an earlier version, as today's contract has it: its changes are made to what is read, and no
        byte of what is stored is touched.

        Raises:
            NoCheckpoint, TornStep, ForeignLayout: there is no such item, or it is not whole, or not pdlib's.
            ContractError: the item is not registered, or was written under a newer contract.
        """
        stored = self._stored(step, item)
        return evolve(cached(stored), self.registry[item])

    def _stored(self, step: int, item: str) -> StoredItem:
        spec = self.registry[item]
        if step not in self.steps():
            check_directory(self.directory)
            raise NoCheckpoint(f"{self.directory} holds no step {step!r}; it holds {_listing(self.steps())}")
        stored = read_item(self.directory / str(step) / item)
        stored.check_whole()
        if stored.version > spec.version:
            raise ContractError(
                f"{stored.directory} was written under {item} v{stored.version}, the registry knows v{spec.version}; "
                "open it with the pdlib that wrote it, or register the newer contract"
            )
        return stored

    def verify(self, step: int, *, items: tuple[str, ...] = ()) -> Verification:
        """Compare every byte of a step, or of some of its items, with what was written, missing evidence included."""
        found = Verification()
        for name in items or self.items(step):
            try:
                found += verify_item(read_item(self.directory / str(step) / name))
            except PdlibError as error:
                found += Verification(unverifiable=(f"{step}/{name}: {error}",))
        if not self.items(step):
            found += Verification(missing=(f"step {step} of {self.directory}",))
        return found

    def content_digest(self, step: int, item: str) -> str:
        """A digest of an item's values that does not depend on shards, layout, files or process."""
        return content_digest(cached(self._stored(step, item)))

    # Restoring

    def restore(self, step: int, items: Mapping[str, Any], *, mesh: Any = None) -> dict[str, Any]:
        """Restore items as JAX arrays that a step may take over by donation.

        Args:
            step: which.
            items: item name → abstract tree (`jax.ShapeDtypeStruct` leaves; concrete trees serve for their shapes).
                It gives the containers and classes of the result, and the sharding of each leaf that has one.
            mesh: for leaves without a sharding: their contract's axes on this mesh. Without it they come whole to
                this process's first device.

        Returns:
            item name → tree. An optional leaf that is asked for and not stored comes back as None.

        Raises:
            SpecMismatch: what is stored and what is asked for differ; lists every leaf that does.
            NoCheckpoint, TornStep, ForeignLayout, ContractError: see `describe`.
            ShardingRefused: an axis of `mesh` does not divide a dimension.
        """
        stored = {name: self.describe(step, name) for name in items}
        wanted = {name: match_request(self.registry, stored[name], tree, step=step) for name, tree in items.items()}
        return {name: restore_item(self.registry, stored[name], wanted[name], mesh) for name in items}

    def restore_to_host(self, step: int, item: str, *, mapped: bool = False, where: Where | None = None) -> Any:
        """Restore an item as NumPy arrays, with the structure that is stored; needs no template.

        NumPy keeps 64 bits whatever JAX is set to; typed PRNG keys come as their uint32 key data; containers as
        `pdlib.tree.unflatten` says.

        Args:
            step: which.
            item: which.
            mapped: read-only arrays over the files themselves, which take no time; owned, writable copies otherwise.
            where: only the leaves whose keys it admits.
        """
        return host_item(self.describe(step, item), mapped=mapped, where=where)

    def open(
        self,
        step: int,
        item: str,
        *,
        mesh: Any = None,
        dtype: Any = None,
        where: Where | None = None,
    ) -> Any:
        """Open an item as JAX arrays, structured as stored; on CPU without a copy wherever one file is a leaf.

        Args:
            step: which.
            item: which.
            mesh: the contract's axes on this mesh; whole on this process's first device without it.
            dtype: cast the floating-point leaves; the stored dtype without it.
            where: only the leaves whose keys it admits.
        """
        stored = self.describe(step, item)
        return open_item(self.registry, stored, step=step, mesh=mesh, dtype=dtype, where=where)

    # Inside

    def _image(self, name: str, tree: Any, *, own: bool) -> ItemImage:
        flat = flatten(tree)
        names = stored_names(flat.paths, subject=f"item {name}")
        taken = zip(flat.paths, names, flat.leaves, strict=True)
        raw = self.layout == "raw"
        leaves = [snapshot(name, keys, stored, leaf) for keys, stored, leaf in taken]
        arrays: dict[str, Any] = {}
        if raw:
            leaves = owned(leaves) if own else leaves
        else:
            leaves, arrays = for_orbax(leaves, flat.leaves, own=own)
        return ItemImage(self.registry[name], flat.skeleton, leaves, self.layout, arrays)

    def _write(self, step: int, images: list[ItemImage], token: str) -> None:
        commit(self.directory, step, images, token)
        if self._floor is not None:
            self._floor = step
        if processes.is_lead():
            try:
                self._prune()
            except OSError as error:
                raise SaveFailed(f"step {step} is saved, but an older one could not be deleted: {error}") from error

    def _admit(self, step: int) -> None:
        floor = max(step_numbers(self.directory), default=-1) if self._floor is None else self._floor
        if step <= floor:
            raise StepRefused(
                f"step {step} is not above {floor}, the newest of {self.directory}; "
                "restore the newest step and go on from it, or save to a new directory"
            )

    def _check_whole(self, step: int, items: tuple[str, ...]) -> None:
        names = self.items(step)
        if not names:
            raise TornStep(f"step {step} holds no item")
        for name in set(names) & set(items) if items else names:
            read_item(self.directory / str(step) / name).check_whole()

    def _writable(self, what: str) -> None:
        if self.read_only:
            raise ReadOnly(f"{what}: {self.directory} was opened with read_only=True; open it without to write")


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = int(step) if isinstance(step, jax.Array) and step.shape == () and step.dtype.kind in "iu" else -1
    if number < 0 or isinstance(step, bool):
        raise StepRefused(f"step {step!r} is not a whole number from 0 up")
    return number


def _listing(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-8:])) if steps else "no step"
