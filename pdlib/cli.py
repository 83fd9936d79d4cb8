"""The command line; the one room that prints. Each command imports what it needs when it runs.

Exit codes: 0 done, 1 refused with a reason, 2 wrong usage, 3 stopped by a signal (run again to continue).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pdlib.errors import PdlibError

app = typer.Typer(
    name="pdlib",
    help="Decompose trained networks into rank-one components, and keep the result in checkpoints that open at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 refused, 2 wrong usage, 3 stopped by a signal (run again to continue).",
)

STOPPED = 3


@app.callback()
def _main(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    if debug:
        os.environ["PDLIB_DEBUG"] = "1"


@app.command()
def train(
    spec: Annotated[str, typer.Argument(help="A name such as tms_5-2, or a TOML file.")],
    out: Annotated[Path | None, typer.Option("--out", help="The run directory; runs/NAME without it.")] = None,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="Override table.key=value; may be repeated.")
    ] = None,
) -> None:
    """Train a run, continue it, or say that it is complete.

    Example: pdlib train tms_5-2 --set seed=1 --out runs/seed-1
    """
    from pdlib.run.spec import load_run_spec

    parsed = load_run_spec(spec, overrides=values or [])
    run = (out or Path("runs") / parsed.name).absolute()

    from rich.console import Console

    from pdlib.run.loop import train as train_run
    from pdlib.run.progress import Reporter

    console = Console()
    outcome = train_run(parsed, run, Reporter(console))
    if outcome.results is None:
        typer.echo(
            f"stopped; the last durable step is {outcome.step} of {outcome.steps} in {run}. Run again to continue."
        )
        raise typer.Exit(STOPPED)
    typer.echo(f"complete at step {outcome.step}: {run}")
    console.print(_table(outcome.results))
    typer.echo(f"figure: {run / 'figures' / 'ci_permuted.png'}")


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(help="A run directory, or its place in an object store (s3://…).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a run holds: items, leaves, bytes, and what opening and stripping would cost.

    Example: pdlib inspect runs/tms_5-2
    """
    from pdlib.store.ledger import describe_run

    report = describe_run(run)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.render())


def main() -> None:
    """Run the command line; an error of pdlib's takes one screen, its traceback only with `--debug`."""
    try:
        app()
    except PdlibError as error:
        if os.environ.get("PDLIB_DEBUG"):
            raise
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)


def _table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("measure", "value", title="what the decomposition found")
    table.add_row("features recovered", f"{results['features_recovered']} of {results['features']}")
    table.add_row("MMCS", f"{results['mmcs']:.4f}")
    table.add_row("ML2R", f"{results['ml2r']:.4f}")
    for site, error in results["identity_error"].items():
        table.add_row(f"identity error, {site}", str(error))
    return table
