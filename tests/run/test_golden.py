"""The structure of both items of the toy run, leaf by leaf, as a text file: a change of it is seen in review."""

from __future__ import annotations

from pathlib import Path

from pdlib.items.binding import describe
from pdlib.run.build import task_of
from pdlib.run.problem import Problem, pretrain
from pdlib.run.spec import load_run_spec
from pdlib.tree import flatten, show

GOLDEN = Path(__file__).with_name("golden_tms_5-2.txt")


def structure() -> str:
    spec = load_run_spec("tms_5-2", overrides=["target.pretraining.steps=1"])
    state = Problem(spec, task_of(spec), pretrain(spec)).abstract_state()
    lines: list[str] = []
    for item, tree in (("decomposition", state.decomposition), ("training", state.training)):
        flat = flatten(tree)
        for keys, leaf in zip(flat.paths, flat.leaves, strict=True):
            seen = describe(item, keys, leaf)
            lines.append(f"{item}  {show(keys)}  {seen.dtype}{list(seen.shape)}")
    return "\n".join(lines) + "\n"


def test_the_structure_of_the_toy_run_is_the_golden_one():
    assert structure() == GOLDEN.read_text(), "regenerate: uv run python -m tests.run.test_golden"


if __name__ == "__main__":
    GOLDEN.write_text(structure())
