"""Contracts and the registry: what is declared, what is refused, and what is derived."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pdlib
from pdlib import ItemSpec, LeafSpec, Registry
from pdlib.errors import ContractError, ShardingRefused, SpecMismatch
from pdlib.items import contracts
from pdlib.items.contracts import default_registry, load_contract, read_contract, specs_dir
from pdlib.items.state import Decomposition, Factors, Site, TrainingItem, init_decomposition


def item(*rows: LeafSpec, name: str = "x", **fields: Any) -> ItemSpec:
    return ItemSpec(name=name, leaves=rows, **fields)


def registry_of(*rows: LeafSpec) -> Registry:
    return Registry((item(*rows),))


def problems(registry: Registry, **trees: Any) -> tuple[str, ...]:
    try:
        registry.check(trees)
    except SpecMismatch as error:
        return error.problems
    return ()


def no_parameters(*_: Any) -> dict[str, Any]:
    """An importance function that has none."""
    return {}


# Paths


@pytest.mark.parametrize(
    ("path", "keys", "captures"),
    [
        ("a/b", ("a", "b"), {}),
        ("a/b", ("a/b",), None),
        ("a/{x}", ("a", "layers.18/mlp"), {"x": "layers.18/mlp"}),
        ("{x}/{x}", ("a", "a"), {"x": "a"}),
        ("{x}/{x}", ("a", "b"), None),
        ("a*/b", ("abc", "b"), {}),
        ("a*c/b", ("abd", "b"), None),
        ("a.*", ("abc",), None),
        ("**", (), {}),
        ("**", ("a", "b"), {}),
        ("a/**/z", ("a", "z"), {}),
        ("a/**/z", ("a", "b", "c", "z"), {}),
        ("a/**/z", ("a", "b"), None),
        ("**/{x}/w", ("a", "b", "w"), {"x": "b"}),
    ],
)
def test_paths_match_keys_and_capture_them(path, keys, captures):
    assert LeafSpec(path=path).match(keys) == captures


# Refusals at construction


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: LeafSpec(path=""), "leaf row '': the path has an empty key; write keys joined by single slashes"),
        (
            lambda: LeafSpec(path="a//b"),
            "leaf row 'a//b': the path has an empty key; write keys joined by single slashes",
        ),
        (
            lambda: LeafSpec(path="a", dims=["C*2"]),
            "leaf row 'a': 'C*2' is no dimension; write a name, name+1, a size, _ or ...",
        ),
        (
            lambda: LeafSpec(path="a", dims=["...", "..."]),
            "leaf row 'a': `...` stands twice in dims; one `...` takes all the remaining dimensions",
        ),
        (
            lambda: LeafSpec(path="a", dims=["C"], shard={"D": "fsdp"}),
            "leaf row 'a': shard names 'D', which dims does not; name it in dims",
        ),
        (
            lambda: LeafSpec(path="a", dims=["C", "C"], shard={"C": "fsdp"}),
            "leaf row 'a': mesh axis 'fsdp' would split two dimensions; an axis splits one",
        ),
        (lambda: LeafSpec(path="a", like="x/y"), "leaf row 'a': a row with `like` ends in /** and names item/prefix"),
        (
            lambda: item(name="Params"),
            "item name 'Params': use lower-case letters, digits and _, beginning with a letter",
        ),
        (lambda: item(version=0), "item x: version 0 is not a whole number from 1 up"),
        (lambda: item(role="both"), "item x: role 'both'; write 'product' or 'process'"),
        (lambda: item(), "item x has no leaf row; LeafSpec(path='**') admits any tree"),
        (
            lambda: Registry((item(LeafSpec(path="**")), item(LeafSpec(path="a")))),
            "two items are named 'x'; an item's name is its directory, so it is unique",
        ),
        (
            lambda: registry_of(LeafSpec(path="m/**", like="y/a")),
            "item x, row 'm/**': like='y/a' names no item of ['x']",
        ),
        (lambda: Registry()["x"], "no item 'x' is registered; registered: none"),
        (
            lambda: load_contract("decompositon"),
            "no contract 'decompositon' with version any; did you mean 'decomposition'?",
        ),
        (lambda: load_contract("training", 9), "no contract 'training' with version 9; versions of training: [1]"),
    ],
)
def test_what_a_contract_cannot_say_is_refused(build, text):
    with pytest.raises(ContractError) as caught:
        build()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item = 'x'\nversion = 1", "'role' is missing"),
        (
            "item = 'x'\nversion = 1\nrole = 'product'\nleaves = 1",
            "unknown key 'leaves'; known: change, item, leaf, role, version",
        ),
        (
            "item = 'x'\nversion = 1\nrole = 'product'\n[[leaf]]\npath = 'a'\nshape = [1]",
            "unknown key 'shape'; known: dims, dtype, like, optional, path, shard",
        ),
        ("item = ", "Invalid value"),
        ("item = 'x'\nversion = 1\nrole = 'product'\n[[leaf]]\ndtype = 'int8'", "path"),
    ],
)
def test_a_malformed_contract_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "x.v1.toml"
    path.write_text(text)
    with pytest.raises(ContractError) as caught:
        read_contract(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_contract_that_was_changed_after_it_was_pinned_is_refused(tmp_path, monkeypatch):
    changed = tmp_path / "specs"
    shutil.copytree(specs_dir(), changed)
    file = changed / "items" / "decomposition.v1.toml"
    monkeypatch.setattr(contracts, "specs_dir", lambda: changed)
    file.write_text("# a comment more\n" + file.read_text())
    assert load_contract("decomposition") == default_registry()["decomposition"]
    file.write_text(file.read_text().replace('"d_out"', '"width"'))
    with pytest.raises(ContractError) as caught:
        load_contract("decomposition")
    assert "the catalog pins" in str(caught.value)
    assert str(caught.value).endswith("restore the file, and add a new version beside it.")


def test_every_contract_file_is_pinned_and_every_pin_has_its_file():
    files = {path.stem for path in (specs_dir() / "items").glob("*.toml")}
    pinned = set(contracts._catalog()["items"])  # pyright: ignore
    assert files == pinned
    for key in files:
        name, _, version = key.rpartition(".v")
        spec = load_contract(name, int(version))
        assert (spec.name, spec.version) == (name, int(version))


# Checking


def decomposition(C: int = 16) -> Decomposition:
    sites = {"mlp": Site(64, 32, C), "out": Site(32, 10, 8)}
    return init_decomposition(jax.random.key(0), sites, lambda *_: {"net/~/a": {"w": jnp.zeros((3, 4))}})


def training(product: Decomposition) -> TrainingItem:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 9)))
    sources = {site: jnp.zeros((1, 5, f.V.shape[1] + 1)) for site, f in product.components.items()}
    adversaries = {"ppgd": {"sources": sources, "m": sources, "v": sources, "count": jnp.float32(0)}}
    return TrainingItem(optimizer.init(product.components), optimizer.init(product.ci_fn), adversaries, jnp.int32(0))


def test_the_trees_of_parameter_decomposition_fit_their_contracts():
    product = decomposition()
    default_registry().check({"decomposition": product, "training": training(product)})
    default_registry().check({"training": training(product)})
    default_registry().check(jax.eval_shape(lambda: {"decomposition": product, "training": training(product)}))


def test_every_difference_is_reported_at_once_with_who_bound_what():
    product = decomposition()
    bad = product._replace(
        components={
            "mlp": product.components["mlp"]._replace(V=jnp.zeros((64, 8))),
            "out": Factors(product.components["out"].V, product.components["out"].U.astype(jnp.bfloat16)),
            "half": {"V": jnp.zeros((2, 2))},
            "more": {"V": jnp.zeros((2, 2)), "U": jnp.zeros(2), "W": jnp.zeros(1)},
        }
    )
    with pytest.raises(SpecMismatch) as caught:
        default_registry().check({"decomposition": bad})
    assert str(caught.value) == (
        "decomposition v1: 5 of 9 leaves differ\n"
        "  components/mlp/V  shape (64, 8), want (d_in=64, C=16); C bound by components/mlp/U\n"
        "  components/more/U  shape (2,), want (C, d_out)\n"
        "  components/more/W  is registered by no row of decomposition v1\n"
        "  components/out/U  dtype bfloat16, want float32\n"
        "  components/half/U  is missing; components/half/V is there\n"
        "Mend the tree, or register a contract that admits it."
    )


def test_a_dimension_shared_by_two_items_is_one():
    product, process = decomposition(16), training(decomposition(12))
    found = problems(default_registry(), decomposition=product, training=process)
    text = "\n".join(found)
    for path in ("components_opt_state/1/0/mu/mlp/V", "adversaries/ppgd/sources/mlp", "adversaries/ppgd/v/mlp"):
        assert f"training:{path}" in text
    assert (
        "training:adversaries/ppgd/sources/mlp  shape (1, 5, 13), want (1, 5, C+1=17); "
        "C bound by decomposition:components/mlp/U"
    ) in found
    assert "/out" not in text  # its C is another


def test_moments_without_their_parameter_or_of_another_shape_are_found():
    product = decomposition()
    process = training(product)
    less = product._replace(ci_fn={"net/~/a": {"w": jnp.zeros((3, 5))}}, components={"mlp": product.components["mlp"]})
    found = problems(default_registry(), decomposition=less, training=process)
    assert (
        "training:ci_fn_opt_state/1/0/mu/net/~/a/w  shape (3, 4), want (3, 5) like decomposition:ci_fn/net/~/a/w"
        in found
    )
    assert (
        "training:components_opt_state/1/0/mu/out/V  repeats decomposition:components/out/V, which is not there"
        in found
    )


def test_dims_of_every_kind():
    registry = registry_of(
        LeafSpec(path="fixed", dims=["3", "_"], optional=True),
        LeafSpec(path="rest", dims=["n", "...", "n-1"], optional=True),
        LeafSpec(path="scalar", dims=[], optional=True),
        LeafSpec(path="square", dims=["k", "k"], optional=True),
    )
    good = {
        "fixed": jnp.ones((3, 9)),
        "rest": jnp.ones((4, 1, 1, 3)),
        "scalar": jnp.ones(()),
        "square": jnp.ones((2, 2)),
    }
    assert problems(registry, x=good) == ()
    bad = {"fixed": jnp.ones((2, 9)), "rest": jnp.ones((4, 4)), "scalar": jnp.ones(1), "square": jnp.ones((2, 3))}
    assert problems(registry, x=bad) == (
        "fixed  shape (2, 9), want (3, 9)",
        "rest  shape (4, 4), want (n=4, n-1=3); n stands twice",
        "scalar  shape (1,), want ()",
        "square  shape (2, 3), want (k=2, k=2); k stands twice",
    )


def test_a_name_is_one_size_for_the_captures_that_all_its_rows_share():
    rows = [LeafSpec(path="{m}/w", dims=["i", "o"]), LeafSpec(path="{m}/b", dims=["o"])]
    tree = {"a": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "c": {"w": jnp.ones((5, 7)), "b": jnp.ones(7)}}
    assert problems(registry_of(*rows), x=tree) == ()
    shared = [*rows, LeafSpec(path="width", dims=["o"])]
    found = problems(registry_of(*shared), x={**tree, "width": jnp.ones(3)})
    assert found == (
        "c/b  shape (7,), want (o=3,); o bound by a/b",
        "c/w  shape (5, 7), want (i=5, o=3); o bound by a/b",
    )


def test_dtypes_alternatives_and_keys():
    registry = registry_of(LeafSpec(path="f", dtype=["float32", "bfloat16"]), LeafSpec(path="k", dtype="key"))
    key = jax.random.key(0)
    assert problems(registry, x={"f": jnp.ones(1, jnp.bfloat16), "k": key}) == ()
    assert problems(registry, x={"f": jnp.ones(1, jnp.float16), "k": jax.random.key_data(key)}) == (
        "f  dtype float16, want float32 or bfloat16",
        "k  dtype uint32, want key",
    )


def test_a_missing_required_leaf_is_found_and_an_optional_one_is_not():
    registry = registry_of(LeafSpec(path="w"), LeafSpec(path="ema", optional=True))
    assert problems(registry, x={"w": jnp.ones(1)}) == ()
    assert problems(registry, x={"ema": jnp.ones(1)}) == ("w  is missing",)


def test_any_tree_is_admitted_by_one_row():
    registry = registry_of(LeafSpec(path="**"))
    for tree in ({}, jnp.ones(1), [1, (2.0, None)], {"a": {"b": np.ones(2)}}):
        assert problems(registry, x=tree) == ()


def test_a_registry_is_immutable_and_grows_into_another():
    first = registry_of(LeafSpec(path="a"))
    second = first.with_item(item(LeafSpec(path="b"), name="y")).with_item(item(LeafSpec(path="c")))
    assert first.names == ("x",)
    assert second.names == ("y", "x")
    assert second["x"].leaves[0].path == "c"
    with pytest.raises(AttributeError):
        first.items = ()  # pyright: ignore
    with pytest.raises(AttributeError):
        first["x"].leaves[0].path = "b"  # pyright: ignore


# What is derived


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_abstract_trees_carry_the_contracts_shardings(mesh_of, count):
    mesh, product = mesh_of(count), decomposition()
    twin = default_registry().abstract("decomposition", product, mesh)
    assert jax.tree.structure(twin) == jax.tree.structure(product)
    assert twin.components["mlp"].V.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    assert twin.components["mlp"].U.sharding == NamedSharding(mesh, PartitionSpec("fsdp", None))
    assert twin.ci_fn["net/~/a"]["w"].sharding == NamedSharding(mesh, PartitionSpec(None, None))
    process = default_registry().abstract("training", training(product), mesh)
    assert process.components_opt_state[1][0].nu["mlp"].U.sharding == NamedSharding(mesh, PartitionSpec("fsdp", None))
    other = default_registry().abstract("decomposition", product, mesh_of(count, "data"))
    assert other.components["mlp"].V.sharding.spec == PartitionSpec(None, None)
    assert default_registry().abstract("decomposition", product).components["mlp"].V.sharding is None


def test_an_axis_that_does_not_divide_is_refused(mesh_of):
    with pytest.raises(
        ShardingRefused, match=r"components/out/V: mesh axis fsdp of size 3 does not divide dimension 1 of size 8"
    ):
        default_registry().abstract("decomposition", decomposition(C=6), mesh_of(3))


def test_one_dimension_over_two_axes(devices):
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    registry = registry_of(LeafSpec(path="w", dims=["n", "m"], shard={"n": ["a", "b"]}))
    twin = registry.abstract("x", {"w": jnp.ones((8, 3))}, mesh)
    assert twin["w"].sharding.spec == PartitionSpec(("a", "b"), None)


def test_the_ledger_counts_bytes():
    product = decomposition()
    expected = sum(leaf.nbytes for leaf in jax.tree.leaves(product))
    assert default_registry().ledger({"decomposition": product}) == {"decomposition": expected}
    assert default_registry().ledger({"decomposition": jax.eval_shape(lambda: product)}) == {"decomposition": expected}


def test_the_table_has_a_line_a_row():
    lines = default_registry().table().splitlines()
    assert lines[2] == "| decomposition v1 | product | `components/{site}/V` | `[d_in, C]` | float32 | C over fsdp |"
    assert len(lines) == 2 + sum(len(spec.leaves) for spec in default_registry().items)


def test_initialisation_depends_on_names_and_not_on_order():
    sites = {"a": Site(4, 3, 8), "b": Site(4, 3, 8)}
    first = init_decomposition(jax.random.key(1), sites, no_parameters)
    second = init_decomposition(jax.random.key(1), {"c": Site(2, 2, 2), **dict(reversed(sites.items()))}, no_parameters)
    for site in sites:
        np.testing.assert_array_equal(first.components[site].V, second.components[site].V)
    big = init_decomposition(jax.random.key(1), {"s": Site(400, 300, 900)}, no_parameters).components["s"]
    assert abs(float(jnp.std(big.V)) * 400**0.5 - 1) < 0.02
    assert abs(float(jnp.std(big.U)) * 900**0.5 - 1) < 0.02


def test_the_8b_product_is_described_without_being_allocated():
    sites = {"gate": Site(4096, 14336, 24576), "up": Site(4096, 14336, 24576), "down": Site(14336, 4096, 24576)}
    live = sum(x.nbytes for x in jax.live_arrays())
    product = jax.eval_shape(lambda: init_decomposition(jax.random.key(0), sites, no_parameters))
    assert default_registry().ledger({"decomposition": product}) == {"decomposition": 3 * 4 * 24576 * (4096 + 14336)}
    assert sum(x.nbytes for x in jax.live_arrays()) - live < 1 << 20


def test_specs_are_data_only():
    assert [path for path in Path(specs_dir()).rglob("*") if path.is_file() and path.suffix != ".toml"] == []
    assert pdlib.load_contract("decomposition").role == "product"
    assert pdlib.load_contract("training").role == "process"
