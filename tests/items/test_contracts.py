"""What a contract may say: an impossible row is refused where it is written, with the whole text; no field is dead."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdlib import ItemSpec, LeafSpec, Registry
from pdlib.errors import ContractError, ShardingRefused, SpecMismatch
from pdlib.items.contracts import default_registry, load_contract, read_contract, specs_dir
from pdlib.items.specs import Change

HEAD = "item = 'x'\nversion = 1\nrole = 'product'\n"


def row(text: str) -> str:
    return f"{HEAD}[[leaf]]\n{text}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item = 'x'\nversion = 1", "'role' is missing"),
        ("version = 1\nrole = 'product'", "'item' is missing"),
        ("item = 'x'\nrole = 'product'", "'version' is missing"),
        (HEAD + "leaves = 1", "unknown key 'leaves'; known: change, item, leaf, role, version"),
        (row("path = 'a'\nshape = [1]"), "unknown key 'shape'; known: dims, dtype, like, optional, path, shard"),
        (HEAD + "leaf = 3", "leaf = 3; write each leaf row as a table [[leaf]]"),
        (HEAD + "leaf = [3]", "leaf = [3]; write each leaf row as a table [[leaf]]"),
        (HEAD + "leaf = {path = 'a'}", "leaf = {'path': 'a'}; write each leaf row as a table [[leaf]]"),
        (HEAD, "item x has no leaf row; LeafSpec(path='**') admits any tree"),
        (row("path = 3"), "leaf row 3: path=3; write keys joined by slashes, as text"),
        (row("path = 'a'\ndims = 'd_in'"), "leaf row 'a': dims='d_in'; write a list of dimensions, or leave it out"),
        (row("path = 'a'\ndims = 3"), "leaf row 'a': dims=3; write a list of dimensions, or leave it out"),
        (row("path = 'a'\ndims = [true]"), "leaf row 'a': dims=[True]; write a list of dimensions, or leave it out"),
        (row("path = 'a'\ndtype = 3"), "leaf row 'a': dtype=3; write a dtype name, or a list of them"),
        (row("path = 'a'\ndtype = [3]"), "leaf row 'a': dtype=[3]; write a dtype name, or a list of them"),
        (row("path = 'a'\noptional = 'no'"), "leaf row 'a': optional='no'; write true or false"),
        (row("path = 'a'\nshard = 3"), "leaf row 'a': shard=3; write dimension = mesh axis, or a list of axes"),
        (
            row("path = 'a'\ndims = ['C']\nshard = { C = 3 }"),
            "leaf row 'a': shard={'C': 3}; write dimension = mesh axis, or a list of axes",
        ),
        (row("path = 'a/**'\nlike = 3"), "leaf row 'a/**': like=3; write item/prefix, as text"),
        (HEAD.replace("1", "'1'") + "[[leaf]]\npath = 'a'", "item x: version '1' is not a whole number from 1 up"),
        (HEAD.replace("1", "1.5") + "[[leaf]]\npath = 'a'", "item x: version 1.5 is not a whole number from 1 up"),
        (HEAD.replace("1", "true") + "[[leaf]]\npath = 'a'", "item x: version True is not a whole number from 1 up"),
        (
            HEAD.replace("'x'", "3") + "[[leaf]]\npath = 'a'",
            "item name 3: use lower-case letters, digits and _, beginning with a letter",
        ),
        (HEAD.replace("product", "both") + "[[leaf]]\npath = 'a'", "item x: role 'both'; write 'product' or 'process'"),
    ],
)
def test_a_contract_file_that_says_something_impossible_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "x.v1.toml"
    path.write_text(text)
    with pytest.raises(ContractError) as caught:
        read_contract(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("content", [None, b"item = ", b"\xff\xfe"])
def test_a_file_that_is_no_contract_at_all_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.v1.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError) as caught:
        read_contract(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("; a contract is a UTF-8 TOML file")


@pytest.mark.parametrize("key", ["{", "{a", "a}", "{}", "x{a}", "{a}x", "{a b}", "{1}"])
def test_a_key_that_looks_like_a_capture_and_is_none_is_refused(key):
    with pytest.raises(ContractError) as caught:
        LeafSpec(path=f"a/{key}/b")
    assert str(caught.value) == f"leaf row 'a/{key}/b': {key!r} captures nothing; write {{name}} for one whole key"


@pytest.mark.parametrize("dtype", ["flaot32", "float33", "f4", "<f4", "object", "str", "", "int1", "datetime64"])
def test_a_dtype_that_does_not_exist_is_refused(dtype):
    with pytest.raises(ContractError) as caught:
        LeafSpec(path="a", dtype=["float32", dtype])
    assert str(caught.value) == f"leaf row 'a': {dtype!r} is no dtype; write a name such as float32, or key"


def test_every_dtype_that_can_be_stored_can_be_named():
    from pdlib.store.snapshot import ZARR_NAMES

    for dtype in (*ZARR_NAMES, "uint2", "uint4", "key", "key<fry>", "key<rbg>"):
        assert LeafSpec(path="a", dtype=dtype).dtypes == (dtype,)


@pytest.mark.parametrize("dim", ["", "C*2", "1C", "-1", "C+", "C+D", "....", "..", "__x", " C", "C\n"])
def test_an_entry_that_is_no_dimension_is_refused(dim):
    with pytest.raises(ContractError) as caught:
        LeafSpec(path="a", dims=["C", dim])
    assert str(caught.value) == f"leaf row 'a': {dim!r} is no dimension; write a name, name+1, a size, _ or ..."


def test_a_row_that_is_no_row_is_refused():
    with pytest.raises(ContractError) as caught:
        ItemSpec(name="x", leaves=["a/b"])  # pyright: ignore
    assert str(caught.value) == "item x: leaf row 'a/b' is a str; write a LeafSpec"


@pytest.mark.parametrize(
    ("likes", "circle"),
    [
        ({"x": [("a/**", "y/b")], "y": [("b/**", "x/a")]}, "x:a/** → y:b/** → x:a/**"),
        ({"x": [("a/**", "x/a")]}, "x:a/** → x:a/**"),
        ({"x": [("a/**", "x/a/deeper")]}, "x:a/** → x:a/**"),
        ({"x": [("{m}/**", "x/b")]}, "x:{m}/** → x:{m}/**"),
        ({"x": [("a/**", "x/b"), ("b/**", "x/c"), ("c/**", "x/b")]}, "x:a/** → x:b/** → x:c/** → x:b/**"),
    ],
)
def test_rows_that_repeat_each_other_in_a_circle_are_refused(likes, circle):
    items = [ItemSpec(name=n, leaves=[LeafSpec(path=p, like=k) for p, k in rows]) for n, rows in likes.items()]
    with pytest.raises(ContractError) as caught:
        Registry(tuple(items))
    assert str(caught.value) == (
        f"rows repeat each other in a circle: {circle}; let one of them say what the leaves are"
    )


def test_a_chain_of_rows_that_repeat_is_followed_to_its_end():
    leaves = [
        LeafSpec(path="params/{m}/{p}", dims=["n", "k"], dtype="float32", shard={"k": "fsdp"}),
        LeafSpec(path="mu/**", like="x/params"),
        LeafSpec(path="ema/**", like="x/mu", dtype="bfloat16"),
    ]
    registry = Registry((ItemSpec(name="x", leaves=leaves),))

    def tree(width: int, dtype: Any) -> dict[str, Any]:
        return {
            "params": {"m": {"w": jnp.ones((2, 4))}},
            "mu": {"m": {"w": jnp.ones((2, 4))}},
            "ema": {"m": {"w": jnp.ones((2, width), dtype)}},
        }

    registry.check({"x": tree(4, jnp.bfloat16)})
    with pytest.raises(SpecMismatch, match="ema/m/w  dtype float32, want bfloat16"):
        registry.check({"x": tree(4, jnp.float32)})
    with pytest.raises(SpecMismatch) as caught:
        registry.check({"x": tree(5, jnp.bfloat16)})
    assert caught.value.problems == ("ema/m/w  shape (2, 5), want (n=2, k=4); k bound by params/m/w",)
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    assert registry.sharding("x", ("ema", "m", "w"), (2, 4), mesh).spec == PartitionSpec(None, "fsdp")


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_a_copy_is_blamed_and_not_what_it_repeats(order):
    registry = Registry(
        (
            ItemSpec(name="x", leaves=[LeafSpec(path="z/{m}", dims=["n"])]),
            ItemSpec(name="y", leaves=[LeafSpec(path="a/**", like="x/z")]),
        )
    )
    trees = {"x": {"z": {"m": jnp.ones(3)}}, "y": {"a": {"m": jnp.ones(4)}}}
    with pytest.raises(SpecMismatch) as caught:
        registry.check({name: trees[name] for name in order})
    assert caught.value.problems == ("y:a/m  shape (4,), want (n=3,); n bound by x:z/m",)


def test_missing_leaves_are_listed_in_one_order_with_the_first_witness():
    rows = [LeafSpec(path=f"{{m}}/{key}") for key in "pqrs"]
    tree = {m: {"q": jnp.ones(1), "r": jnp.ones(1)} for m in "edcba"}
    with pytest.raises(SpecMismatch) as caught:
        Registry((ItemSpec(name="x", leaves=rows),)).check({"x": tree})
    assert caught.value.problems == tuple(f"{m}/{k}  is missing; {m}/q is there" for k in "ps" for m in "abcde")


def test_two_leaves_whose_keys_read_alike_are_both_reported():
    tree = {"a": 1, "b": OrderedDict([(1, 1), ("1", 2)])}
    with pytest.raises(SpecMismatch) as caught:
        Registry((ItemSpec(name="x", leaves=[LeafSpec(path="a")]),)).check({"x": tree})
    assert caught.value.problems == ("b/1  is registered by no row of x v1",) * 2


# No dead knobs


def behaviour(registry: Registry) -> list[Any]:
    """All that a registry does with a few trees of an item x and of an item y."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    found: list[Any] = [registry.names, registry.table()]
    found += [item.moved(("a", "s", "b"), version=1) for item in registry.items]
    trees = [
        {"x": {"a": {"s": {key: jnp.ones(shape, dtype), "z": jnp.ones((2, 4))}}}}
        for key in ("b", "c")
        for dtype in (jnp.float32, jnp.int8)
        for shape in ((2, 4), (4, 2))
    ]
    for tree in [*trees, {"x": {"a": {"s": {"z": jnp.ones((2, 4))}}}}, {"x": {}}]:
        try:
            registry.check(tree)
            found.append("fits")
        except (SpecMismatch, ContractError) as error:
            found.append(str(error))
    try:
        found.append(registry.sharding("x", ("a", "s", "b"), (2, 4), mesh).spec)
    except (ContractError, ShardingRefused) as error:
        found.append(str(error))
    return found


