"""Small models, each written as people write Haiku, one for each way in which a weight is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

B, T, D = 2, 5, 8


class Model(NamedTuple):
    """A model and what it is run on.

    Attributes:
        net: a Haiku function.
        inputs: its arguments.
        tolerance: of values, relative and absolute; gradients get a hundred times that.
    """

    net: Callable[..., Any]
    inputs: tuple[Any, ...]
    tolerance: float


MODELS: dict[str, Model] = {}


def activations() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (B, T, D))


def tokens(high: int = 11) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (B, T), 0, high)


def model(*inputs: Any, tolerance: float = 2e-5) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a model; without inputs it takes activations `[B, T, D]`."""

    def register(net: Callable[..., Any]) -> Callable[..., Any]:
        MODELS[net.__name__] = Model(net, inputs or (activations(),), tolerance)
        return net

    return register


def weight(name: str, *shape: int) -> jax.Array:
    return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal(0.5))


@model()
def linear(x):
    return hk.Linear(6)(x)


@model()
def linear_without_bias(x):
    return hk.Linear(6, with_bias=False)(jnp.sin(x))


@model()
def one_in_and_one_out(x):
    return hk.Linear(3, name="from_one")(hk.Linear(1, name="to_one")(x))


@model(jnp.linspace(-1.0, 1.0, D))
def a_single_vector(x):
    return hk.Linear(4)(jnp.tanh(hk.Linear(6)(x)))


@model()
def mlp(x):
    return hk.nets.MLP([16, 4])(x)


@model()
def attention(x):
    return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0), model_size=D)(x, x, x)


@model()
def cross_attention(x):
    latents = jnp.broadcast_to(weight("latents", 3, D)[None], (B, 3, D))
    attend = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0), model_size=D)
    return attend(latents, x, x)


@model()
def parameter_with_dot(x):
    return jnp.dot(jax.nn.gelu(x), weight("kernel", D, 7)) + hk.get_parameter("bias", [1, 1, 7], init=jnp.ones)


@model()
def parameter_on_the_left(x):
    return jnp.matmul(weight("w", 7, D), jnp.swapaxes(x, -1, -2))


@model()
def parameter_on_the_left_of_a_vector(x):
    return weight("w", 7, D) @ x[0, 0]


@model()
def stored_as_out_by_in(x):
    return x @ weight("w", 7, D).T


@model()
def heads_of_three_axes(x):
    q = jnp.einsum("dhk,btd->bhtk", weight("wq", D, 2, 3), x)
    return jnp.einsum("bhtk,hkd->btd", q, weight("wo", 2, 3, D))


@model()
def heads_in_another_order(x):
    q = jnp.einsum("hdk,btd->bthk", weight("wq", 2, D, 3), x)
    return jnp.einsum("bthk,khd->btd", q, weight("wo", 3, 2, D))


@model()
def reshaped_to_a_matrix(x):
    return x @ weight("w", D, 2, 3).reshape(D, 6)


@model()
def reshaped_to_heads(x):
    return jnp.einsum("btd,dhk->bthk", x, weight("w", D, 6).reshape(D, 2, 3))


@model()
def fused_and_then_split_into_heads(x):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->bcthk", x, weight("w", D, 18).reshape(D, 3, 2, 3)), 1, 0)
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", scores, v)


@model()
def flattened_inputs(x):
    return x.reshape(B, T * D) @ weight("w", T, D, 3).reshape(T * D, 3)


@model()
def used_whole_and_in_heads(x):
    w = weight("w", D, D)
    return jnp.einsum("btd,dhk->bthk", jnp.tanh(x @ w), w.reshape(D, 2, 4))


@model()
def experts(x):
    return jnp.einsum("ebd,edf->ebf", jnp.stack([x[:, 0], x[:, 1], x[:, 2]]), weight("w", 3, D, 4))


@model()
def experts_that_all_see_everything(x):
    gates = jax.nn.softmax(hk.Linear(3, name="gate")(x))
    return jnp.einsum("btef,bte->btf", jnp.einsum("btd,edf->btef", x, weight("w", 3, D, 4)), gates)


@model()
def experts_with_the_last_axis(x):
    return jnp.einsum("ebd,dfe->ebf", jnp.stack([x[:, 0], x[:, 1], x[:, 2]]), weight("w", D, 4, 3))


@model()
def experts_stacked_from_linears(x):
    w = jnp.stack([weight(f"w{index}", D, 4) for index in range(3)])
    return jnp.einsum("ebd,edf->ebf", jnp.stack([x[:, 0], x[:, 1], x[:, 2]]), w)


@model()
def called_twice(x):
    layer = hk.Linear(D)
    return layer(jnp.tanh(layer(x)))


@model()
def tied_autoencoder(x):
    w = weight("w", D, 3)
    return jax.nn.relu(x @ w) @ w.T


