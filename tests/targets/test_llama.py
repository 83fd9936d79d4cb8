"""The language models against a reading of their published forms in float64, and what loads them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pdlib.errors import CorruptItem, RunSpecError
from pdlib.targets import llama
from pdlib.targets.tokens import Tokens
from tests.targets.files import SMALL, checkpoint, published_names, write_checkpoint, write_tokens

SHAPES = {
    "simple": llama.Shape(**SMALL, base=1e4, stretched=False, epsilon=1e-6, simple=True),
    "llama": llama.Shape(**{**SMALL, "heads": 4, "groups": 2}, base=5e5, stretched=True, epsilon=1e-5, simple=False),
}
ORDER = [3, 2, 1, 6, 0, 7, 4, 5]
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def oracle(shape, weights, tokens):
    """Logits of one text, a loop over positions, heads and pairs, in float64."""
    w = {name.removeprefix("model."): np.asarray(x, np.float64) for name, x in weights.items()}
    head = shape.width // shape.heads
    embedding, blocks, attention, norms, last = (
        ("wte.weight", "h", "attn", ("rms_1", "rms_2"), "ln_f.weight")
        if shape.simple
        else (
            "embed_tokens.weight",
            "layers",
            "self_attn",
            ("input_layernorm", "post_attention_layernorm"),
            "norm.weight",
        )
    )

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.epsilon) * scale

    def turned(x, position):
        out = x.copy()
        for i in range(head // 2):
            frequency = shape.base ** (-2 * i / head)
            if shape.stretched:
                frequency = stretched(frequency)
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            a, b = x[i], x[i + head // 2]
            out[i], out[i + head // 2] = a * c - b * s, b * c + a * s
        return out

    x = w[embedding][tokens]
    for layer in range(shape.layers):
        own = f"{blocks}.{layer}"
        h = norm(x, w[f"{own}.{norms[0]}.weight"])
        q, k, v = (h @ w[f"{own}.{attention}.{part}_proj.weight"].T for part in "qkv")
        out = np.zeros_like(x)
        for one in range(shape.heads):
            mine = slice(one * head, (one + 1) * head)
            group = one // (shape.heads // shape.groups)
            theirs = slice(group * head, (group + 1) * head)
            for t in range(len(x)):
                now = turned(q[t, mine], t)
                scores = np.array([now @ turned(k[s, theirs], s) / math.sqrt(head) for s in range(t + 1)])
                p = np.exp(scores - scores.max())
                out[t, mine] = (p / p.sum()) @ v[: t + 1, theirs]
        x = x + out @ w[f"{own}.{attention}.o_proj.weight"].T
        h = norm(x, w[f"{own}.{norms[1]}.weight"])
        if shape.simple:
            a = h @ w[f"{own}.mlp.c_fc.weight"].T
            inner = 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
        else:
            gate = h @ w[f"{own}.mlp.gate_proj.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (h @ w[f"{own}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{own}.mlp.down_proj.weight"].T
    x = norm(x, w[last])
    return x @ w[embedding if shape.simple else "lm_head.weight"].T


def stretched(frequency):
    """The published rule, by wavelength: 8, 1, 4, 8192."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


@each_shape
def test_logits_are_those_of_the_published_forms(shape, tmp_path):
    weights = checkpoint(shape)
    write_checkpoint(tmp_path / "model.safetensors", weights)
    tokens = np.random.default_rng(1).integers(0, shape.vocabulary, (2, 7))
    params = llama.load(shape, tmp_path / "model.safetensors")
    found = jax.jit(llama.network(shape).apply)(params, jnp.asarray(tokens, jnp.int32))
    for row, logits in zip(tokens, found, strict=True):
        np.testing.assert_allclose(logits, oracle(shape, weights, row), rtol=2e-5, atol=2e-5)


def test_rotary_frequencies_of_the_8b_model_are_the_published_ones():
    shape = llama.Shape(128_256, 4_096, 32, 32, 8, 14_336, base=5e5, stretched=True, epsilon=1e-5, simple=False)
    wanted = [stretched(5e5 ** (-2 * i / 128)) for i in range(64)]
    np.testing.assert_allclose(llama.frequencies(shape), wanted, rtol=1e-6)
    assert len({f for f in wanted if f in (5e5 ** (-2 * i / 128) for i in range(64))}) < 64


def test_the_sizes_are_the_published_ones():
    small = llama.Shape(50_277, 768, 4, 6, 6, 3_072, base=1e4, stretched=False, epsilon=1e-6, simple=True)
    large = llama.Shape(128_256, 4_096, 32, 32, 8, 14_336, base=5e5, stretched=True, epsilon=1e-5, simple=False)
    sizes = [sum(x.size for x in jax.tree.leaves(llama.abstract(shape))) for shape in (small, large)]
    assert sizes[0] == pytest.approx(67e6, rel=0.005)
    assert sizes[1] == pytest.approx(8.03e9, rel=0.001)


