"""Who may import whom and what, who touches the disk, and who prints: tables, held to the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pdlib"
MODULES = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())

# room → rooms of pdlib that it may import, besides itself, `errors` and `tree`
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tree": set(),
    "items": set(),
    "store": {"items"},
    "rewrite": {"items"},
    "method": {"items", "rewrite"},
    "targets": {"items", "rewrite", "method"},
    "run": {"items", "store", "rewrite", "method", "targets", "consumers"},
    "consumers": {"items", "store", "method"},
    "testing": {"items", "store"},
    "cli": {"items", "store", "rewrite", "method", "targets", "run", "consumers"},
    "__init__": {"items", "store", "targets", "consumers"},
    "__main__": {"cli"},
}
# of the method, consumers use what applies and judges a decomposition, and nothing that trains one
# a target says by which loss it is judged, and knows nothing else of the method
METHOD_FOR = {
    "consumers": {"pdlib.method.importance", "pdlib.method.truth"},
    "targets": {"pdlib.method.losses"},
}
# packages of others → rooms or modules that may import them; whatever is not here is free to all
ONLY_IN: dict[str, set[str]] = {
    "optax": {"method/optimizers.py", "targets/pretrain.py", "targets/resid_mlp.py"},
    "haiku": {"method", "targets"},
    "orbax": {"store", "items/registry.py"},
    "tensorstore": {"store/zarr.py"},
    "hypothesis": {"testing.py"},
    "matplotlib": {"consumers/plots.py"},
    "pydantic": {"run/tables.py", "run/spec.py"},
    "tomli_w": {"run/spec.py"},
    "rich": {"run/progress.py", "cli.py"},
    "typer": {"cli.py"},
    "chex": set(),
    "beartype": set(),
    "pytest": set(),
}
# the parts of JAX that may change between its releases, and the one module of the rewrite that leans on them
JAX_INTERNALS = ("jax.extend", "jax._src", "jax.interpreters")
LEANS_ON_INTERNALS = {"rewrite/jaxpr.py"}
READS = {"store", "consumers/open.py", "run/directory.py", "run/metrics.py", "run/spec.py", "items/contracts.py",
         "items/layouts.py", "consumers/card.py", "consumers/diff.py", "consumers/export.py", "consumers/imports.py",
         "consumers/tensors.py", "targets/llama.py"}  # fmt: skip
WRITES = {
    "store/files.py", "store/remote.py", "store/commit.py", "store/consolidate.py", "store/convert.py", "store/lock.py",
    "store/migrate.py", "store/checkpoint.py", "run/directory.py", "run/metrics.py", "run/loop.py",
    "consumers/imports.py", "consumers/plots.py", "testing.py",
}  # fmt: skip
PRINTS = {"cli.py", "run/progress.py"}
LAZY = {"__init__.py", "store/__init__.py"}  # import by name, each checked below

READ_CALLS = {"read_text", "read_bytes", "memmap", "preadv", "iterdir", "rglob", "glob", "stat", "update_mmap"}
WRITE_CALLS = {
    "write_text", "write_bytes", "mkdir", "touch", "unlink", "rename", "rmdir", "rmtree", "symlink_to", "hardlink_to",
    "chmod", "savefig", "TemporaryDirectory", "tofile", "savez", "fsync",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0].removesuffix(".py")


def is_in(path: Path, places: set[str]) -> bool:
    return name_of(path) in places or room_of(path) in places


def imports(path: Path) -> Iterator[str]:
    """Every import of a module, those inside functions too, as `package.module.name`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, by the last part of the name of what is called."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.id if isinstance(function, ast.Name) else getattr(function, "attr", ""), node


def touches(source: str) -> set[str]:
    """`read` and `write`, as far as a module's own calls do that to files."""
    found: set[str] = set()
    for name, call in calls(source):
        replaces_path = name == "replace" and len(call.args) == 1 and not call.keywords  # of strings it takes two
        if name in WRITE_CALLS or replaces_path or ast.unparse(call.func) == "os.write":
            found.add("write")
        if name in READ_CALLS:
            found.add("read")
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [node.value for node in given if isinstance(node, ast.Constant) and type(node.value) is str]
        if ast.unparse(call.func) in ("open", "os.open") or (name == "open" and modes):
            writes = "O_WRONLY" in ast.unparse(call) or set("wax+") & set("".join(modes[-1:]))
            found.add("write" if writes else "read")
    return found


