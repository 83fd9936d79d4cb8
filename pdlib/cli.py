"""The command line; the one room that prints. Each command imports what it needs when it runs.

Exit codes: 0 done, 1 refused with a reason, 2 wrong usage, 3 stopped by a signal (run again to continue).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from pdlib.errors import PdlibError

app = typer.Typer(
    name="pdlib",
    help="Decompose trained networks into rank-one components, and keep the result in checkpoints that open at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 refused, 2 wrong usage, 3 stopped by a signal (run again to continue).",
)

REFUSED = 1
STOPPED = 3

Run = Annotated[str, typer.Argument(metavar="PATH", help="A run directory, or its place in an object store (s3://…).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it; without this nothing is changed.")]


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
    plan: Annotated[bool, typer.Option("--plan", help="Print what would run, and compute nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a run, continue it, or say that it is complete.

    With --plan: every value with its origin, the sites, bytes, disk and devices.
    Example: pdlib train tms_5-2 --set seed=1 --out runs/seed-1
    """
    if plan:
        from pdlib.run.outlook import outlook

        _show(outlook(spec, overrides=values or []), as_json)
        return
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
    if outcome.results:
        console.print(_table(outcome.results))
    figure = run / "figures" / "ci_permuted.png"
    if figure.exists():
        typer.echo(f"figure: {figure}")


