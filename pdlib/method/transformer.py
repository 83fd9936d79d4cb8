"""The chunkwise transformer, the causal-importance function of language models; knows no loss and no target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pdlib.errors import ContractError
from pdlib.items.state import Factors, Site
from pdlib.method.importance import ImportanceFn

MODULE = "chunkwise_transformer"
_BASE = 10_000.0
_EPSILON = float(np.finfo(np.float32).eps)


class Chunk(NamedTuple):
    """Sites that are predicted together.

    Attributes:
        taps: the activations they are predicted from: names of sites, for their inputs, or of other activations.
        sites: the sites.
    """

    taps: tuple[str, ...]
    sites: tuple[str, ...]


class Sizes(NamedTuple):
    """The sizes of a chunkwise transformer: model width, blocks, heads, and hidden units of each block's MLP."""

    width: int
    blocks: int
    heads: int
    hidden: int


def chunkwise_transformer(
    chunks: Sequence[Chunk], sizes: Sizes, *, tap_widths: Mapping[str, int] | None = None
) -> ImportanceFn:
    """One bidirectional transformer a chunk of sites, all of the same sizes, run as one (VPD).

    A chunk's taps `[..., T, d]` are RMS-normalised without weight, joined, and projected to the width; then pre-norm
    blocks (attention over T with rotary positions, no biases; an MLP with biases and erf-GELU), an affine head a site.

    Parameters, in one Haiku module `chunkwise_transformer`, for K chunks, B blocks, width m, hidden h, D joined taps:
    `input_w [K, D, m]`, `input_b [K, m]`; `query`, `key`, `value`, `output [B, K, m, m]` with the output axis first, as
    older checkpoints hold them; `hidden_w [B, K, m, h]`, `hidden_b [B, K, h]`, `out_w [B, K, h, m]`, `out_b [B, K, m]`;
    `head_w.SITE [m, C]`, `head_b.SITE [C]`; and `frequencies [m / heads / 2]` of the rotary positions, a buffer that no
    gradient reaches.

    Args:
        chunks: they partition the sites, and their taps have one joined width.
        sizes: see `Sizes`.
        tap_widths: width of each tap that is no site.

    Raises:
        ContractError: chunks share a site, or heads do not divide the width into even parts.
    """
    sites = [site for chunk in chunks for site in chunk.sites]
    if len(set(sites)) < len(sites) or not sites:
        raise ContractError(f"chunks {[*map(tuple, chunks)]} do not partition the sites; name each site in one chunk")
    if sizes.width % (2 * sizes.heads):
        raise ContractError(
            f"{sizes.heads} heads do not divide width {sizes.width} into even parts; change one of them"
        )

    def forward(taps: Mapping[str, Array], components: Mapping[str, int]) -> dict[str, Array]:
        return _Chunkwise(chunks, sizes, components)(taps)

    network = hk.without_apply_rng(hk.transform(forward))

    def init(key: Any, sites: Mapping[str, Site]) -> Any:
        _check_chunks(chunks, sites)
        widths = {name: site.d_in for name, site in sites.items()} | dict(tap_widths or {})
        lost = sorted({tap for chunk in chunks for tap in chunk.taps} - widths.keys())
        if lost:
            raise ContractError(f"taps {', '.join(lost)} are no sites, and tap_widths does not say how wide they are")
        taps = {tap: jnp.zeros((1, 1, widths[tap])) for chunk in chunks for tap in chunk.taps}
        return network.init(key, taps, {name: site.C for name, site in sites.items()})

    def apply(params: Any, components: Mapping[str, Factors], inputs: Mapping[str, Array]) -> dict[str, Array]:
        del components
        heads = {site: params[MODULE][f"head_b.{site}"].shape[-1] for site in sites}
        return network.apply(params, {tap: inputs[tap] for chunk in chunks for tap in chunk.taps}, heads)

    return ImportanceFn(init, apply)