@model()
def contracted_over_two_axes(x):
    return jnp.tensordot(x, weight("w", T, D, 3), axes=((1, 2), (0, 1)))


@model()
def at_the_highest_precision(x):
    return jnp.dot(x, weight("w", D, 3), precision=jax.lax.Precision.HIGHEST)


@model()
def its_own_gradient(x):
    """Forces from an energy: the gradient inside multiplies by the transposes."""
    net = hk.nets.MLP([6, 1], activation=jnp.tanh)
    if hk.running_init():
        return net(x)
    return jax.grad(lambda x: jnp.sum(net(x)))(x)


@model()
def layer_stack(x):
    return hk.layer_stack(3)(lambda h: h + hk.nets.MLP([16, D], name="m")(jax.nn.silu(h)))(x)


@model()
def layer_stack_of_one(x):
    return hk.layer_stack(1)(lambda h: h + hk.nets.MLP([6, D], name="m")(h))(x)


@model()
def layer_stack_unrolled(x):
    return hk.layer_stack(4, unroll=2)(lambda h: h + hk.Linear(D)(jnp.tanh(h)))(x)


class _Names:
    """Haiku's way to keep one parameter a layer."""

    def stacked_to_flat(self, name, index):
        return name.replace("block", f"block_{index}")

    def flat_to_stacked(self, name):
        found = re.match(r"(.*)block_(\d+)(.*)", name)
        return (f"{found[1]}block{found[3]}", int(found[2])) if found else None


@model()
def layer_stack_transparent(x):
    class Block(hk.Module):
        def __call__(self, h):
            return h + hk.Linear(D, name="lin")(jax.nn.silu(h))

    return hk.layer_stack(3, transparent=True, transparency_map=_Names())(lambda h: Block(name="block")(h))(x)


@model()
def layer_stack_nested(x):
    def outer(h):
        h = h + hk.Linear(D, name="o")(h)
        return hk.layer_stack(2, name="inner")(lambda g: g + jnp.tanh(hk.Linear(D, name="i")(g)))(h)

    return hk.layer_stack(3, name="outer")(outer)(x)


@model()
def layer_stack_with_remat(x):
    def block(h):
        return h + hk.nets.MLP([6, D], name="m")(h)

    return hk.layer_stack(2)(hk.remat(block))(x)


@model()
def layer_stack_of_attention(x):
    def block(h):
        attend = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0), model_size=D)
        h = h + attend(*[hk.LayerNorm(-1, True, True)(h)] * 3)
        return h + hk.nets.MLP([16, D])(hk.LayerNorm(-1, True, True)(h))

    return hk.layer_stack(2)(block)(x)


@model()
def scan_with_shared_weights(x):
    layer = hk.Linear(D)

    def step(carry, now):
        carry = jnp.tanh(layer(carry) + now)
        return carry, carry

    return hk.scan(step, jnp.zeros((B, D)), jnp.swapaxes(x, 0, 1))[1]


@model()
def scan_over_weights_backwards(x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, weight("w", 3, D, D), reverse=True)


@model()
def scan_that_carries_a_weight_unchanged(x):
    def step(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w), w), None

    return jax.lax.scan(step, (x, weight("w", D, D)), None, length=2)[0][0]


@model()
def experts_chosen_by_the_batch(x):
    """A lookup of whole matrices: the site is the table, with a row an expert."""
    chosen = weight("w", 3, D, 4)[jnp.argmax(x[:, 0, :3], axis=-1)]
    return jnp.einsum("btd,bde->bte", x, chosen)


@model()
def scan_with_own_and_shared_weights(x):
    shared = weight("shared", D, D)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ shared, None), x, weight("own", 3, D, D))[0]


@model()
def scan_over_one_axis_of_experts(x):
    """A weight whose middle axis is the loop's."""
    w = jnp.moveaxis(weight("w", D, 3, D), 1, 0)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


@model()
def lstm(x):
    core = hk.LSTM(D)
    return hk.dynamic_unroll(core, x, core.initial_state(B), time_major=False)[0]


@model()
def rnn_unrolled_in_python(x):
    core = hk.VanillaRNN(4)
    return hk.static_unroll(core, x, core.initial_state(B), time_major=False)[0]


@model()
def loop_of_known_length(x):
    layer = hk.Linear(D)
    if hk.running_init():
        return layer(x)
    return hk.fori_loop(0, 3, lambda _, h: jnp.tanh(layer(h)), x)


@model()
def remat(x):
    return hk.remat(hk.nets.MLP([16, D]))(x)


@model()
def vmap(x):
    return hk.vmap(hk.nets.MLP([16, D]), split_rng=False)(x)


@model()
def vmap_nested(x):
    return hk.vmap(hk.vmap(hk.Linear(D), split_rng=False), in_axes=1, out_axes=1, split_rng=False)(x)