LEAF_CHANGES: dict[str, Any] = {
    "path": "a/{s}/c",
    "dims": ["D", "C"],
    "dtype": "int8",
    "shard": {"D": "fsdp"},
    "optional": True,
    "like": "y/a",
}
ITEM_CHANGES: dict[str, Any] = {
    "name": "w",
    "version": 3,
    "role": "process",
    "changes": [Change(before=2, path="a/{s}/b", to="a/{s}/c")],
    "leaves": [LeafSpec(path="**")],
}


def registry_with(leaf: dict[str, Any], item: dict[str, Any]) -> Registry:
    base: dict[str, Any] = {"path": "a/{s}/b", "dims": ["C", "D"], "dtype": "float32", "shard": {"C": "fsdp"}}
    if "like" in leaf:
        base = {"path": "a/**"}
    rows = [LeafSpec(**{**base, **leaf}), LeafSpec(path="a/{s}/z")]
    one = ItemSpec(**{"name": "x", "version": 2, "role": "product", "leaves": rows, **item})
    return Registry((one, ItemSpec(name="y", leaves=[LeafSpec(path="a/{p}/{q}", dims=["4", "2"])])))


def test_every_field_of_a_row_has_a_change():
    assert LEAF_CHANGES.keys() == {field.name for field in dataclasses.fields(LeafSpec)}


