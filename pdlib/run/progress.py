"""Shows how a run goes, to a person or in a log; computes nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """Prints to a console: a live bar on a terminal, a plain line per report elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._total = 0

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, total: int, done: int) -> Generator[None]:
        """Show progress towards `total` steps, of which `done` were made before."""
        self._total = total
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as self._progress:
            self._task = self._progress.add_task("training", total=total, completed=done, note="")
            yield
        self._progress = None

    def at(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step reached and its metrics."""
        note = f"loss {metrics['total']:.2e}  " + "  ".join(
            f"{k} {v:.2f}" for k, v in metrics.items() if k.startswith("l0/")
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, note=note)
        else:
            self.say(f"step {step}/{self._total}  {note}")
