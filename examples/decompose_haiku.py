"""Decompose a small classifier of handwritten-like digits, written in plain Haiku, through pdlib's public functions.

Run it with `uv run python examples/decompose_haiku.py`; it takes under a minute on two cores. The digits are drawn
here, as seven-segment glyphs, moved, dimmed and noised. The model knows nothing of pdlib, and is not changed.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import pdlib

SIZE, C, BATCH = 12, 24, 128

# The seven segments as strokes (row, column, height, width), and which of them each digit lights.
STROKES = ((1, 3, 1, 5), (2, 2, 3, 1), (2, 8, 3, 1), (5, 3, 1, 5), (6, 2, 3, 1), (6, 8, 3, 1), (9, 3, 1, 5))
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")


def glyphs() -> jax.Array:
    """The ten digits as images `[10, SIZE, SIZE]`."""
    images = jnp.zeros((10, SIZE, SIZE))
    for digit, segments in enumerate(DIGITS):
        for lit, (row, column, height, width) in zip(segments, STROKES, strict=True):
            if lit == "1":
                images = images.at[digit, row : row + height, column : column + width].set(1.0)
    return images


def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A batch: images `[BATCH, SIZE, SIZE, 1]`, moved by a pixel and noised, and their digits."""
    keys = jax.random.split(key, 4)
    labels = jax.random.randint(keys[0], (BATCH,), 0, 10)
    moves = jax.random.randint(keys[1], (BATCH, 2), -1, 2)
    images = jax.vmap(lambda image, move: jnp.roll(image, move, (0, 1)))(glyphs()[labels], moves)
    images = images * jax.random.uniform(keys[2], (BATCH, 1, 1), minval=0.7)
    return (images + 0.1 * jax.random.normal(keys[3], images.shape))[..., None], labels


# 1. Somebody's model: a convolution, and an MLP from hk.nets.


def classify(images: jax.Array) -> jax.Array:
    h = jax.nn.relu(hk.Conv2D(8, 3, stride=2)(images))
    return hk.nets.MLP([32, 10])(hk.Flatten()(h))


model = hk.without_apply_rng(hk.transform(classify))


def train(steps: int = 400) -> hk.Params:
    """Train it as one does."""
    params = model.init(jax.random.key(0), sample(jax.random.key(0))[0])
    optimizer = optax.adam(3e-3)

    def loss(params: hk.Params, key: jax.Array) -> jax.Array:
        images, labels = sample(key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels))

    def update(step: jax.Array, carry: tuple) -> tuple:
        params, state = carry
        gradient = jax.grad(loss)(params, jax.random.fold_in(jax.random.key(1), step))
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state

    return jax.jit(lambda c: jax.lax.fori_loop(0, steps, update, c))((params, optimizer.init(params)))[0]


# 2. What there is to decompose: one trace on shapes alone.

params = train()
images, labels = sample(jax.random.key(2))
plan = pdlib.Target(model.apply, params).plan(images)
sites = plan.sites("*")
for name, site in sites.items():
    print(f"{name:24} {site.kind:5} d_in {site.d_in:4} d_out {site.d_out:3}  mask {(*site.positions[name], C)}")

# 3. Components, trained to add up to the weights, and to keep the answers when a random part of them is left out.

weights = plan.matrices(params)
factors = pdlib.init_decomposition(
    jax.random.key(3),
    {name: pdlib.Site(site.d_in, site.d_out, C) for name, site in sites.items()},
    lambda _key, _sites: {},
).components


def random_masks(key: jax.Array, keep: float) -> dict[str, dict[str, jax.Array]]:
    """Every component and delta scaled by a number in [keep, 1], anew at each position."""
    masks = {}
    for index, (name, site) in enumerate(sites.items()):
        key_mask, key_delta = jax.random.split(jax.random.fold_in(key, index))
        shape = site.positions[name]
        mask = jax.random.uniform(key_mask, (*shape, C), minval=keep)
        masks[name] = {"mask": mask, "delta": jax.random.uniform(key_delta, (*shape, 1), minval=keep)}
    return masks


def faithfulness(factors: dict[str, pdlib.Factors]) -> jax.Array:
    """The part of the weights' square that the components miss."""
    missed = sum(jnp.sum((W - factors[name].V @ factors[name].U) ** 2) for name, W in weights.items())
    return missed / sum(jnp.sum(W**2) for W in weights.values())


def divergence(factors: dict[str, pdlib.Factors], masks: dict, images: jax.Array) -> jax.Array:
    """How far the masked model's answers are from the clean one's, as a Kullback–Leibler divergence."""
    clean, _ = plan.clean(params, images)
    masked = plan.masked(params, factors, masks, images)
    return jnp.mean(optax.kl_divergence(jax.nn.log_softmax(masked), jax.nn.softmax(clean)))


optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 600))


def step(index: jax.Array, carry: tuple) -> tuple:
    factors, state = carry
    key_data, key_masks = jax.random.split(jax.random.fold_in(jax.random.key(4), index))

    def loss(factors: dict[str, pdlib.Factors]) -> jax.Array:
        masks = random_masks(key_masks, 0.5)
        return 10 * faithfulness(factors) + divergence(factors, masks, sample(key_data)[0])

    change, state = optimizer.update(jax.grad(loss)(factors), state)
    return optax.apply_updates(factors, change), state


before = faithfulness(factors)
factors, _ = jax.jit(lambda c: jax.lax.fori_loop(0, 600, step, c))((factors, optimizer.init(factors)))
print(f"\nfaithfulness: {before:.3f} of the weights missing before, {faithfulness(factors):.4f} after")

# 4. Use it: how many components of the last layer do the answers need? What comes before that layer runs once.

site = "mlp/~/linear_1/w"
clean, taps = plan.clean(params, images, taps=[site])
prefix, suffix = plan.split(site)
residuals = jax.jit(prefix)(params, images)
strength = jnp.linalg.norm(factors[site].U, axis=1) * jnp.std(taps[site].input @ factors[site].V, axis=0)
rank = jnp.argsort(jnp.argsort(-strength))


@jax.jit
def accuracy_with(count: jax.Array) -> jax.Array:
    """Accuracy with the strongest components alone, the others and the delta taken away."""
    mask = jnp.where(rank < count, 1.0, 0.0)
    out = suffix(params, residuals, factors, {site: {"mask": mask, "delta": jnp.float32(0)}})
    return jnp.mean(jnp.argmax(out, -1) == labels)


print(f"\naccuracy of the model: {jnp.mean(jnp.argmax(clean, -1) == labels):.3f}")
for count in (1, 2, 4, 8, 16, C):
    print(f"with {count:2} of {C} components of {site}: {accuracy_with(jnp.int32(count)):.3f}")
