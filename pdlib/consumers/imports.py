"""Makes a run of an export, bit-equal to the one that was exported, or none; believes nothing that it can check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlib.consumers.index import INDEX_FILE, ExportedLeaf, ExportIndex, read_index, tensor_bytes
from pdlib.consumers.tensors import map_tensors
from pdlib.errors import ContractError, CorruptItem, NotARun
from pdlib.items.contracts import load_contract
from pdlib.store import files
from pdlib.store.digest import content_digest
from pdlib.store.find import PRODUCT
from pdlib.store.ledger import size
from pdlib.store.memory import as_bytes
from pdlib.store.orbax_format import zarray
from pdlib.store.places import is_remote, locate
from pdlib.store.seal import Entries, seal_item, seal_step, write_entry
from pdlib.store.snapshot import ZARR_NAMES
from pdlib.store.stored import chunk_file, read_item
from pdlib.tree import stored_names

Say = Callable[[str], None]


@dataclass(frozen=True)
class ImportPlan:
    """What an import writes.

    Attributes:
        source: the directory that an export made.
        run: the run directory to be made.
        index: what the export says of itself, held to what can be.
    """

    source: Path
    run: Path
    index: ExportIndex

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(tensor_bytes(entry.leaf) for entry in self.index.leaves)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return {
            "source": str(self.source), "run": str(self.run), "step": self.index.step, "bytes": self.nbytes,
            "leaves": ["/".join(entry.leaf.path) for entry in self.index.leaves],
            "run_files": sorted(self.index.run_files), "content_digest": self.index.content_digest,
        }  # fmt: skip

    def render(self) -> str:
        """The plan as text."""
        index = self.index
        return "\n".join(
            [
                f"{self.source} → {self.run}, step {index.step}: {len(index.leaves)} leaves, {size(self.nbytes)}",
                *(f"  {name}" for name in sorted(index.run_files)),
                f"  content digest {index.content_digest}",
            ]
        )


def plan_import(source: str | Path, run: str | Path) -> ImportPlan:
    """Look at what an import makes; reads the index alone, and touches nothing.

    Args:
        source: a directory that `pdlib export` made.
        run: the run directory to be made.

    Raises:
        NotARun: the source is no export.
        CorruptItem, ForeignLayout: its index was changed, says what cannot be, or is of another format.
        NameCollision: leaves have names that no run stores.
        ContractError: the product was written under a newer contract; or a path is a URL.
        StepRefused: the run exists.
    """
    home, target = locate(source), locate(run)
    for place in (home, target):
        if is_remote(place):
            raise ContractError(f"{place} is a URL; copy the export to a directory here, and import it to one here")
    files.check_free(target)
    try:
        data = (home / INDEX_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARun(
            f"{home} is no export: it has no {INDEX_FILE}; name the directory that pdlib export made"
        ) from error
    index = read_index(data, home / INDEX_FILE)
    _check_storable(index, home / INDEX_FILE)
    newest = load_contract(PRODUCT).version
    if index.version > newest:
        raise ContractError(
            f"{home} was written under {PRODUCT} v{index.version}, this pdlib knows v{newest}; use a newer pdlib"
        )
    return ImportPlan(home, target, index)


@files.changing
def apply_import(plan: ImportPlan, *, say: Say = lambda _: None) -> None:
    """Make the run of a plan; a kill at any instruction leaves it absent or whole.

    Raises:
        CorruptItem: a file is missing or changed, or the values are not those that were exported; lists each.
        StepRefused: the run exists.
        SaveFailed: a file could not be written; the run is not there.
    """
    bad = [file for file, entry in plan.index.files.items() if not _is_same(plan.source / file, entry)]
    if bad:
        lines = "\n".join(f"changed or missing: {plan.source / file}" for file in bad)
        raise CorruptItem(f"{lines}\nRestore these files from a copy.")
    with files.staged(plan.run) as staging:
        step = staging / "ckpts" / str(plan.index.step)
        _write_item(plan, step / PRODUCT, say)
        seal_step(step, plan.index.started)
        if content_digest(read_item(step / PRODUCT)) != plan.index.content_digest:
            raise CorruptItem(
                f"{plan.source}: the values are not those that were exported; export again, or use another copy"
            )
        for name, text in plan.index.run_files.items():
            files.write_file(staging / name, text.encode())


def _check_storable(index: ExportIndex, place: Path) -> None:
    """Names that a save would have given, and no others: they become paths."""
    leaves = [entry.leaf for entry in index.leaves]
    names = stored_names([leaf.path for leaf in leaves], subject=str(place))
    bad = [f"  {leaf.name!r}" for leaf, name in zip(leaves, names, strict=True) if leaf.name != name]
    bad += [f"  {leaf.stored_dtype!r}" for leaf in leaves if leaf.stored_dtype not in ZARR_NAMES]
    if bad:
        lines = "\n".join(bad)
        raise CorruptItem(
            f"{place} has names that no leaf is stored by\n{lines}\nNothing was made; get the export anew."
        )


def _is_same(path: Path, entry: Any) -> bool:
    try:
        return files.hash_file(path) == entry
    except OSError:
        return False


def _write_item(plan: ImportPlan, target: Path, say: Say) -> None:
    entries: Entries = {}
    target.mkdir(parents=True)
    for file in plan.index.files:
        say(file)
        held = [entry for entry in plan.index.leaves if entry.file == file and not entry.leaf.is_empty]
        _write_leaves(plan.source / file, held, target, entries)
    leaves = [entry.leaf for entry in plan.index.leaves]
    seal_item(target, plan.index, plan.index.tree, leaves, layout="raw", entries=entries)


def _write_leaves(path: Path, held: list[ExportedLeaf], target: Path, entries: Entries) -> None:
    tensors = map_tensors(path)
    for entry in held:
        leaf = entry.leaf
        if entry.tensor not in tensors or len(tensors[entry.tensor]) != tensor_bytes(leaf):
            raise CorruptItem(f"{path} does not hold {'/'.join(leaf.path)} as its index says; get the export anew")
        place = (0,) * len(leaf.stored_shape)
        write_entry(target, chunk_file(leaf.name, place), as_bytes(tensors[entry.tensor]), entries)
        write_entry(target, f"{leaf.name}/.zarray", zarray(leaf), entries)