@model()
def vmap_over_weights(x):
    return jax.vmap(lambda x, w: jnp.tanh(x @ w), in_axes=(1, 2), out_axes=1)(x, weight("w", D, 3, T))


@model()
def cond(x):
    a, b = hk.Linear(D, name="a"), hk.Linear(D, name="b")
    if hk.running_init():
        return a(x) + b(x)
    return hk.cond(jnp.sum(x) > 0, a, b, x)


@model()
def switch(x):
    branches = [hk.nets.MLP([4, D], name="one"), hk.Linear(D, name="two"), jnp.tanh]
    if hk.running_init():
        return sum(branch(x) for branch in branches)
    return hk.switch(jnp.argmax(x[0, 0, :2]), branches, x)


@model()
def cond_in_a_scan(x):
    w = weight("w", D, D)

    def step(h, now):
        return jax.lax.cond(jnp.sum(now) > 0, lambda h: jnp.tanh(h @ w), lambda h: h, h), h

    return jax.lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))


@model()
def conv1d(x):
    return hk.Conv1D(4, 3)(x)


@model()
def conv1d_channels_first(x):
    return hk.Conv1D(4, 3, data_format="NCW", stride=2)(x)


@model(jax.random.normal(jax.random.key(3), (2, 6, 5, 3)))
def conv2d_dilated(x):
    return hk.Conv2D(4, (3, 2), rate=2)(x)


@model(jax.random.normal(jax.random.key(3), (2, 3, 6, 5)))
def conv2d_channels_first(x):
    return hk.Conv2D(4, 3, stride=(2, 1), data_format="NCHW", padding="VALID")(x)


@model(jax.random.normal(jax.random.key(3), (2, 4, 3, 4, 2)))
def conv3d(x):
    return hk.Conv3D(3, 2)(x)


@model(jax.random.normal(jax.random.key(3), (2, 3, 4, 3)))
def conv2d_transpose(x):
    return hk.Conv2DTranspose(4, 3, stride=2)(x)


@model(jax.random.normal(jax.random.key(3), (2, 4, 4, 3)))
def conv_after_a_layer_stack(x):
    return hk.layer_stack(2)(lambda h: h + hk.Conv2D(3, 3)(jax.nn.relu(h)))(x)


@model(tokens())
def embedding(ids):
    return hk.Linear(3)(hk.Embed(11, D)(ids))


@model(tokens())
def embedding_one_hot(ids):
    return hk.Linear(3)(hk.Embed(11, D, lookup_style="ONE_HOT")(ids))


@model(tokens())
def embedding_in_columns(ids):
    return jnp.take(weight("table", D, 11), ids, axis=1)


@model(tokens())
def embedding_of_matrices(ids):
    return jnp.einsum("bthk,bthj->btkj", weight("table", 11, 2, 3)[ids], weight("other", 11, 2, 3)[ids])


@model(tokens())
def tied_unembedding(ids):
    embed = hk.Embed(11, D)
    return jnp.tanh(hk.Linear(D)(embed(ids))) @ embed.embeddings.T


@model(tokens())
def positions_looked_up_and_added(ids):
    x = hk.Embed(11, D)(ids) + hk.Embed(T, D, name="position")(jnp.arange(T))[None]
    return hk.Linear(3)(x)


@model()
def layer_norm(x):
    return hk.Linear(3)(hk.LayerNorm(-1, True, True)(x))


@model()
def batch_norm_and_dropout(x):
    x = hk.BatchNorm(True, True, 0.9)(hk.Linear(D)(x), is_training=True)
    return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.5, x))


@model(tolerance=3e-2)
def bfloat16_policy(x):
    with hk.custom_getter(lambda following, value, _: following(value.astype(jnp.bfloat16))):
        return hk.Linear(4)(jnp.tanh(hk.Linear(D)(x.astype(jnp.bfloat16)))).astype(jnp.float32)


@model(tolerance=2e-2)
def bfloat16_with_float32_sums(x):
    w = weight("w", D, 4).astype(jnp.bfloat16)
    return jnp.dot(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32)


@model()
def scopes_and_batch_apply(x):
    with hk.name_scope("blocks"):
        h = hk.Sequential([hk.Linear(D), jnp.tanh, hk.Linear(D)])(x)
    return hk.BatchApply(hk.Linear(3))(h)


@model()
def jitted_inside(x):
    dot = jax.jit(lambda x, w: jax.jit(jnp.dot)(jnp.tanh(x), w.astype(x.dtype)))
    return dot(x, weight("w", D, 3))


@model({"x": activations(), "scale": jnp.float32(0.5)}, [jnp.ones((B, T, 1)), None])
def trees_in_and_out(batch, extra):
    h = hk.Linear(D)(batch["x"] * extra[0]) * batch["scale"]
    return {"h": h, "out": (hk.Linear(2, name="head")(h), None)}
