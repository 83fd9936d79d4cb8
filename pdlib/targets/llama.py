"""Llamas: rotary attention with grouped queries and RMS norms, with gated or simple feed-forwards; plain Haiku.

Names and shapes are those of the published checkpoints, so that their safetensors files load as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import Array, Float, Int

from pdlib.errors import CorruptItem, RunSpecError
from pdlib.method.losses import kl_divergence
from pdlib.targets.task import Task
from pdlib.targets.tokens import Tokens


class Shape(NamedTuple):
    """The sizes.

    Attributes:
        vocabulary: ids of tokens.
        width: of the stream.
        layers: blocks, each an attention and a feed-forward.
        heads: of queries.
        groups: heads of keys and values; divides `heads`.
        inner: width of a feed-forward.
        base: of the rotary frequencies.
        stretched: rotary frequencies are those of Llama 3.1, made for longer contexts; see `frequencies`.
        epsilon: of the RMS norms.
        simple: the feed-forward is `GELU(x c_fc) down`, and the embedding is the head too (LlamaSimpleMLP); else
            `(SiLU(x gate) · x up) down`, with a head of its own (Llama).
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    base: float
    stretched: bool
    epsilon: float
    simple: bool


class _Names(NamedTuple):
    """What the parts are called: in Haiku with a `/` for each dot, and `layers_0` for `layers.0`."""

    embedding: str
    blocks: str
    norms: tuple[str, str]
    attention: str
    final: str


_SIMPLE = _Names("wte", "h", ("rms_1", "rms_2"), "attn", "ln_f")
_LLAMA = _Names("embed_tokens", "layers", ("input_layernorm", "post_attention_layernorm"), "self_attn", "norm")


def network(shape: Shape) -> hk.Transformed:
    """The model as plain Haiku: `tokens [batch, length] → logits [batch, length, vocabulary]`, causal.

    Weights are `[out, in]`, as the checkpoints keep them.
    """
    names = _SIMPLE if shape.simple else _LLAMA

    def net(tokens: Int[Array, "batch length"]) -> Float[Array, "batch length vocabulary"]:
        embedding = _weight(names.embedding, (shape.vocabulary, shape.width))
        x = embedding[tokens]
        for layer in range(shape.layers):
            with hk.name_scope(f"{names.blocks}_{layer}"):
                h = _rms_norm(x, names.norms[0], shape.epsilon)
                with hk.name_scope(names.attention):
                    x += _attention(h, shape)
                h = _rms_norm(x, names.norms[1], shape.epsilon)
                with hk.name_scope("mlp"):
                    x += _feed_forward(h, shape)
        x = _rms_norm(x, names.final, shape.epsilon)
        return x @ embedding.T if shape.simple else _linear(x, shape.vocabulary, "lm_head")

    return hk.without_apply_rng(hk.transform(net))


def task(shape: Shape, weights: Path, tokens: Tokens) -> Task:
    """The model with all its projections as sites, layer by layer, under the names that its checkpoint has for them."""
    names = _SIMPLE if shape.simple else _LLAMA
    inner = ("c_fc", "down_proj") if shape.simple else ("gate_proj", "up_proj", "down_proj")
    parts = [f"{names.attention}.{part}_proj" for part in "qkvo"] + [f"mlp.{part}" for part in inner]
    sites = [f"{names.blocks}.{layer}.{part}" for layer in range(shape.layers) for part in parts]
    return Task(
        apply=network(shape).apply,
        sites={site: f"{_module(site)}/weight" for site in sites},
        pretrain=lambda _: load(shape, weights),
        loss=kl_divergence,
        corpus=tokens,
        shapes=abstract(shape),
    )


def frequencies(shape: Shape) -> np.ndarray:
    """Rotary frequencies in radians a position: `base^(−i / half)` for i below `half`, half the width of a head.

    Stretched as in Llama 3.1: those of a wavelength over 8,192 are divided by 8, those under 8,192 / 4 stay, and
    between the two the one passes linearly into the other, in 8,192 / wavelength.
    """
    half = shape.width // shape.heads // 2
    plain = shape.base ** (-np.arange(half) / half)
    if not shape.stretched:
        return plain.astype(np.float32)
    turns = 8_192 * plain / (2 * np.pi)
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (plain * (kept + (1 - kept) / 8)).astype(np.float32)


