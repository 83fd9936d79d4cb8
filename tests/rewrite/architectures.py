"""Published architectures as people write them in Haiku, small enough to run; only Llama-3.1-8B is of full size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

B, T, D, VOCABULARY = 2, 6, 16, 13


class Architecture(NamedTuple):
    """A network and what it takes.

    Attributes:
        title: for people.
        net: a Haiku function.
        inputs: its arguments.
        runs: whether it is small enough to be run in a test; larger ones are only planned.
    """

    title: str
    net: Callable[..., Any]
    inputs: tuple[Any, ...]
    runs: bool


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(title: str, *inputs: Any, runs: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(net: Callable[..., Any]) -> Callable[..., Any]:
        ARCHITECTURES[net.__name__] = Architecture(title, net, inputs, runs)
        return net

    return register


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def ids(*shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(2), shape, 0, VOCABULARY)


IMAGE = (B, 8, 8, 3)
WEIGHTS = hk.initializers.VarianceScaling(1.0)


# hk.nets


@architecture("MLP (`hk.nets.MLP`)", normal(B, D))
def mlp(x):
    return hk.nets.MLP([32, 32, 4])(x)


@architecture("ResNet, basic blocks (`hk.nets.ResNet`, v1)", normal(*IMAGE))
def resnet(x):
    net = hk.nets.ResNet((1, 2, 1, 1), 5, bottleneck=False, channels_per_group=(4, 4, 8, 8))
    return net(x, is_training=True)


@architecture("ResNet, bottlenecks (`hk.nets.ResNet`, v2)", normal(*IMAGE))
def resnet_v2(x):
    net = hk.nets.ResNet((1, 1, 1, 1), 5, resnet_v2=True, channels_per_group=(8, 8, 16, 16))
    return net(x, is_training=False, test_local_stats=True)


def _full_size_resnet(depth: int) -> None:
    def net(x):
        return getattr(hk.nets, f"ResNet{depth}")(1000)(x, is_training=False, test_local_stats=True)

    ARCHITECTURES[f"resnet_{depth}"] = Architecture(
        f"ResNet-{depth}, full size (`hk.nets.ResNet{depth}`)", net, (normal(1, 32, 32, 3),), runs=False
    )


for _depth in (18, 34, 50, 101, 152, 200):
    _full_size_resnet(_depth)


@architecture("MobileNet v1 (`hk.nets.MobileNetV1`)", normal(1, 32, 32, 3))
def mobilenet(x):
    net = hk.nets.MobileNetV1(strides=(1, 2, 2), channels=(4, 8, 8), num_classes=5)
    return net(x, is_training=True)


@architecture("VQ-VAE (`hk.nets.VectorQuantizer`)", normal(*IMAGE))
def vq_vae(x):
    z = hk.Conv2D(8, 4, stride=2, name="encode")(x)
    z = hk.Conv2D(4, 1, name="to_codes")(jax.nn.relu(z))
    found = hk.nets.VectorQuantizer(4, 7, 0.25)(z, is_training=True)
    h = hk.Conv2DTranspose(8, 4, stride=2, name="decode")(found["quantize"])
    return hk.Conv2D(3, 3, name="to_pixels")(jax.nn.relu(h)), found["loss"]


@architecture("VQ-VAE with moving averages (`hk.nets.VectorQuantizerEMA`)", normal(*IMAGE))
def vq_vae_ema(x):
    z = hk.Conv2D(4, 4, stride=2, name="encode")(x)
    found = hk.nets.VectorQuantizerEMA(4, 7, 0.25, 0.99)(z, is_training=True)
    return hk.Conv2DTranspose(3, 4, stride=2, name="decode")(found["quantize"]), found["loss"]


# language


def feed_forward(x, widen: int = 4):
    return hk.Linear(x.shape[-1], name="down")(jax.nn.gelu(hk.Linear(widen * x.shape[-1], name="up")(x)))


def norm(x, name=None):
    return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)


def attend(q, kv, mask=None, name="attention"):
    return hk.MultiHeadAttention(2, q.shape[-1] // 2, w_init=WEIGHTS, name=name)(q, kv, kv, mask)


@architecture("GPT-2", ids(B, T))
def gpt(tokens):
    embed = hk.Embed(VOCABULARY, D, name="tokens")
    x = embed(tokens) + hk.get_parameter("positions", [T, D], init=hk.initializers.TruncatedNormal(0.02))[None]
    causal = jnp.tril(jnp.ones((1, 1, T, T), bool))
    for layer in range(2):
        with hk.name_scope(f"block_{layer}"):
            h = norm(x)
            x = x + attend(h, h, causal)
            x = x + feed_forward(norm(x))
    return norm(x) @ embed.embeddings.T


class LlamaConfig(NamedTuple):
    """The sizes of a Llama."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    dtype: Any


