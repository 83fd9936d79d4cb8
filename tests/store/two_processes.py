"""The state that two processes save and restore, as one host sees it."""

from __future__ import annotations

from typing import Any

import numpy as np

import pdlib

ANY = pdlib.Registry((pdlib.ItemSpec(name="anything", leaves=[pdlib.LeafSpec(path="**")]),))


def host_state() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def bits(*shape: int) -> np.ndarray:
        return random.integers(0, 2**32, shape, np.uint32).view(np.float32)

    return {"split": bits(8, 6), "second": bits(3, 8), "whole": bits(5), "numpy": bits(4, 4), "step": np.int32(7)}
