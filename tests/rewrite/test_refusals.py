"""What cannot be decomposed is refused by name and reason, and every other site stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pdlib
from pdlib.errors import BatchMismatch, MaskMismatch, NameCollision, NoSuchSite, SiteRefused
from tests.rewrite.models import B, D, T, activations, weight
from tests.rewrite.oracle import C, assert_oracle, factors_of, target_of

REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {}


def refused(name: str, reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a model in which one weight cannot be decomposed; another, `good/w`, is added to each."""

    def register(net: Callable[..., Any]) -> Callable[..., Any]:
        def with_a_good_one(x: Any) -> Any:
            return net(hk.Linear(D, name="good")(x))

        REFUSED[net.__name__] = (with_a_good_one, name, reason)
        return net

    return register


@refused("linear/w", "inside a while loop, whose number of steps is not known")
def while_loop(x):
    layer = hk.Linear(D)
    if hk.running_init():
        return layer(x)
    return hk.while_loop(lambda c: jnp.sum(c[1]) < 3, lambda c: (c[0] + 1, layer(c[1]) + 3), (0, x))[1]


@refused("~/w", "inside custom_vjp_call, whose own derivative rule would be passed over")
def custom_vjp(x):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, None))
    return product(x, weight("w", D, D))


@refused("~/w", "inside custom_jvp_call, whose own derivative rule would be passed over")
def custom_jvp(x):
    product = jax.custom_jvp(lambda x, w: x @ w)
    product.defjvp(lambda primals, tangents: (product(*primals), product(tangents[0], primals[1])))
    return product(x, weight("w", D, D))


@refused("conv1_d/w", "it is the kernel of a convolution in 2 groups of features")
def grouped_convolution(x):
    return hk.Conv1D(D, 3, feature_group_count=2)(x)


@refused("conv1_d/w", "it is computed before it is used (mul)")
def masked_convolution(x):
    return hk.Conv1D(D, 3, mask=np.ones((3, D, D), np.float32))(x)


@refused("~/w", "it is computed before it is used (select_n)")
def triangular(x):
    return x @ jnp.tril(weight("w", D, D))


@refused("~/w", "it is computed before it is used (slice)")
def a_part_of_a_fused_weight(x):
    return x @ weight("w", D, 2 * D)[:, :D]


@refused("gru/w_h", "it is computed before it is used (split)")
def gru(x):
    core = hk.GRU(D)
    return hk.dynamic_unroll(core, x, core.initial_state(B), time_major=False)[0]


@refused("~/w", "it is computed before it is used (dynamic_slice)")
def one_of_several_by_index(x):
    return x @ weight("w", 3, D, D)[jnp.argmax(x[0, 0, :3])]


@refused("~/w", "it is computed before it is used (it is carried through a scan)")
def carried_through_a_scan(x):
    def step(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w), 0.5 * w), None

    return jax.lax.scan(step, (x, weight("w", D, D)), None, length=2)[0][0]


@refused("linear/w", "it is computed before it is used (div)")
def weight_norm(x):
    def normed(following, value, context):
        value = following(value)
        return value / jnp.linalg.norm(value, axis=0, keepdims=True) if context.name == "w" else value

    with hk.custom_getter(normed):
        return hk.Linear(D)(x)


@refused("~/a", "it is computed before it is used (dot_general)")
def low_rank_product_of_weights(x):
    return x @ (weight("a", D, 2) @ weight("b", 2, D))


@refused("~/w", "it is used as two different matrices")
def two_matrices_of_one_weight(x):
    w = weight("w", D, D, D)
    return jnp.einsum("btd,def->btef", x, w), jnp.einsum("bte,def->btdf", x, w)