@each_module
def test_each_room_imports_only_what_it_may(path):
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pdlib":
            assert len(parts) > 1, "import pdlib: import the room, so that this test sees which"
            assert parts[1] in MAY_IMPORT[room] | {room, "errors", "tree"}, f"{room} imports {name}"
        if room in METHOD_FOR and name.startswith("pdlib.method"):
            assert ".".join(parts[:3]) in METHOD_FOR[room], f"{room} imports {name}"
        assert parts[0] not in ONLY_IN or is_in(path, ONLY_IN[parts[0]]), f"{name_of(path)} imports {name}"


def test_one_module_leans_on_the_internals_of_jax():
    found = {name_of(path) for path in MODULES for name in imports(path) if name.startswith(JAX_INTERNALS)}
    assert found == LEANS_ON_INTERNALS


@each_module
def test_nothing_imports_by_name_but_the_lazy_packages(path):
    used = {name for name, _ in calls(path.read_text("utf-8"))}
    assert name_of(path) in LAZY or not used & {"import_module", "__import__"}


@pytest.mark.parametrize("lazy", sorted(LAZY))
def test_lazy_names_come_from_rooms_that_may_be_imported(lazy):
    tree = ast.parse((PACKAGE / lazy).read_text("utf-8"))
    (homes,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and "_HOMES" in ast.unparse(node))
    for name, home in ast.literal_eval(homes).items():
        if lazy == "__init__.py":
            assert home.split(".")[1] in MAY_IMPORT["__init__"] | {"errors"}, name
        else:
            assert (PACKAGE / "store" / f"{home}.py").exists(), name


@each_module
def test_only_some_rooms_touch_the_disk(path):
    found = touches(path.read_text("utf-8"))
    assert "read" not in found or is_in(path, READS), f"{name_of(path)} reads files"
    assert "write" not in found or is_in(path, WRITES), f"{name_of(path)} writes files"


def test_what_counts_as_touching_the_disk():
    for source in (
        "p.write_text('')",
        "a.replace(b)",
        "open(p, 'w')",
        "p.open('a', encoding='utf-8')",
        "os.open(p, os.O_WRONLY)",
    ):
        assert touches(source) == {"write"}, source
    for source in ("p.read_bytes()", "open(p)", "p.open('r')", "os.open(p, os.O_RDONLY)", "np.memmap(p)"):
        assert touches(source) == {"read"}, source
    for source in ("'a'.replace('b', 'c')", "replace(leaf, chunks=None)", "manager.open(0, name)", "f.write('')"):
        assert touches(source) == set(), source


@each_module
def test_only_the_command_line_prints(path):
    used = {name for name, _ in calls(path.read_text("utf-8"))}
    assert not used & {"print", "echo"} or name_of(path) in PRINTS
    assert "sys.stdout" not in path.read_text("utf-8")


def test_the_tables_name_what_is_there():
    assert {room_of(path) for path in MODULES} == set(MAY_IMPORT)
    known = {name_of(path) for path in MODULES} | set(MAY_IMPORT)
    for place in {*READS, *WRITES, *PRINTS, *LAZY, *(place for places in ONLY_IN.values() for place in places)}:
        assert place in known, place
    writing = {name_of(path) for path in MODULES if "write" in touches(path.read_text("utf-8"))}
    assert writing == WRITES
    for package, places in ONLY_IN.items():
        users = [path for path in MODULES if any(name.split(".")[0] == package for name in imports(path))]
        for place in places:
            assert any(is_in(path, {place}) for path in users), f"{place} does not import {package}"


def test_the_command_line_imports_each_room_when_it_needs_it():
    tree = ast.parse((PACKAGE / "cli.py").read_text("utf-8"))
    top = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("pdlib")]
    assert top == ["pdlib.errors"]


@each_module
def test_each_module_opens_with_a_line_of_what_it_is_for(path):
    assert (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()
