"""The examples run as they stand, with warnings as errors, and reach what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_plain_haiku_classifier_is_decomposed_through_the_public_functions():
    done = subprocess.run(
        [sys.executable, "-W", "error", "examples/decompose_haiku.py"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sites = re.findall(r"^(\S+) +(conv|dot) ", done.stdout, re.MULTILINE)
    assert sites == [("conv2_d/w", "conv"), ("mlp/~/linear_0/w", "dot"), ("mlp/~/linear_1/w", "dot")]
    (missing,) = re.findall(r"before, ([\d.]+) after", done.stdout)
    assert float(missing) < 0.1
    model, *with_components = map(float, re.findall(r": ([\d.]+)$", done.stdout, re.MULTILINE))
    assert model > 0.9
    assert with_components[-1] > 0.9
    assert with_components[0] < 0.5
    source = (ROOT / "examples" / "decompose_haiku.py").read_text("utf-8")
    assert set(re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)) == {
        "__future__",
        "haiku",
        "jax",
        "jax.numpy",
        "optax",
        "pdlib",
    }