@pytest.mark.parametrize(("field", "value"), [*LEAF_CHANGES.items(), ("dtype", None), ("dims", ["C", "3"])])
def test_every_field_of_a_row_changes_the_digest_and_what_is_done(field, value):
    plain = {"like": None, "path": "a/**"} if field == "like" else {}
    first, second = registry_with(plain, {}), registry_with({**plain, field: value}, {})
    assert first["x"].digest != second["x"].digest
    without_table = [[part for part in behaviour(r) if "|---|" not in str(part)] for r in (first, second)]
    assert without_table[0] != without_table[1]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ItemSpec)])
def test_every_field_of_an_item_changes_the_digest_and_what_is_done(field):
    first, second = registry_with({}, {}), registry_with({}, {field: ITEM_CHANGES[field]})
    assert first.items[0].digest != second.items[0].digest
    assert behaviour(first) != behaviour(second)


# Digests


def test_a_digest_is_of_what_is_said_and_not_of_how_it_is_written(tmp_path):
    texts = [
        row("path = 'a'\ndims = ['3', 'C']\ndtype = 'int8'\nshard = { C = 'fsdp' }\noptional = false"),
        "# a comment\nrole = 'product'\nversion = 1\nitem = 'x'\n\n[[leaf]]\n"
        "shard = { C = ['fsdp'] }\ndtype = ['int8']\npath = \"a\"\ndims = [3, 'C']\n",
    ]
    specs = []
    for text in texts:
        (tmp_path / "x.v1.toml").write_text(text)
        specs.append(read_contract(tmp_path / "x.v1.toml"))
    written = LeafSpec(path="a", dims=("3", "C"), dtype="int8", shard={"C": "fsdp"})
    specs.append(ItemSpec(name="x", leaves=(written,)))
    assert len({spec.digest for spec in specs}) == 1
    assert specs[0] == specs[1] == specs[2]
    assert hash(specs[0].leaves[0]) == hash(written)


