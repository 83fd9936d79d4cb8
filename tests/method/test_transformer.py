"""The chunkwise transformer against a plain NumPy forward in float64, and what must not change its values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdlib.errors import ContractError
from pdlib.items.state import Site
from pdlib.method.model import cast
from pdlib.method.transformer import MODULE, Chunk, Sizes, chunkwise_transformer, rotary_frequencies, sizes_of

SIZES = Sizes(width=12, blocks=2, heads=3, hidden=20)
SITES = {"a": Site(8, 5, 7), "b": Site(8, 5, 6), "c": Site(5, 4, 3)}


def older_forward(old: dict[str, np.ndarray], taps: np.ndarray) -> np.ndarray:
    """The older importance transformer in float64: one tap, blocks in a list, one head for all sites.

    Its q, k, v and o are `[out, in]`, applied as `x @ wᵀ`; its MLP is `[in, out]`.
    """
    p = {name: np.asarray(x, np.float64) for name, x in old.items()}
    x = _rms(np.asarray(taps, np.float64)) @ p["in_proj_w"] + p["in_proj_b"]
    half = len(p["inv_freq"])
    heads = x.shape[-1] // (2 * half)
    angle = np.arange(x.shape[-2])[:, None] * p["inv_freq"]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotated(y):
        first, second = y[..., :half], y[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    for i in range(sum(name.endswith("/wq") for name in p)):
        b = {name.split("/")[-1]: value for name, value in p.items() if name.startswith(f"blocks/{i}/")}
        q, k, v = ((_rms(x) @ b[w].T).reshape(*x.shape[:-1], heads, 2 * half) for w in ("wq", "wk", "wv"))
        scores = np.einsum("...thc,...shc->...hts", rotated(q), rotated(k)) / math.sqrt(2 * half)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("...hts,...shc->...thc", weights / weights.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(x.shape) @ b["wo"].T
        wide = _rms(x) @ b["w1"] + b["b1"]
        x = x + (wide * 0.5 * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))) @ b["w2"] + b["b2"]
    return x @ p["out_w"] + p["out_b"]


def _rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + np.finfo(np.float32).eps)


def made(chunks, sites=SITES, sizes=SIZES, seed=0, **options):
    function = chunkwise_transformer(chunks, sizes, **options)
    return function, function.init(jax.random.key(seed), sites)


def inputs(*lead: int, sites=SITES) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    return {name: jnp.asarray(random.standard_normal((*lead, site.d_in)), jnp.float32) for name, site in sites.items()}


def as_older(module, chunk: int, sites) -> dict[str, np.ndarray]:
    m = {name: np.asarray(x) for name, x in module.items()}
    short = {"query": "wq", "key": "wk", "value": "wv", "output": "wo", "hidden_w": "w1", "hidden_b": "b1",
             "out_w": "w2", "out_b": "b2"}  # fmt: skip
    old = {f"blocks/{i}/{was}": m[new][i, chunk] for new, was in short.items() for i in range(m["query"].shape[0])}
    old |= {"in_proj_w": m["input_w"][chunk], "in_proj_b": m["input_b"][chunk], "inv_freq": m["frequencies"]}
    old["out_w"] = np.concatenate([m[f"head_w.{site}"] for site in sites], -1)
    old["out_b"] = np.concatenate([m[f"head_b.{site}"] for site in sites], -1)
    return old


@pytest.mark.parametrize("lead", [(4,), (2, 4), (2, 3, 4), (1, 1)])
def test_it_is_the_numpy_forward(lead):
    function, params = made([Chunk(("a", "c"), ("c", "a", "b"))])
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)
    taps = inputs(*lead)
    got = function.apply(params, {}, taps)
    joined = np.concatenate([_rms(np.asarray(taps[tap], np.float64)) for tap in ("a", "c")], -1)
    # `older_forward` normalises its one tap: undo that by giving it taps that are joined and normalised already
    old = as_older(params[MODULE], 0, ("c", "a", "b"))
    scale = np.sqrt(np.mean(joined**2, -1, keepdims=True) + np.finfo(np.float32).eps)
    wanted = _forward_of_normed(old, joined, scale)
    for site, part in zip(("c", "a", "b"), np.split(wanted, [3, 10], axis=-1), strict=True):
        assert got[site].shape == (*lead, SITES[site].C)
        np.testing.assert_allclose(np.asarray(got[site]), part, rtol=1e-4, atol=1e-5)


def _forward_of_normed(old, joined, scale):
    """The older forward whose RMS norm of the tap is the identity on `joined`: its weights are scaled a position."""
    lead, width = joined.shape[:-1], joined.shape[-1]
    old = {**old, "in_proj_w": np.concatenate([old["in_proj_w"], np.zeros((1, old["in_proj_w"].shape[1]))])}
    # One more channel makes every mean square exactly the same, so that the norm divides by a constant.
    total = 4.0 * width
    extra = np.sqrt(total - np.sum(joined**2, -1, keepdims=True))
    taps = np.concatenate([joined, extra], -1).reshape(*lead, width + 1)
    constant = math.sqrt(total / (width + 1) + np.finfo(np.float32).eps)
    del scale
    return older_forward({**old, "in_proj_w": old["in_proj_w"] * constant}, taps)


def test_chunks_that_are_run_as_one_are_as_if_alone():
    both, params = made([Chunk(("a",), ("a", "c")), Chunk(("b",), ("b",))])
    taps = inputs(2, 4)
    together = both.apply(params, {}, taps)
    for place, chunk in enumerate((Chunk(("a",), ("a", "c")), Chunk(("b",), ("b",)))):
        alone = chunkwise_transformer([chunk], SIZES)
        axis = {"input_w": 0, "input_b": 0, "frequencies": None}
        module = {
            name: x
            if name.startswith("head") or axis.get(name, 1) is None
            else jnp.take(x, jnp.array([place]), axis.get(name, 1))
            for name, x in params[MODULE].items()
            if not name.startswith("head") or name.split(".")[1] in chunk.sites
        }
        for site, logits in alone.apply({MODULE: module}, {}, taps).items():
            np.testing.assert_allclose(np.asarray(together[site]), np.asarray(logits), rtol=1e-5, atol=1e-6)


def test_positions_are_seen_in_both_directions_and_batches_apart():
    function, params = made([Chunk(("a",), ("a", "b", "c"))])
    taps = inputs(2, 4)
    base = function.apply(params, {}, taps)["a"]
    for position in (0, 3):
        changed = {**taps, "a": taps["a"].at[0, position].add(1.0)}
        moved = np.abs(np.asarray(function.apply(params, {}, changed)["a"] - base)).max(-1)
        assert (moved[0] > 1e-6).all()
        assert (moved[1] == 0).all()


def test_every_parameter_learns_but_the_frequencies():
    function, params = made([Chunk(("a", "c"), ("a", "b", "c"))])

    def loss(params):
        return sum(jnp.sum(jnp.square(x)) for x in function.apply(params, {}, inputs(2, 4)).values())

    gradients = jax.grad(loss)(params)[MODULE]
    for name, gradient in gradients.items():
        assert bool((gradient != 0).any()) is (name != "frequencies"), name


def test_sizes_and_frequencies_come_from_the_parameters():
    _, params = made([Chunk(("a",), ("a", "b", "c"))])
    assert sizes_of(params) == SIZES
    np.testing.assert_array_equal(params[MODULE]["frequencies"], rotary_frequencies(4))
    np.testing.assert_allclose(rotary_frequencies(4), [1, 0.01], rtol=1e-6)


def test_it_runs_in_bfloat16_with_rotary_frequencies_in_float32():
    function, params = made([Chunk(("a", "c"), ("a", "b", "c"))])
    half = cast(params, jnp.bfloat16)
    assert half[MODULE]["frequencies"].dtype == jnp.float32
    for site, logits in function.apply(half, {}, cast(inputs(2, 4), jnp.bfloat16)).items():
        assert logits.dtype == jnp.bfloat16
        exact = np.asarray(function.apply(params, {}, inputs(2, 4))[site])
        np.testing.assert_allclose(np.float32(logits), exact, atol=0.05 * np.abs(exact).max())


def test_a_named_activation_is_a_tap():
    function, params = made([Chunk(("residual",), ("a", "b", "c"))], tap_widths={"residual": 9})
    assert function.apply(params, {}, {"residual": jnp.ones((3, 9))})["b"].shape == (3, 6)


def test_the_8b_function_is_described_without_being_allocated():
    sites = {"gate": Site(4096, 14336, 24576), "up": Site(4096, 14336, 24576), "down": Site(14336, 4096, 24576)}
    function = chunkwise_transformer([Chunk(("gate",), tuple(sites))], Sizes(4096, 4, 64, 16384))
    abstract = jax.eval_shape(lambda key: function.init(key, sites), jax.random.key(0))
    assert 4.4e9 < sum(4 * leaf.size for leaf in jax.tree.leaves(abstract)) < 4.6e9


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: made([Chunk(("a",), ("a", "b")), Chunk(("a",), ("b", "c"))]), "do not partition the sites"),
        (lambda: made([Chunk(("a",), ("a", "b"))]), "lack c; the chunks partition the decomposed sites"),
        (lambda: made([Chunk(("a",), ("a", "b", "c", "d"))]), "name d that is not decomposed"),
        (lambda: made([Chunk(("a",), tuple(SITES))], sizes=Sizes(12, 1, 5, 4)), "5 heads do not divide width 12"),
        (lambda: made([Chunk(("x",), tuple(SITES))]), "taps x are no sites, and tap_widths does not say"),
        (lambda: made([Chunk(("a",), ("a", "b")), Chunk(("c",), ("c",))]), "need taps of one joined width"),
    ],
)
def test_what_cannot_be_built_is_refused(build, text):
    with pytest.raises(ContractError, match=text):
        build()
