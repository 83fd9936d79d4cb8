"""A run's directory: pinned specification, lock, target; one trainer at a time, one specification for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdlib.errors import RunConflict
from pdlib.items.registry import Registry
from pdlib.items.specs import ItemSpec, LeafSpec
from pdlib.run.spec import RunSpec, flat, load_run_spec, to_toml
from pdlib.store.checkpoint import Manager

SPEC_FILE = "run.toml"
LINEAGE_FILE = "lineage.json"
TARGET = ItemSpec(name="target", version=1, role="product", leaves=(LeafSpec(path="**"),))


def pin_spec(run: Path, spec: RunSpec) -> None:
    """Write the specification into a new run, or hold it to the one that is there.

    Raises:
        RunConflict: the run was started with other values; names each key.
    """
    path = run / SPEC_FILE
    if not path.exists():
        partial = path.with_suffix(".toml.partial")
        partial.write_text(to_toml(spec), "utf-8")
        partial.replace(path)
        return
    pinned, given = flat(load_run_spec(path)), flat(spec)
    differing = [
        f"  {key}: {pinned.get(key)!r} in the run, {given.get(key)!r} now"
        for key in dict.fromkeys([*given, *pinned])
        if pinned.get(key) != given.get(key)
    ]
    if differing:
        lines = "\n".join(differing)
        raise RunConflict(f"{run} was started with other values\n{lines}\nPass another --out, or the values of {path}.")


def load_target(run: Path) -> tuple[Any, str] | None:
    """The parameters of the run's target and their digest, or None in a new run.

    Raises:
        RunConflict: the target is not the one that the run was started with.
    """
    if not (run / LINEAGE_FILE).exists():
        return None
    with _targets(run, read_only=True) as manager:
        digest = manager.content_digest(0, "target")
        wanted = json.loads((run / LINEAGE_FILE).read_text("utf-8"))["target"]
        if digest != wanted:
            raise RunConflict(
                f"the target in {run} has digest {digest}, the run was started on {wanted}\n"
                f"Restore {run / 'target'} from a copy, or start a new run."
            )
        return manager.restore_to_host(0, "target"), digest


def save_target(run: Path, params: Any) -> None:
    """Keep the target's parameters with the run, and record their digest as its lineage."""
    with _targets(run, read_only=False) as manager:
        if 0 not in manager.steps():
            manager.save(0, {"target": params})
        digest = manager.content_digest(0, "target")
    partial = run / f"{LINEAGE_FILE}.partial"
    partial.write_text(json.dumps({"target": digest, "parent": None}, indent=2) + "\n", "utf-8")
    partial.replace(run / LINEAGE_FILE)


def _targets(run: Path, *, read_only: bool) -> Manager:
    return Manager(run / "target", registry=Registry((TARGET,)), read_only=read_only)
