"""A run's measurements on disk: one JSON object a line, keyed by step; of two rows for one step the later holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


def append_row(path: Path, step: int, values: Mapping[str, float]) -> None:
    """Append one row, in one write, so that a reader never sees half of it."""
    row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> dict[int, dict[str, float]]:
    """The rows by step, ascending; a last line cut short by a kill is passed over."""
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row.pop("step")] = row
    return dict(sorted(rows.items()))
