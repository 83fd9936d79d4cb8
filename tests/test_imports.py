"""What importing pdlib costs, and that its public names are what its documents say."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdlib
import pdlib.store

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    "jax", "jaxlib", "numpy", "orbax", "tensorstore", "haiku", "optax", "matplotlib", "pydantic", "rich", "typer",
    "scipy",
)  # fmt: skip


def loaded_by(code: str) -> set[str]:
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "code", ["import pdlib", "import pdlib.errors", "import pdlib.store", "import pdlib; pdlib.PdlibError; dir(pdlib)"]
)
def test_importing_pdlib_loads_nothing_heavy(code):
    assert not loaded_by(code) & set(HEAVY)


@pytest.mark.parametrize(
    "code",
    [
        "import pdlib; pdlib.LeafSpec, pdlib.ItemSpec, pdlib.load_contract('decomposition')",
        "import pdlib.store.ledger",
        "import pdlib.cli",
    ],
)
def test_contracts_the_ledger_and_the_command_line_load_no_jax(code):
    assert not loaded_by(code) & {"jax", "jaxlib", "orbax", "tensorstore", "haiku", "optax"}


def test_the_public_names_import_and_are_documented():
    documents = (ROOT / "README.md").read_text("utf-8") + (ROOT / "SPEC.md").read_text("utf-8")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|```.*?```", documents, re.DOTALL))))
    for module in (pdlib, pdlib.store):
        for name in module._HOMES:  # pyright: ignore
            assert getattr(module, name).__name__ == name
            assert name in dir(module)
            assert name in words, f"{name} stands in neither README.md nor SPEC.md"
    assert pdlib.__all__ == sorted(pdlib._HOMES)  # pyright: ignore


@pytest.mark.parametrize("module", [pdlib, pdlib.store], ids=lambda module: module.__name__)
def test_type_checkers_see_the_names_that_are_there(module):
    (block,) = (node for node in ast.parse(Path(module.__file__).read_text("utf-8")).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    prefix = "" if module is pdlib else "pdlib.store."
    assert seen == {name: prefix + home for name, home in module._HOMES.items()}


def test_an_unknown_name_is_an_attribute_error():
    for module in (pdlib, pdlib.store):
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            module.nonsense  # noqa: B018


def test_every_public_function_and_class_says_what_it_does():
    for path in (ROOT / "pdlib").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name == "pdlib.__main__":
            continue
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            own = getattr(value, "__module__", None) == name
            if own and not attribute.startswith("_") and (isinstance(value, type) or callable(value)):
                assert (value.__doc__ or "").strip(), f"{name}.{attribute}"