@refused("~/w", "inside the primitive 'shard_map', which pdlib does not enter")
def shard_map(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(x, weight("w", D, D))


@refused("~/w", "it multiplies nothing: consumed by mul")
def a_scale_and_no_product(x):
    return x * weight("w", T, D)[None]


@refused("~/w", "it multiplies nothing: nothing consumes it")
def unused(x):
    weight("w", D, D)
    return x


@pytest.mark.parametrize("case", REFUSED)
def test_a_weight_is_refused_by_name_and_reason_and_the_others_stay_usable(case):
    net, name, reason = REFUSED[case]
    target, batch = target_of(net, (activations(),))
    with jax.numpy_rank_promotion("allow"):
        plan = target.plan(batch)
    with pytest.raises(SiteRefused) as caught:
        plan.sites(name)
    assert f"\n  {name}: {reason}\n" in str(caught.value)
    assert str(caught.value).endswith(f"'!{name}'; other sites are not affected.")
    good = plan.sites(["good", f"!{name}"])
    assert list(good) == ["good/w"]
    if case != "shard_map":
        with jax.numpy_rank_promotion("allow"):
            assert_oracle(plan, target, batch, good, 2e-5, gradients=case != "while_loop")


def test_a_mask_or_tap_on_a_refused_use_is_refused():
    net, name, reason = REFUSED["custom_vjp"]
    target, batch = target_of(net, (activations(),))
    plan = target.plan(batch)
    for call in (
        lambda: plan.masked(target.params, {}, {name: {"mask": jnp.ones(C)}}, batch),
        lambda: plan.clean(target.params, batch, taps=[name]),
    ):
        with pytest.raises(SiteRefused) as caught:
            call()
        assert str(caught.value) == (
            f"1 places cannot be entered\n  {name}: {reason}\nLeave them out of masks and taps."
        )


@pytest.fixture
def planned():
    target, batch = target_of(lambda x: hk.nets.MLP([16, 4])(x), (activations(),))
    return target, batch, target.plan(batch)


def test_several_refusals_come_at_once():
    def net(x):
        return x @ jnp.tril(weight("a", D, D)) @ jnp.tril(weight("b", D, D))

    target, batch = target_of(net, (activations(),))
    with pytest.raises(SiteRefused) as caught:
        target.plan(batch).sites("*")
    assert str(caught.value) == (
        "2 of the selected weights cannot be decomposed\n"
        "  ~/a: it is computed before it is used (select_n)\n"
        "  ~/b: it is computed before it is used (select_n)\n"
        "Leave them out, e.g. by the glob '!~/a'; other sites are not affected."
    )


def test_a_misspelt_glob_names_the_near_ones(planned):
    _, _, plan = planned
    with pytest.raises(NoSuchSite) as caught:
        plan.sites(["mlp/~/linear_0", "mlp/~/linaer_1", "decoder/*"])
    assert str(caught.value) == (
        "no site matches 'mlp/~/linaer_1'; did you mean 'mlp/~/linear_1' or 'mlp/~/linear_1/w' or 'mlp/~/linear_0'?\n"
        "no site matches 'decoder/*'; there are 'mlp/~/linear_0', 'mlp/~/linear_0/w', 'mlp/~/linear_1', "
        "'mlp/~/linear_1/w'"
    )


@pytest.mark.parametrize(
    ("globs", "text"),
    [
        ([], "no glob says which sites to decompose; pass globs such as 'mlp/~/linear_0/w', 'mlp/~/linear_1/w'"),
        (["!*_0"], "no glob says which sites to decompose; pass globs such as 'mlp/~/linear_0/w', 'mlp/~/linear_1/w'"),
        (["*", "!*"], "globs ['*', '!*'] leave no site; drop one that starts with '!'"),
    ],
)
def test_globs_that_select_nothing_are_refused(planned, globs, text):
    with pytest.raises(NoSuchSite) as caught:
        planned[2].sites(globs)
    assert str(caught.value) == text


def test_globs_match_a_parameter_or_its_module_and_leave_out(planned):
    _, _, plan = planned
    both = ["mlp/~/linear_0/w", "mlp/~/linear_1/w"]
    assert list(plan.sites("*")) == list(plan.sites(["mlp/~/linear_1", "mlp/~/linear_0/w"])) == both
    assert list(plan.sites(["*linear*", "!*_0"])) == both[1:]
    with pytest.raises(SiteRefused, match="mlp/~/linear_0/b: it multiplies nothing"):
        plan.sites("*/b")


def test_masks_and_factors_that_do_not_fit_are_all_listed_before_anything_is_traced(planned):
    target, batch, plan = planned
    sites = plan.sites("*")
    factors = factors_of(sites)
    good, bad = list(sites)
    masks = {
        good: {"mask": jnp.ones((B, 7)), "delta": jnp.ones((B, T, C)), "route": jnp.ones((B, T, 1))},
        bad: {"mask": jnp.ones((B, T, C), bool)},
    }
    with pytest.raises(MaskMismatch) as caught:
        plan.masked(target.params, factors, masks, batch)
    assert str(caught.value) == (
        "masks or factors do not fit the model\n"
        "  mlp/~/linear_0/w: mask has shape (2, 7), which does not broadcast to (2, 5, 6), (positions, C)\n"
        "  mlp/~/linear_0/w: delta has shape (2, 5, 6), which does not broadcast to (2, 5, 1), (positions, 1)\n"
        "  mlp/~/linear_0/w: route is float32, want bool\n"
        "  mlp/~/linear_1/w: mask is bool, want a real number\n"
        "`plan.sites(...)` has the shapes to use."
    )
    wrong = {good: pdlib.Factors(jnp.ones((D, C)), jnp.ones((C, 15)))}
    with pytest.raises(MaskMismatch) as caught:
        plan.masked(target.params, wrong, {name: {"mask": jnp.ones(C)} for name in sites}, batch)
    assert str(caught.value) == (
        "masks or factors do not fit the model\n"
        "  mlp/~/linear_0/w: U has shape (6, 15), want (C=6, d_out=16)\n"
        "  mlp/~/linear_1/w: no factors; pass pdlib.Factors(V, U) under this name\n"
        "`plan.sites(...)` has the shapes to use."
    )
    with pytest.raises(MaskMismatch) as caught:
        plan.masked(target.params, factors, {good: {"masks": jnp.ones(C)}}, batch)
    assert str(caught.value) == (
        "mlp/~/linear_0/w: a mask has the keys mask, delta and route, not ['masks']; drop the others"
    )


def test_a_mask_for_no_use_names_the_near_one_and_a_site_of_several_uses_lists_them():
    def net(x):
        layer = hk.Linear(D)
        return layer(layer(x))

    target, batch = target_of(net, (activations(),))
    plan = target.plan(batch)
    for name, text in (
        ("linear/v", "no use matches 'linear/v'; did you mean 'linear' or 'linear/w@1' or 'linear/w@0'?"),
        ("linear/w", "'linear/w' has 2 uses; give each its mask: 'linear/w@0', 'linear/w@1'"),
    ):
        with pytest.raises(NoSuchSite) as caught:
            plan.masked(target.params, factors_of(plan.sites("*")), {name: {"mask": jnp.ones(C)}}, batch)
        assert str(caught.value) == text
    with pytest.raises(NoSuchSite, match=r"no use or named activation matches 'lineal'; did you mean 'linear'"):
        plan.clean(target.params, batch, taps=["lineal"])


def test_another_batch_or_other_parameters_than_planned_are_refused(planned):
    target, batch, plan = planned
    with pytest.raises(BatchMismatch) as caught:
        plan.clean(jax.tree.map(lambda a: a.astype(jnp.bfloat16), target.params), (*batch[:2], batch[2][:, :3]))
    assert str(caught.value) == (
        "parameters or batch differ from the plan\n"
        "  mlp/~/linear_0/b: bfloat16[16], the plan has float32[16]\n"
        "  mlp/~/linear_0/w: bfloat16[8,16], the plan has float32[8,16]\n"
        "  mlp/~/linear_1/b: bfloat16[4], the plan has float32[4]\n"
        "  mlp/~/linear_1/w: bfloat16[16,4], the plan has float32[16,4]\n"
        "  batch[2]: float32[2,3,8], the plan has float32[2,5,8]\n"
        "Make a plan for them with target.plan(batch)."
    )
    with pytest.raises(BatchMismatch, match=r"have the structure .*; make a plan for them with target.plan\(batch\)$"):
        plan.clean(target.params, batch[2])


def test_two_parameters_of_one_path_are_refused():
    params = {"a/b": {"c": jnp.ones((2, 2))}, "a": {"b/c": jnp.ones((2, 2))}}
    with pytest.raises(NameCollision) as caught:
        pdlib.Target(lambda p, x: x @ p["a"]["b/c"] @ p["a/b"]["c"], params).plan(jnp.ones((1, 2)))
    assert str(caught.value) == "several parameters would be the site a/b/c; rename a module or parameter"


def test_other_consumers_of_a_live_weight_are_listed():
    def net(x):
        w = weight("w", D, D)
        return x @ w, jnp.sum(w**2), w

    target, batch = target_of(net, (activations(),))
    site = target.plan(batch).sites("~/w")["~/w"]
    assert site.kind == "dot"
    assert site.also == ("integer_pow", "the output")