@each_shape
def test_sites_are_named_and_ordered_as_in_the_checkpoint(shape, tmp_path):
    task = llama.task(shape, tmp_path, Tokens(tmp_path / "tokens.npy", 4, shape.vocabulary))
    names = [name.removeprefix("model.").removesuffix(".weight") for name in published_names(shape)]
    projections = [name for name in names if name.endswith(("_proj", "c_fc"))]
    assert list(task.sites) == projections


@each_shape
def test_shards_prefixes_and_dtypes_load_as_they_are(shape, tmp_path):
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in checkpoint(shape).items()}
    bare = {name.removeprefix("model."): x for name, x in weights.items()} | {"other.buffer": np.zeros(3, np.float32)}
    (tmp_path / "shards").mkdir()
    items = list(bare.items())
    write_checkpoint(tmp_path / "shards" / "a.safetensors", dict(items[::2]))
    write_checkpoint(tmp_path / "shards" / "b.safetensors", dict(items[1::2]))
    write_checkpoint(tmp_path / "one.safetensors", weights)
    one, shards = (llama.load(shape, tmp_path / name) for name in ("one.safetensors", "shards"))
    assert {x.dtype for x in jax.tree.leaves(one)} == {jnp.dtype("bfloat16")}
    jax.tree.map(np.testing.assert_array_equal, one, shards)


def test_a_checkpoint_of_another_model_is_refused_by_the_names_of_its_tensors(tmp_path):
    shape, path = SHAPES["simple"], tmp_path / "model.safetensors"
    weights = checkpoint(shape)
    del weights["h.1.mlp.c_fc.weight"]
    weights["wte.weight"] = weights["wte.weight"][:-1]
    write_checkpoint(path, weights)
    with pytest.raises(RunSpecError, match=r"wte.weight: \(12, 8\), want \(13, 8\)") as caught:
        llama.load(shape, path)
    assert "h.1.mlp.c_fc.weight: missing" in str(caught.value)
    with pytest.raises(RunSpecError, match=r"and \d+ more"):
        llama.load(SHAPES["llama"], path)
    with pytest.raises(RunSpecError, match="no safetensors file"):
        llama.load(shape, tmp_path / "nothing")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptItem, match="no whole safetensors"):
        llama.load(shape, path)


def test_an_epoch_has_every_row_once_and_the_next_another_order(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(40, dtype=np.uint16))
    tokens = Tokens(tmp_path / "tokens.npy", 4, 40)
    epochs = [np.concatenate([tokens.batch(3, 2 * e + i, 5) for i in range(2)])[:, 0] for e in range(2)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) != sorted(epochs[0])


def test_a_batch_is_a_function_of_seed_and_step(tmp_path):
    write_tokens(tmp_path / "tokens.npy", SHAPES["simple"])
    first, again = (Tokens(tmp_path / "tokens.npy", 4, 13) for _ in range(2))
    np.testing.assert_array_equal(first.batch(0, 500, 7), again.batch(0, 500, 7))
    assert (first.batch(0, 500, 7) != again.batch(1, 500, 7)).any()
    assert first.batch(0, 0, 7).dtype == first.abstract(7).dtype == np.int32
    assert first.batch(0, 0, 7).shape == first.abstract(7).shape


def test_the_order_is_the_one_it_always_was(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(8, dtype=np.int64)[:, None])
    assert Tokens(tmp_path / "tokens.npy", 1, 8).batch(0, 0, 8)[:, 0].tolist() == ORDER


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(3, np.int32), "less than one row"),
        (np.zeros((2, 3), np.int32), "less than one row"),
        (np.zeros(8, np.float32), "want integers"),
        (np.zeros((1, 2, 4), np.int32), "want integers"),
        (np.full(8, 13, np.int32), "the id 13, outside the vocabulary of 13"),
        (np.full(8, -1, np.int32), "the id -1, outside"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused(tmp_path, array, text):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(RunSpecError, match=text):
        Tokens(tmp_path / "tokens.npy", 4, 13).batch(0, 0, 2)


def test_a_file_that_is_not_there_or_no_array_is_named(tmp_path):
    with pytest.raises(RunSpecError, match=r"tokens.npy.*give a \.npy file"):
        Tokens(tmp_path / "tokens.npy", 4, 13).batch(0, 0, 2)
    (tmp_path / "tokens.npy").write_text("hello")
    with pytest.raises(RunSpecError, match=r"give a \.npy file"):
        Tokens(tmp_path / "tokens.npy", 4, 13).batch(0, 0, 2)
