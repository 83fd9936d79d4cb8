"""Writes what a language-model run reads: a checkpoint as it is published, and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from pdlib.targets.llama import Shape

SMALL = {"vocabulary": 13, "width": 8, "layers": 2, "heads": 2, "groups": 2, "inner": 12}


def published_names(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, written out once more by hand, in the order of the model."""
    width, inner = shape.width, shape.inner
    kv = shape.groups * (width // shape.heads)
    projections = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width)}
    found: dict[str, tuple[int, ...]] = {}
    if shape.simple:
        found["wte.weight"] = (shape.vocabulary, width)
        for i in range(shape.layers):
            found |= {f"h.{i}.rms_1.weight": (width,), f"h.{i}.rms_2.weight": (width,)}
            found |= {f"h.{i}.attn.{part}_proj.weight": size for part, size in projections.items()}
            found |= {f"h.{i}.mlp.c_fc.weight": (inner, width), f"h.{i}.mlp.down_proj.weight": (width, inner)}
        return found | {"ln_f.weight": (width,)}
    found["model.embed_tokens.weight"] = (shape.vocabulary, width)
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.input_layernorm.weight": (width,), f"{layer}.post_attention_layernorm.weight": (width,)}
        found |= {f"{layer}.self_attn.{part}_proj.weight": size for part, size in projections.items()}
        found |= {f"{layer}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
    return found | {"model.norm.weight": (width,), "lm_head.weight": (shape.vocabulary, width)}


def checkpoint(shape: Shape, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the published names."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(size) * size[-1] ** -0.5 + (len(size) == 1)).astype(np.float32)
        for name, size in published_names(shape).items()
    }


def write_checkpoint(path: Path, tensors: Mapping[str, Any]) -> None:
    """One safetensors file."""
    safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path)


def write_tokens(path: Path, shape: Shape, *, seed: int = 0, count: int = 640) -> None:
    """One long text of random ids."""
    np.save(path, np.random.default_rng(seed).integers(0, shape.vocabulary, count, np.uint16))
