"""Carries a product out as safetensors that need nothing of pdlib to be read; imports no jax and no training code.

OUT holds one safetensors file a site, one of the importance function, `index.json` (contract, structure, lineage: all
that coming back needs) and `README.md`, a model card. Leaves go out from where they are mapped, a file at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from blake3 import blake3

from pdlib.consumers.card import model_card
from pdlib.consumers.index import CARD_FILE, INDEX_FILE, RUN_FILES, ExportedLeaf, ExportIndex, tensor_bytes
from pdlib.consumers.tensors import NAMED, map_tensors
from pdlib.errors import ContractError, CorruptItem, UnstorableLeaf
from pdlib.items.contracts import load_contract
from pdlib.store import files
from pdlib.store.digest import content_digest, leaf_digest, verify_item
from pdlib.store.find import PRODUCT, find_product, find_run
from pdlib.store.ledger import size
from pdlib.store.mapped import map_leaf, numpy_dtype
from pdlib.store.memory import as_bytes
from pdlib.store.places import is_remote, locate
from pdlib.store.remote import bring
from pdlib.store.stored import StoredItem, StoredLeaf

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes.

    Attributes:
        run: the run directory.
        out: the directory to be made.
        item: the stored product.
        step: its step.
        groups: file → the leaves that it holds, each with its name there.
    """

    run: Path
    out: Path
    item: StoredItem
    step: int
    groups: Mapping[str, tuple[ExportedLeaf, ...]]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the arrays in each file."""
        return {file: sum(tensor_bytes(e.leaf) for e in held) for file, held in self.groups.items()}

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        held = {file: ["/".join(e.leaf.path) for e in leaves] for file, leaves in self.groups.items()}
        sizes = self.sizes
        return {
            "run": str(self.run), "step": self.step, "out": str(self.out), "bytes": sum(sizes.values()),
            "files": held, "file_bytes": sizes,
        }  # fmt: skip

    def render(self) -> str:
        """The plan as text, a line a file."""
        sizes = self.sizes
        lines = [f"{self.run}, step {self.step} → {self.out}: {size(sum(sizes.values()))} of arrays"]
        lines += [f"  {file}: {len(held)} leaves, {size(sizes[file])}" for file, held in self.groups.items()]
        return "\n".join([*lines, f"  {INDEX_FILE}, {CARD_FILE}"])


def plan_export(run: str | Path, out: str | Path, *, step: int | None = None) -> ExportPlan:
    """Look at what an export writes; touches nothing.

    Args:
        run: the run directory.
        out: the directory to be made.
        step: the newest that holds a product when None.

    Raises:
        NotARun, NoCheckpoint, TornStep: there is no such product.
        UnstorableLeaf: leaves are typed PRNG keys or Python numbers, which no safetensors file holds; lists each.
        StepRefused: OUT exists.
        ContractError: OUT is a URL.
    """
    home, target = find_run(locate(run)), locate(out)
    if is_remote(target):
        raise ContractError(f"{target} is a URL; export to a directory here, which appears whole, then copy it there")
    files.check_free(target)
    item = find_product(home, step)
    refused = [
        f"{PRODUCT}:{'/'.join(leaf.path)} is {'a typed PRNG key' if leaf.key_impl else f'a Python {leaf.python}'}"
        for leaf in item.leaves
        if leaf.key_impl or leaf.python
    ]
    if refused:
        raise UnstorableLeaf(f"{'; '.join(refused)}; store it as an array to export it")
    number = int((item.origin or item.directory).parent.name)
    return ExportPlan(home, target, item, number, _groups(item))


@files.changing
def apply_export(plan: ExportPlan, *, say: Say = lambda _: None) -> None:
    """Write the files of a plan; a kill at any instruction leaves OUT absent or whole.

    Raises:
        StepRefused: OUT exists.
        CorruptItem: the product is not what its manifest records, or was not written as it is.
        SaveFailed: a file could not be written; OUT is not there.
    """
    bring(plan.item, plan.item.leaves)
    if plan.item.origin is None:  # what came from an object store was held to its manifest on the way
        verify_item(plan.item).require()
    with files.staged(plan.out) as staging:
        written: dict[str, Any] = {}
        for file, leaves in plan.groups.items():
            say(f"{file}: {len(leaves)} leaves")
            written[file] = _write_tensors(staging / file, plan.item, leaves)
        index = _index(plan, written)
        files.write_file(staging / INDEX_FILE, index.to_json().encode())
        files.write_file(staging / CARD_FILE, model_card(plan.run, index).encode())


def _groups(item: StoredItem) -> dict[str, tuple[ExportedLeaf, ...]]:
    groups: dict[str, list[StoredLeaf]] = {}
    for leaf in item.leaves:
        groups.setdefault(_file_of(leaf), []).append(leaf)
    result: dict[str, tuple[ExportedLeaf, ...]] = {}
    for file, leaves in groups.items():
        names = [_short_name(leaf) for leaf in leaves]
        counts = Counter([*names, "__metadata__"])  # which safetensors keeps for itself
        clear = [short if counts[short] == 1 else leaf.name for leaf, short in zip(leaves, names, strict=True)]
        if len({*clear}) < len(clear):
            clear = [leaf.name for leaf in leaves]
        pairs = zip(leaves, clear, strict=True)
        result[file] = tuple(
            ExportedLeaf(replace(leaf, chunks=leaf.stored_shape), file, tensor) for leaf, tensor in pairs
        )
    return result


def _file_of(leaf: StoredLeaf) -> str:
    """A file name that is safe everywhere, and one to one with the site: letters of it, and a few of its digest."""
    if leaf.path[0] != "components":
        return f"{leaf.path[0]}.safetensors"
    site = leaf.path[1]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", site)[:80].lstrip(".")
    return f"site-{safe}-{hashlib.sha256(site.encode()).hexdigest()[:8]}.safetensors"


def _short_name(leaf: StoredLeaf) -> str:
    return leaf.path[-1] if leaf.path[0] == "components" else "/".join(leaf.path[1:])


def _write_tensors(path: Path, item: StoredItem, leaves: Sequence[ExportedLeaf]) -> dict[str, Any]:
    """Write leaves from where they are mapped: safetensors takes their addresses, and nothing of them is copied.

    What was written is read again and held to the digests of what was to be.
    """
    stored = [item.by_path[entry.leaf.path] for entry in leaves]
    arrays = [np.empty(leaf.stored_shape, np.uint8) if leaf.is_empty else map_leaf(item, leaf) for leaf in stored]
    tensors: dict[str, Any] = {}
    for entry, leaf, array in zip(leaves, stored, arrays, strict=True):
        named = leaf.dtype in NAMED
        shape = leaf.shape if named else (*leaf.shape, numpy_dtype(leaf.dtype).itemsize)
        tensors[entry.tensor] = safetensors.TensorSpec(
            dtype=leaf.dtype if named else "uint8",
            shape=list(shape),
            data_ptr=array.ctypes.data,
            data_len=0 if leaf.is_empty else array.nbytes,
        )
    try:
        safetensors.serialize_file(tensors, str(path), {"format": "np"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    found = files.settle(path)
    there = map_tensors(path)
    for entry, leaf in zip(leaves, stored, strict=True):
        if blake3(as_bytes(there[entry.tensor])).hexdigest() != leaf_digest(item, leaf):
            raise CorruptItem(f"{'/'.join(leaf.path)} reads back differently from {path.name}; check the disk")
    return found


def _index(plan: ExportPlan, written: Mapping[str, Any]) -> ExportIndex:
    item = plan.item
    held = {entry.leaf.path: entry for leaves in plan.groups.values() for entry in leaves}
    texts = {name: (plan.run / name).read_text("utf-8") for name in RUN_FILES if (plan.run / name).exists()}
    return ExportIndex(
        step=plan.step,
        started=(item.origin or item.directory).stat().st_mtime,
        name=item.name,
        role=item.role,
        version=item.version,
        digest=item.digest,
        contract=_contract(item),
        content_digest=content_digest(item),
        tree=item.tree,
        leaves=tuple(held[leaf.path] for leaf in item.leaves),
        files=dict(written),
        run_files=texts,
    )


def _contract(item: StoredItem) -> dict[str, Any] | None:
    """The contract that an item was written under, None if it is none of this pdlib's."""
    try:
        spec = load_contract(item.name, item.version)
    except ContractError:
        return None
    return spec.as_dict() if spec.digest == item.digest else None