LLAMA_8B = LlamaConfig(128256, 4096, 32, 32, 8, 14336, jnp.bfloat16)


def transposed_linear(x, width: int, name: str):
    """Weights `[out, in]`, as Hugging Face keeps them."""
    with hk.name_scope(name):
        return x @ hk.get_parameter("weight", [width, x.shape[-1]], x.dtype, init=WEIGHTS).T


def rms_norm(x, name: str):
    with hk.name_scope(name):
        scale = hk.get_parameter("weight", [x.shape[-1]], x.dtype, init=jnp.ones)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return scale[None, None] * wide.astype(x.dtype)


def rotate(x, base: float = 500_000.0):
    """Rotary positions, the two halves of a head rotated against each other."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama_net(config: LlamaConfig) -> Callable[[Any], Any]:
    """Llama-3.1 with grouped queries, RMS norms and gated feed-forwards."""
    per_head = config.width // config.heads

    def attention(x):
        batch, length, _ = x.shape
        q = transposed_linear(x, config.width, "q_proj").reshape(batch, length, config.heads, per_head)
        k, v = (
            transposed_linear(x, config.groups * per_head, name).reshape(batch, length, config.groups, per_head)
            for name in ("k_proj", "v_proj")
        )
        q = rotate(q).reshape(batch, length, config.groups, -1, per_head)
        scores = jnp.einsum("btgnh,bsgh->bgnts", q, rotate(k)).astype(jnp.float32) / math.sqrt(per_head)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool))[None, None, None], scores, -1e30)
        out = jnp.einsum("bgnts,bsgh->btgnh", jax.nn.softmax(scores, axis=-1).astype(x.dtype), v)
        return transposed_linear(out.reshape(x.shape), config.width, "o_proj")

    def net(tokens):
        with hk.name_scope("model"):
            with hk.name_scope("embed_tokens"):
                table = hk.get_parameter("weight", [config.vocabulary, config.width], config.dtype, init=WEIGHTS)
            x = table[tokens]
            for layer in range(config.layers):
                with hk.name_scope(f"layers_{layer}"):
                    h = rms_norm(x, "input_layernorm")
                    with hk.name_scope("self_attn"):
                        x = x + attention(h)
                    h = rms_norm(x, "post_attention_layernorm")
                    with hk.name_scope("mlp"):
                        gate, up = (transposed_linear(h, config.inner, name) for name in ("gate_proj", "up_proj"))
                        x = x + transposed_linear(jax.nn.silu(gate) * up, config.width, "down_proj")
            x = rms_norm(x, "norm")
        return transposed_linear(x, config.vocabulary, "lm_head")

    return net


@architecture("Llama 3.1", ids(B, T))
def llama(tokens):
    return llama_net(LlamaConfig(VOCABULARY, D, 2, 4, 2, 24, jnp.float32))(tokens)


@architecture("Llama-3.1-8B, full size", jax.ShapeDtypeStruct((8, 512), jnp.int32), runs=False)
def llama_8b(tokens):
    return llama_net(LLAMA_8B)(tokens)


@architecture("LSTM language model", ids(B, T))
def lstm_language_model(tokens):
    x = hk.Embed(VOCABULARY, D)(tokens)
    core = hk.DeepRNN([hk.LSTM(D), jax.nn.relu, hk.LSTM(D)])
    out, _ = hk.dynamic_unroll(core, x, core.initial_state(B), time_major=False)
    return hk.BatchApply(hk.Linear(VOCABULARY))(out)


@architecture("Transformer, encoder and decoder", ids(B, T), ids(B, T - 1))
def encoder_decoder(source, target):
    embed = hk.Embed(VOCABULARY, D)
    memory = hk.layer_stack(2, name="encoder")(lambda h: _encode(h))(embed(source))
    causal = jnp.tril(jnp.ones((1, 1, T - 1, T - 1), bool))

    def decode(h):
        h = h + attend(norm(h, "a"), norm(h, "a_too"), causal, "own")
        h = h + attend(norm(h, "b"), memory, None, "cross")
        return h + feed_forward(norm(h, "c"))

    return hk.Linear(VOCABULARY)(hk.layer_stack(2, name="decoder")(decode)(embed(target)))


def _encode(h):
    h = h + attend(norm(h, "a"), norm(h, "a_too"))
    return h + feed_forward(norm(h, "b"))


@architecture("Transformer with a mixture of experts", ids(B, T))
def mixture_of_experts(tokens):
    x = hk.Embed(VOCABULARY, D)(tokens)
    x = x + attend(norm(x), norm(x))
    gates = jax.nn.softmax(hk.Linear(3, with_bias=False, name="router")(x), axis=-1)
    up = hk.get_parameter("up", [3, D, 24], init=WEIGHTS)
    down = hk.get_parameter("down", [3, 24, D], init=WEIGHTS)
    inner = jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, up))
    return x + jnp.einsum("ebtd,bte->btd", jnp.einsum("ebtf,efd->ebtd", inner, down), gates)


@architecture("Mamba-like state-space model", normal(B, T, D))
def state_space_model(x):
    gate, h = jnp.split(hk.Linear(2 * D, name="into")(x), 2, axis=-1)
    h = jax.nn.silu(hk.DepthwiseConv1D(1, 3, name="local")(h))
    step = jax.nn.softplus(hk.Linear(D, name="step")(h))
    into, out = jnp.split(hk.Linear(8, with_bias=False, name="in_and_out")(h), 2, axis=-1)
    decay = -jnp.exp(hk.get_parameter("log_decay", [D, 4], init=jnp.zeros))

    def update(state, now):
        step, into, out, h = now
        state = state * jnp.exp(step[..., None] * decay[None]) + (step * h)[..., None] * into[:, None]
        return state, jnp.einsum("bdn,bn->bd", state, out)

    swapped = [jnp.swapaxes(z, 0, 1) for z in (step, into, out, h)]
    _, y = hk.scan(update, jnp.zeros((B, D, 4)), tuple(swapped))
    return hk.Linear(D, name="out")(jnp.swapaxes(y, 0, 1) * jax.nn.silu(gate))


# vision


@architecture("Vision transformer", normal(*IMAGE))
def vision_transformer(x):
    x = hk.Conv2D(D, 4, stride=4, padding="VALID", name="patches")(x).reshape(B, -1, D)
    first = hk.get_parameter("class", [1, 1, D], init=hk.initializers.TruncatedNormal(0.02))
    x = jnp.concatenate([jnp.broadcast_to(first, (B, 1, D)), x], axis=1)
    x = x + hk.get_parameter("positions", [1, 5, D], init=hk.initializers.TruncatedNormal(0.02))
    for layer in range(2):
        with hk.name_scope(f"block_{layer}"):
            h = norm(x)
            x = x + attend(h, h)
            x = x + feed_forward(norm(x))
    return hk.Linear(5, name="head")(norm(x)[:, 0])


@architecture("MLP-Mixer", normal(*IMAGE))
def mlp_mixer(x):
    x = hk.Conv2D(D, 4, stride=4, name="patches")(x).reshape(B, -1, D)
    for layer in range(2):
        with hk.name_scope(f"mixer_{layer}"):
            with hk.name_scope("tokens"):
                x = x + jnp.swapaxes(feed_forward(jnp.swapaxes(norm(x), 1, 2)), 1, 2)
            with hk.name_scope("channels"):
                x = x + feed_forward(norm(x))
    return hk.Linear(5, name="head")(jnp.mean(norm(x), axis=1))


@architecture("U-Net", normal(*IMAGE))
def u_net(x):
    skips = []
    for level, width in enumerate((4, 8)):
        x = jax.nn.relu(hk.Conv2D(width, 3, name=f"down_{level}")(x))
        skips.append(x)
        x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), "SAME")
    x = jax.nn.relu(hk.Conv2D(8, 3, name="bottom")(x))
    for level, width in ((1, 8), (0, 4)):
        x = hk.Conv2DTranspose(width, 2, stride=2, name=f"up_{level}")(x)
        x = jax.nn.relu(hk.Conv2D(width, 3, name=f"merge_{level}")(jnp.concatenate([x, skips[level]], axis=-1)))
    return hk.Conv2D(2, 1, name="head")(x)


@architecture("Variational autoencoder", normal(B, 24))
def variational_autoencoder(x):
    h = jax.nn.relu(hk.Linear(16, name="encoder")(x))
    mean, log_scale = hk.Linear(4, name="mean")(h), hk.Linear(4, name="log_scale")(h)
    z = mean + jnp.exp(log_scale) * jax.random.normal(hk.next_rng_key(), mean.shape)
    return hk.Linear(24, name="out")(jax.nn.relu(hk.Linear(16, name="decoder")(z))), mean, log_scale


@architecture("DCGAN generator", normal(B, 8))
def dcgan_generator(z):
    x = hk.Linear(2 * 2 * 16)(z).reshape(B, 2, 2, 16)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2DTranspose(8, 4, stride=2)(x), is_training=True))
    return jnp.tanh(hk.Conv2DTranspose(3, 4, stride=2)(x))


# other


@architecture("WaveNet", normal(B, 12, 4))
def wavenet(x):
    total = jnp.zeros((B, 12, 8))
    x = hk.Conv1D(8, 1, name="into")(x)
    for layer in range(3):
        with hk.name_scope(f"layer_{layer}"):
            causal = {"rate": 2**layer, "padding": hk.pad.causal}
            h = jnp.tanh(hk.Conv1D(8, 2, name="filter", **causal)(x))
            h = h * jax.nn.sigmoid(hk.Conv1D(8, 2, name="gate", **causal)(x))
            total = total + hk.Conv1D(8, 1, name="skip")(h)
            x = x + hk.Conv1D(8, 1, name="residual")(h)
    return hk.Conv1D(5, 1, name="head")(jax.nn.relu(total))


@architecture("Graph network", normal(5, D), jnp.array([0, 1, 2, 3, 4, 0]), jnp.array([1, 2, 3, 4, 0, 2]))
def graph_network(nodes, senders, receivers):
    """Message passing with the same modules each round."""
    message, update = hk.nets.MLP([24, D], name="message"), hk.nets.MLP([24, D], name="update")
    for _ in range(2):
        sent = message(jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1))
        gathered = jax.ops.segment_sum(sent, receivers, num_segments=nodes.shape[0])
        nodes = nodes + update(jnp.concatenate([nodes, gathered], axis=-1))
    return hk.Linear(3, name="readout")(jnp.mean(nodes, axis=0))


@architecture("Perceiver", normal(B, 20, 6))
def perceiver(x):
    latents = hk.get_parameter("latents", [4, D], init=hk.initializers.TruncatedNormal(0.02))
    z = jnp.broadcast_to(latents[None], (B, 4, D))
    block = hk.layer_stack(2, name="process")(lambda z: _encode(z))
    for round_ in range(2):
        with hk.name_scope(f"round_{round_}"):
            z = z + attend(norm(z), hk.Linear(D, name="into")(x), name="cross")
            z = z + feed_forward(norm(z))
        z = block(z)
    return hk.Linear(5, name="head")(jnp.mean(z, axis=1))


@architecture("Neural radiance field", normal(B, 7, 3))
def radiance_field(points):
    waves = points[..., None] * 2.0 ** jnp.arange(4)
    encoded = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1).reshape(*points.shape[:-1], -1)
    h = encoded
    for layer in range(3):
        h = jax.nn.relu(hk.Linear(16, name=f"layer_{layer}")(jnp.concatenate([h, encoded], -1) if layer == 2 else h))
    return hk.Linear(4, name="colour_and_density")(h)


@architecture("Deep Q-network with two heads", normal(B, 12, 12, 4))
def dueling_q_network(x):
    x = jax.nn.relu(hk.Conv2D(4, 4, stride=2)(x))
    x = jax.nn.relu(hk.Conv2D(8, 3)(x))
    x = hk.Flatten()(x)
    value, advantage = hk.nets.MLP([16, 1], name="value")(x), hk.nets.MLP([16, 4], name="advantage")(x)
    return value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)
