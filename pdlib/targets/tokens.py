"""Token sequences on disk as batches: memory-mapped, shuffled anew each epoch, a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Integer

from pdlib.errors import RunSpecError


@dataclass(frozen=True)
class Tokens:
    """A `.npy` file of token ids: one long text `[tokens]`, cut into rows, or rows `[rows, ≥ length]`.

    Attributes:
        path: of the file; opened when the first batch is asked for, and never read as a whole.
        length: tokens in a row.
        vocabulary: ids are below it.
    """

    path: Path
    length: int
    vocabulary: int

    def abstract(self, size: int) -> jax.ShapeDtypeStruct:
        """A batch by shape and dtype; opens nothing."""
        return jax.ShapeDtypeStruct((size, self.length), np.int32)

    def batch(self, seed: int, step: int, size: int) -> Integer[np.ndarray, "size length"]:
        """The batch of a step. Each epoch goes through all rows once, in an order of its own.

        Raises:
            RunSpecError: the file is not there or no array of ids, is shorter than a row, or has an id outside the
                vocabulary.
        """
        places = step * size + np.arange(size)
        epochs, within = np.divmod(places, len(self.rows))
        order = [_order(seed, int(epoch), len(self.rows))[at] for epoch, at in zip(epochs, within, strict=True)]
        found = self.rows[order].astype(np.int32)
        if found.min() < 0 or found.max() >= self.vocabulary:
            bad = int(found.max() if found.max() >= self.vocabulary else found.min())
            raise RunSpecError(
                f"target.tokens: {self.path} has the id {bad}, outside the vocabulary of {self.vocabulary}; these are "
                "the tokens of another tokenizer"
            )
        return found

    @cached_property
    def rows(self) -> Integer[np.ndarray, "rows length"]:
        """All rows, mapped."""
        try:
            array = np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise RunSpecError(f"target.tokens: {self.path}: {error}; give a .npy file of token ids") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise RunSpecError(
                f"target.tokens: {self.path} is {array.dtype} of shape {array.shape}; want integers, [tokens] or "
                "[rows, length]"
            )
        if array.shape[-1] < self.length or not array.size:
            raise RunSpecError(
                f"target.tokens: {self.path} has the shape {array.shape}, less than one row of {self.length} tokens; "
                "lower target.length"
            )
        if array.ndim == 1:
            array = array[: len(array) // self.length * self.length].reshape(-1, self.length)
        return array[:, : self.length]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """A permutation by ranks of raw 64-bit draws, whose stream numpy keeps for ever, unlike that of `shuffle`."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return np.argsort(bits, kind="stable")