def sizes_of(params: Any) -> Sizes:
    """The sizes of a chunkwise transformer, from the shapes of its parameters alone."""
    module = params[MODULE]
    blocks, _, width, hidden = module["hidden_w"].shape
    return Sizes(width, blocks, width // (2 * module["frequencies"].shape[0]), hidden)


def rotary_frequencies(head: int) -> np.ndarray:
    """`10⁴^(−2i / head)` for the i-th pair of a head's channels (RoFormer, arXiv 2104.09864)."""
    return (_BASE ** (-np.arange(0, head, 2) / head)).astype(np.float32)


class _Chunkwise(hk.Module):
    def __init__(self, chunks: Sequence[Chunk], sizes: Sizes, components: Mapping[str, int]) -> None:
        super().__init__(name=MODULE)
        self.chunks, self.sizes, self.components = chunks, sizes, components

    def __call__(self, taps: Mapping[str, Array]) -> dict[str, Array]:
        joined = [jnp.concatenate([_rms(taps[tap]) for tap in chunk.taps], axis=-1) for chunk in self.chunks]
        if len({x.shape for x in joined}) > 1:
            shapes = ", ".join(f"{chunk.taps}: {x.shape}" for chunk, x in zip(self.chunks, joined, strict=True))
            raise ContractError(f"chunks are run as one and need taps of one joined width, these differ: {shapes}")
        count, (m, blocks, heads, h) = len(joined), self.sizes
        x = jnp.stack(joined).reshape(count, -1, *joined[0].shape[-2:])  # [K, batch, T, D]
        w, b = _affine("input", (count, x.shape[-1], m), (count, m))
        stacked = {name: _matrix(name, (blocks, count, m, m)) for name in ("query", "key", "value", "output")}
        stacked["hidden_w"], stacked["hidden_b"] = _affine(
            "hidden", (blocks, count, m, h), (blocks, count, h), gain=2.0
        )
        stacked["out_w"], stacked["out_b"] = _affine("out", (blocks, count, h, m), (blocks, count, m))
        head = m // heads
        buffer = hk.get_parameter("frequencies", (head // 2,), init=lambda *_: jnp.asarray(rotary_frequencies(head)))
        rotation = _rotation(jax.lax.stop_gradient(buffer), x.shape[-2])
        x = jnp.einsum("kbtd,kdm->kbtm", x, w) + b[:, None, None]
        block = jax.checkpoint(lambda x, p: (_block(x, p, rotation, heads), None))
        x, _ = jax.lax.scan(block, x, stacked)
        return self._heads(x, joined[0].shape[:-1])

    def _heads(self, x: Float[Array, "K batch T m"], lead: tuple[int, ...]) -> dict[str, Array]:
        logits: dict[str, Array] = {}
        for place, chunk in enumerate(self.chunks):
            for site in chunk.sites:
                C = self.components[site]
                w = _matrix(f"head_w.{site}", (x.shape[-1], C))
                b = hk.get_parameter(f"head_b.{site}", (C,), init=jnp.zeros)
                logits[site] = (x[place] @ w + b[None, None]).reshape(*lead, C)
        return logits


def _block(
    x: Float[Array, "K batch T m"], p: Mapping[str, Array], rotation: tuple[Array, Array], heads: int
) -> Float[Array, "K batch T m"]:
    normed = _rms(x)
    q, k, v = (_split(jnp.einsum("kbtm,knm->kbtn", normed, p[name]), heads) for name in ("query", "key", "value"))
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    weights = jax.nn.softmax(jnp.einsum("kbthc,kbshc->kbhts", q, k) * q.shape[-1] ** -0.5, axis=-1)
    mixed = jnp.einsum("kbhts,kbshc->kbthc", weights, v).reshape(x.shape)
    x = x + jnp.einsum("kbtm,knm->kbtn", mixed, p["output"])
    wide = jnp.einsum("kbtm,kmh->kbth", _rms(x), p["hidden_w"]) + p["hidden_b"][:, None, None]
    wide = jax.nn.gelu(wide, approximate=False)
    return x + jnp.einsum("kbth,khm->kbtm", wide, p["out_w"]) + p["out_b"][:, None, None]


def _rms(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + _EPSILON)


def _split(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _rotation(frequencies: Float[Array, " half"], positions: int) -> tuple[Array, Array]:
    angles = jnp.arange(positions, dtype=jnp.float32)[:, None, None] * frequencies[None, None]
    return jnp.cos(angles)[None, None], jnp.sin(angles)[None, None]  # [1, 1, T, 1, half]


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = rotation
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)  # angles are float32 whatever forwards run in


def _matrix(name: str, shape: tuple[int, ...], *, gain: float = 1.0) -> Array:
    """Kaiming normal over the second-last axis: variance gain / fan-in."""
    return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal((gain / shape[-2]) ** 0.5))


def _affine(name: str, matrix: tuple[int, ...], bias: tuple[int, ...], *, gain: float = 1.0) -> tuple[Array, Array]:
    return _matrix(f"{name}_w", matrix, gain=gain), hk.get_parameter(f"{name}_b", bias, init=jnp.zeros)


def _check_chunks(chunks: Sequence[Chunk], sites: Mapping[str, Site]) -> None:
    named = {site for chunk in chunks for site in chunk.sites}
    if named != set(sites):
        raise ContractError(
            f"chunks name {', '.join(sorted(named - set(sites))) or 'nothing'} that is not decomposed, and lack "
            f"{', '.join(sorted(set(sites) - named)) or 'nothing'}; the chunks partition the decomposed sites"
        )