def test_the_order_of_rows_is_part_of_a_contract():
    rows = [LeafSpec(path="a/{x}", dtype="int8"), LeafSpec(path="a/b")]
    assert ItemSpec(name="x", leaves=rows).digest != ItemSpec(name="x", leaves=rows[::-1]).digest


@pytest.mark.parametrize("name", ["decomposition", "training"])
def test_pdlib_s_own_files_say_what_their_parsed_rows_say(name):
    spec = load_contract(name)
    again = ItemSpec(
        name=spec.name, version=spec.version, role=spec.role, leaves=[LeafSpec(**r) for r in spec.as_dict()["leaf"]]
    )
    assert again == spec
    assert again.digest == spec.digest == read_contract(specs_dir() / "items" / f"{name}.v1.toml").digest


# Derived arguments


def test_python_numbers_stay_what_they_are_in_what_is_derived(tmp_path):
    registry = Registry((ItemSpec(name="x", leaves=[LeafSpec(path="**")]),))
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    tree = {"w": jnp.arange(4.0), "epoch": 3, "lr": 0.5}
    twin = registry.abstract("x", tree, mesh)
    assert (twin["epoch"], twin["lr"]) == (3, 0.5)
    assert twin["w"].sharding == NamedSharding(mesh, PartitionSpec(None))
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    handler.save(tmp_path / "own", args=ocp.args.PyTreeSave(tree, save_args=registry.save_args("x", tree)))
    asked = ocp.args.PyTreeRestore(item=twin, restore_args=registry.restore_args("x", tree, mesh))
    back = handler.restore(tmp_path / "own", args=asked)
    assert (back["epoch"], back["lr"], type(back["epoch"]), type(back["lr"])) == (3, 0.5, int, float)
    assert back["w"].sharding == twin["w"].sharding
    assert registry.ledger({"x": tree}) == {"x": 4 * 4 + 8 + 8}


def test_the_table_shows_every_kind_of_row():
    rows = [
        LeafSpec(path="a", dims=["n", "m"], dtype=["float32", "bfloat16"], shard={"n": ["x", "y"], "m": "z"}),
        LeafSpec(path="b/**", like="i/a", optional=True),
        LeafSpec(path="**"),
    ]
    assert Registry((ItemSpec(name="i", version=3, role="process", leaves=rows),)).table().splitlines()[2:] == [
        "| i v3 | process | `a` | `[n, m]` | float32 or bfloat16 | n over x×y, m over z |",
        "| i v3 | process | `b/**` (optional) | like `i/a` | like `i/a` | – |",
        "| i v3 | process | `**` | any | any | – |",
    ]
    assert len(default_registry().table().splitlines()) == 2 + sum(len(i.leaves) for i in default_registry().items)