def abstract(shape: Shape, dtype: Any = jnp.float32) -> Any:
    """The parameters by shape; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(network(shape).init, jax.random.key(0), tokens)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)


def load(shape: Shape, weights: Path) -> Any:
    """The parameters from a safetensors file, or from the shards in a folder, in the dtype that they have there.

    Tensors are called as in the checkpoint, with or without `model.` in front; others are left alone.

    Raises:
        RunSpecError: no such file, or tensors are missing or have other shapes; lists each.
        CorruptItem: a file is no whole safetensors file.
    """
    found = dict(_tensors(weights))
    problems: list[str] = []
    params: dict[str, dict[str, Any]] = {}
    for module, parameters in abstract(shape).items():
        name, (wanted,) = _tensor(module), parameters.values()
        tensor = found.get(name, found.get(f"model.{name}"))
        if tensor is None:
            problems.append(f"  {name}: missing")
        elif tuple(tensor.get_shape()) != wanted.shape:
            problems.append(f"  {name}: {tuple(tensor.get_shape())}, want {wanted.shape}")
        else:
            params[module] = {"weight": jnp.asarray(tensor[:])}
    if problems:
        lines = "\n".join(problems[:12] + [f"  and {len(problems) - 12} more"] * (len(problems) > 12))
        raise RunSpecError(f"target.weights: {weights} does not hold this model\n{lines}\nSet the sizes of [target].")
    return params


def _tensors(weights: Path) -> Iterator[tuple[str, Any]]:
    paths = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    if not paths or not paths[0].is_file():
        raise RunSpecError(f"target.weights: {weights} is no safetensors file, nor a folder of them; give one")
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="np")
            names: list[str] = file.keys()
            yield from ((name, file.get_slice(name)) for name in names)
        except safetensors.SafetensorError as error:
            raise CorruptItem(f"{path} is no whole safetensors file ({error}); get it anew") from error


def _module(name: str) -> str:
    """`h.0.attn.q_proj` → `h_0/attn/q_proj`."""
    first, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    return f"{first}_{number}/{part.replace('.', '/')}" if number.isdigit() else name.replace(".", "/")


def _tensor(module: str) -> str:
    first, *rest = module.split("/")
    stem, _, number = first.rpartition("_")
    return ".".join([*([stem, number] if number.isdigit() and rest else [first]), *rest, "weight"])


def _weight(name: str, shape: tuple[int, ...]) -> Array:
    with hk.name_scope(name):
        return hk.get_parameter("weight", shape, init=hk.initializers.RandomNormal(shape[-1] ** -0.5))


def _linear(x: Array, width: int, name: str) -> Array:
    return x @ _weight(name, (width, x.shape[-1])).T


def _rms_norm(x: Float[Array, "batch length width"], name: str, epsilon: float) -> Float[Array, "batch length width"]:
    with hk.name_scope(name):
        scale = hk.get_parameter("weight", x.shape[-1:], init=jnp.ones)
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * scale[None, None]


def _attention(x: Float[Array, "batch length width"], shape: Shape) -> Float[Array, "batch length width"]:
    batch, length, width = x.shape
    per_head = width // shape.heads

    def heads(name: str, count: int) -> Array:
        return _linear(x, count * per_head, name).reshape(batch, length, count, per_head)

    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * jnp.asarray(frequencies(shape))[None]
    q = _rotate(heads("q_proj", shape.heads), angle).reshape(batch, length, shape.groups, -1, per_head)
    k, v = _rotate(heads("k_proj", shape.groups), angle), heads("v_proj", shape.groups)
    scores = jnp.einsum("btgnh,bsgh->bgnts", q, k).astype(jnp.float32) * per_head**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    probability = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(x.dtype)
    return _linear(jnp.einsum("bgnts,bsgh->btgnh", probability, v).reshape(x.shape), width, "o_proj")


def _rotate(x: Float[Array, "batch length heads width"], angle: Float[Array, "length half"]) -> Array:
    """Each pair (i, i + half) of a head turned by its angle."""
    cos, sin = (turn(angle)[None, :, None].astype(x.dtype) for turn in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _feed_forward(x: Float[Array, "batch length width"], shape: Shape) -> Float[Array, "batch length width"]:
    if shape.simple:
        inner = jax.nn.gelu(_linear(x, shape.inner, "c_fc"), approximate=True)
    else:
        inner = jax.nn.silu(_linear(x, shape.inner, "gate_proj")) * _linear(x, shape.inner, "up_proj")
    return _linear(inner, shape.width, "down_proj")
