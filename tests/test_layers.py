"""Who may import whom, who touches the disk, and who prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "pdlib").rglob("*.py"))

# room → rooms of pdlib that it may import, besides itself, `errors` and `tree`
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tree": set(),
    "items": set(),
    "store": {"items"},
    "method": {"items"},
    "targets": {"items", "method"},
    "run": {"items", "store", "method", "targets", "consumers"},
    "consumers": {"items", "store", "method"},
    "testing": {"items", "store"},
    "cli": {"items", "store", "method", "targets", "run", "consumers"},
    "__init__": {"items", "store", "targets", "consumers"},
    "__main__": {"cli"},
}
# consumers use what was trained, and nothing that trains
NOT_FOR_CONSUMERS = ("pdlib.run.loop", "pdlib.method.step", "pdlib.method.losses", "optax")
ON_DISK = {"store", "consumers", "cli", "testing"}
ON_DISK_MODULES = {"run/directory.py", "run/metrics.py", "run/loop.py", "run/spec.py", "items/contracts.py"}
DISK_CALLS = {
    "open", "write_text", "write_bytes", "read_text", "read_bytes", "mkdir", "unlink", "rename", "replace", "rmtree",
    "touch",
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "pdlib").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            yield function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_room_imports_only_what_it_may(path):
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pdlib" and len(parts) > 1:
            other = parts[1]
            assert other in MAY_IMPORT[room] | {room, "errors", "tree"}, f"{room} imports {name}"
        if room == "consumers":
            assert not name.startswith(NOT_FOR_CONSUMERS), f"{room} imports {name}"
        if room in ("items", "store", "consumers", "tree", "errors"):
            assert parts[0] not in ("optax", "haiku"), f"{room} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_some_rooms_touch_the_disk_and_only_the_command_line_prints(path):
    name = path.relative_to(ROOT / "pdlib").as_posix()
    used = set(calls(path))
    text_methods = {"replace"}  # also of strings and dataclasses
    if room_of(path) not in ON_DISK and name not in ON_DISK_MODULES:
        assert not used & (DISK_CALLS - text_methods), name
    if name not in ("cli.py", "run/progress.py"):
        assert not used & {"print", "echo"}, name


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in MODULES} == set(MAY_IMPORT)


def test_the_command_line_imports_each_room_when_it_needs_it():
    tree = ast.parse((ROOT / "pdlib" / "cli.py").read_text())
    top = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("pdlib")]
    assert top == ["pdlib.errors"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_module_opens_with_a_line_of_what_it_is_for(path):
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
