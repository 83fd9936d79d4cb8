"""The notes that a step carries of what was done to it: stripped of its process, or converted from an older layout."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlib.errors import PdlibError
from pdlib.store import files
from pdlib.store.stored import item_names, read_item

STRIPPED_FILE = "stripped.json"
CONVERTED_FILE = "converted.json"


def note_stripped(step: Path, freed: Mapping[str, int]) -> None:
    """Leave word of why a step cannot resume: item → bytes; before the fact, as it says nothing while all is there."""
    record = {"items": dict(freed), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    files.replace_file(step / STRIPPED_FILE, (json.dumps(record) + "\n").encode())


def stripped(step: Path) -> dict[str, Any] | None:
    """What was stripped of a step, `items` by bytes, and `at` which time; None if nothing was."""
    return _note(step / STRIPPED_FILE)


def note_converted(step: Path, layout: str, older: Sequence[str]) -> None:
    """Leave word of which older items today's take the place of; before they do."""
    record = {"layout": layout, "items": list(older)}
    files.replace_file(step / CONVERTED_FILE, (json.dumps(record) + "\n").encode())


def half_converted(step: Path) -> list[str]:
    """The older items of a step whose conversion was interrupted after what takes their place was there, whole."""
    note = _note(step / CONVERTED_FILE)
    older = [name for name in (note or {}).get("items", ()) if (step / name).is_dir()]
    made = [name for name in item_names(step) if name not in older]
    try:
        for name in made:
            read_item(step / name).check_whole()
    except PdlibError:
        return []
    return older if made else []


def _note(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) and "items" in record else None
