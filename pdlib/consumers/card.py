"""Writes an export's model card: where it comes from, what is in it, how to read it; computes no figure of its own."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdlib.consumers.index import INDEX_FILE, ExportIndex

_READING = """Nothing but `safetensors` and NumPy is needed. `{index}` says of each leaf its path, shape, dtype, file
and tensor.

```python
import json
from pathlib import Path

import numpy as np
import safetensors


def read(home, *path):
    \"\"\"One leaf, e.g. read(".", "components", site, "V").\"\"\"
    leaves = json.loads((Path(home) / "{index}").read_text("utf-8"))["leaves"]
    (leaf,) = [leaf for leaf in leaves if leaf["path"] == list(path)]
    tensor = dict(safetensors.deserialize((Path(home) / leaf["file"]).read_bytes()))[leaf["tensor"]]
    if leaf["dtype"] == "bfloat16":  # the upper half of a float32, so this loses nothing
        bits = np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(leaf["shape"])
    try:
        dtype = np.dtype(leaf["dtype"])
    except TypeError:  # NumPy has no such dtype: the bits, to be viewed as one of the package ml_dtypes
        dtype = np.dtype(f"u{{max(1, len(tensor['data']) // max(1, int(np.prod(leaf['shape']))))}}")
    return np.frombuffer(tensor["data"], dtype).reshape(leaf["shape"])
```

Files whose dtypes NumPy knows are read by `safetensors.numpy.load_file` as well. A dtype that safetensors has no name
for (int4 and the like) is kept as uint8 with one axis more, for the bytes of an element.

`pdlib import` makes a run of this directory again, bit for bit."""


def model_card(run: Path, index: ExportIndex) -> str:
    """The card of an export, Markdown behind YAML.

    Args:
        run: the run directory, for its `results.json` and `metrics.jsonl`.
        index: the export's.
    """
    lineage = _object(index.run_files.get("lineage.json"))
    name = " ".join(str(_table(index.run_files.get("run.toml")).get("name", run.name)).split())
    facts = {"step": index.step, "content_digest": index.content_digest, "target": lineage.get("target")}
    others = {key: value for key, value in lineage.items() if key != "target"}
    lines = [
        "---", "library_name: pdlib", "tags: [parameter-decomposition, interpretability]",
        f"pdlib: {json.dumps(facts)}", "---", "",
        f"# {name}, step {index.step}", "",
        "A parameter decomposition: each weight matrix W of the target is a sum of rank-one components, `W ≈ V U`.", "",
        f"* content digest: `{index.content_digest}`",
        f"* target fingerprint: {_code(lineage.get('target') or 'not recorded')}",
        f"* lineage: {_code(json.dumps(others))}",
        f"* contract: {index.name} v{index.version}, `{index.digest}`", "",
        "| site | d_in | d_out | C | dtype | file |", "|---|---|---|---|---|---|", *_sites(index), "",
        "## Error figures", "", *_figures(run, index.step), "",
        "## Reading it", "", _READING.format(index=INDEX_FILE), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _sites(index: ExportIndex) -> Iterator[str]:
    shapes = {entry.leaf.path[1:]: entry for entry in index.leaves if entry.leaf.path[0] == "components"}
    for site in sorted({path[0] for path in shapes}):
        V, U = shapes[site, "V"], shapes[site, "U"]
        (d_in, C), d_out = V.leaf.shape, U.leaf.shape[1]
        yield f"| {_code(site)} | {d_in} | {d_out} | {C} | {V.leaf.dtype} | `{V.file}` |"


def _figures(run: Path, step: int) -> Iterator[str]:
    """What the run has recorded: its results, and the newest measurements that are not after the step."""
    found = False
    for key, value in _object(_text(run / "results.json")).items():
        if not found:
            yield "As the run recorded them at its end (`results.json`):\n"
        found = True
        yield f"* {key}: {value if isinstance(value, (int, float, str)) else json.dumps(value)}"
    rows = [row for line in (_text(run / "metrics.jsonl") or "").splitlines() if (row := _object(line))]
    rows = [row for row in rows if type(row.get("step")) is int and row["step"] <= step]
    if rows:
        row = max(reversed(rows), key=lambda row: row["step"])  # of two rows for one step the later holds
        yield f"\nAs measured in training at step {row['step']} (`metrics.jsonl`):\n"
        yield from (f"* {key}: {value}" for key, value in row.items() if key != "step")
    if not found and not rows:
        yield "The run has recorded none."


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def _object(text: str | None) -> Mapping[str, Any]:
    """A JSON object; nothing where there is none: a card is no place to fail."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _table(text: str | None) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text or "")
    except tomllib.TOMLDecodeError:
        return {}


def _code(text: object) -> str:
    """Text as Markdown code that fits a table cell, whatever characters it has."""
    plain = re.sub(r"[\x00-\x1f\x7f]", "�", str(text)).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"{fence}{plain}{fence}" if len(fence) == 1 else f"{fence} {plain} {fence}"