@app.command()
def specs(
    name: Annotated[str | None, typer.Argument(help="Show this one, every default written out.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs that have names, or print one as TOML: copy it, change it, train it.

    Example: pdlib specs tms_5-2 > mine.toml
    """
    from pdlib.run.spec import load_run_spec, summaries, to_toml

    if name is not None:
        parsed = load_run_spec(name)
        typer.echo(json.dumps(parsed.model_dump(), indent=2) if as_json else to_toml(parsed), nl=as_json)
        return
    found = summaries()
    width = max(map(len, found))
    lines = [f"{name:<{width}}  {summary}" for name, summary in found.items()]
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines))


@app.command()
def inspect(
    run: Run,
    as_json: AsJson = False,
) -> None:
    """Print what a run holds: items, leaves, bytes, and what opening and stripping would cost.

    Example: pdlib inspect runs/tms_5-2
    """
    from pdlib.store.ledger import describe_run

    _show(describe_run(run), as_json)


@app.command()
def verify(path: Run, as_json: AsJson = False) -> None:
    """Compare every byte with the manifests, and every leaf with its contract. Exits with 1 unless all is whole.

    PATH is a run, a directory of steps, one step, or one item. Example: pdlib verify runs/tms_5-2
    """
    from pdlib.store.verify import verify_path

    report = verify_path(path)
    _show(report, as_json)
    if not report:
        raise typer.Exit(REFUSED)


@app.command()
def strip(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", help="Only this step.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All steps, which is also the default.")] = False,
    keep_newest: Annotated[int, typer.Option(min=0, help="Spare the processes of this many newest steps.")] = 1,
    consolidate: Annotated[bool, typer.Option("--consolidate", help="Rewrite products as one file a leaf.")] = False,
    layout: Annotated[Path | None, typer.Option("--layout", help="A file that describes your older steps.")] = None,
    apply: Apply = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when the bytes are given back.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the product only: let the process of steps go. Only says what it would do, until --apply.

    An older step of one item is converted in place. Example: pdlib strip runs/tms_5-2 --keep-newest 0 --apply
    """
    from pdlib.store.strip import apply_strip, plan_strip

    if every and step is not None:
        raise typer.BadParameter("--step and --all exclude each other")
    known = None if layout is None else _layouts(layout)
    plan = plan_strip(run, step=step, keep_newest=keep_newest, consolidate=consolidate, known=known)
    _show(plan, as_json)
    if apply:
        apply_strip(plan, wait=wait, say=_note)
    else:
        _note("nothing was changed; pass --apply to do it")


@app.command()
def prune(
    run: Run,
    products: Annotated[str, typer.Option(help="Products to keep: all, marked, or how many of the newest.")] = "all",
    processes: Annotated[str, typer.Option(help="Processes to keep: all, marked, or how many of the newest.")] = "all",
    apply: Apply = False,
    as_json: AsJson = False,
) -> None:
    """Delete old steps by role. The newest, the newest resumable and marked steps stay. Dry run until --apply.

    Example: pdlib prune runs/tms_5-2 --processes 1 --apply
    """
    from pdlib.store.prune import apply_prune, plan_prune
    from pdlib.store.retention import Retention, parse_policy

    plan = plan_prune(run, Retention(product=parse_policy(products), process=parse_policy(processes)))
    _show(plan, as_json)
    if apply:
        apply_prune(plan)
    else:
        _note("nothing was changed; pass --apply to do it")


@app.command()
def migrate(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A directory of older steps; it is only read.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The run directory to make.")],
    step: Annotated[int | None, typer.Option("--step", help="Only this step.")] = None,
    with_training: Annotated[
        bool, typer.Option("--with-training", help="Optimizer states and adversaries too.")
    ] = False,
    layout: Annotated[Path | None, typer.Option("--layout", help="A file that describes your older steps.")] = None,
    apply: Apply = False,
    as_json: AsJson = False,
) -> None:
    """Turn steps of older layouts into a run of today's. Only says what it would do, until --apply.

    Example: pdlib migrate old/checkpoints runs/migrated --apply
    """
    from pdlib.items.contracts import default_registry
    from pdlib.store.migrate import apply_migration, plan_migration

    known = None if layout is None else _layouts(layout)
    plan = plan_migration(
        source, destination, registry=default_registry(), with_training=with_training, step=step, known=known
    )
    _show(plan, as_json)
    if apply:
        apply_migration(plan, say=_note)
    else:
        _note("nothing was changed; pass --apply to do it")


@app.command()
def export(
    run: Run,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory to make.")],
    step: Annotated[int | None, typer.Option("--step", help="The newest product without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a product as safetensors, with an index and a model card; nothing of pdlib is needed to read it.

    Example: pdlib export runs/tms_5-2 tms-exported
    """
    from pdlib.consumers.export import apply_export, plan_export

    plan = plan_export(run, out, step=step)
    _show(plan, as_json)
    apply_export(plan, say=_note)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A directory that pdlib export made.")],
    run: Annotated[str, typer.Argument(metavar="DEST", help="The run directory to make.")],
    as_json: AsJson = False,
) -> None:
    """Make a run of an export, equal to the bit.

    Example: pdlib import tms-exported runs/tms-again
    """
    from pdlib.consumers.imports import apply_import, plan_import

    plan = plan_import(source, run)
    _show(plan, as_json)
    apply_import(plan, say=_note)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A run directory.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another run directory.")],
    step_a: Annotated[int | None, typer.Option("--step-a", help="The newest product of A without it.")] = None,
    step_b: Annotated[int | None, typer.Option("--step-b", help="The newest product of B without it.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the matched components here.")] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where anything differs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two products: specification, leaves by digest, components up to permutation, sign and scale.

    Example: pdlib diff runs/seed-0 runs/seed-1 --figure diff.png
    """
    from pdlib.consumers.diff import compare_runs

    found = compare_runs(one, other, step_a=step_a, step_b=step_b)
    _show(found, as_json)
    if figure is not None:
        from pdlib.consumers.plots import matched_components

        matched = {site.site: site.matching for site in found.sites if site.matching is not None}
        small = {site: each.matrix for site, each in matched.items() if each.matrix is not None}
        matched_components({site: each.cosines for site, each in matched.items()}, figure, matrices=small)
        _note(f"figure: {figure}")
    if exit_code and found.differs:
        raise typer.Exit(REFUSED)


def main() -> None:
    """Run the command line; an error of pdlib's takes one screen, its traceback only with `--debug`."""
    try:
        app()
    except PdlibError as error:
        if os.environ.get("PDLIB_DEBUG"):
            raise
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(REFUSED)


class _Printable(Protocol):
    def as_dict(self) -> dict[str, Any]: ...
    def render(self) -> str: ...


def _layouts(path: Path) -> Any:
    from pdlib.items.layouts import read_layout

    return (read_layout(path),)


def _show(report: _Printable, as_json: bool) -> None:
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.render())


def _note(text: str) -> None:
    """Say what is done on the standard error, so that what is printed stays JSON where that was asked for."""
    typer.echo(text, err=True)


def _table(results: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("measure", "value", title="what the decomposition found")
    if "mmcs" in results:
        table.add_row("features recovered", f"{results['features_recovered']} of {results['features']}")
        table.add_row("MMCS", f"{results['mmcs']:.4f}")
        table.add_row("ML2R", f"{results['ml2r']:.4f}")
    for kind in ("identity", "dense"):
        for sites, error in results.get(f"{kind}_error", {}).items():
            table.add_row(f"{kind} error, {sites}", str(error))
    return table
