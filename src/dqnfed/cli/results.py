"""Look: reports, live pages, lists, the state of the installation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dqnfed.cli.common import DataDir, Quiet, app, console, errors, names_of, plain_text, print_report


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; default: report.html in the first folder.")
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="latex|markdown|csv", help="Print a table for a paper instead.")
    ] = None,
    weighted: Annotated[bool, typer.Option("--weighted", help="Weight clients by their examples in --table.")] = False,
    columns: Annotated[
        str,
        typer.Option("--columns", help="Of --table, separated by commas: mean, std, worst10, improved, seconds ..."),
    ] = "",
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Also write figures as PNG, SVG and PDF.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained HTML page about the runs and print the fairness table.

    Examples:  dqnfed report runs/demo  |  dqnfed report runs/demo --table latex  |  dqnfed report a b --figures figs
    """
    from dqnfed.report.figures import write_figures
    from dqnfed.report.table_formats import table_text

    if table is not None:
        typer.echo(table_text(runs, table, weighted=weighted, columns=names_of(columns)))
    elif columns:
        raise ValueError("--columns chooses the columns of --table; add --table latex, markdown or csv.")
    else:
        here = next((path for path in runs if path.is_dir()), Path())
        print_report(runs, out or here / "report.html", None, quiet)
    if figures is not None:
        for path in write_figures(runs, figures):
            if not quiet:
                errors.print(f"figure: {path}")


@app.command()
def statement(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of one experiment, or the folder above them.")],
    client: Annotated[
        list[str] | None, typer.Option("--client", help="Only this client; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; default: statements in the first folder.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a statement for each site's ethics board: one HTML page and one PDF a client.

    Data used, method, what left the site, results with intervals, groups (--breakdown of `run` and `compare`), versions
    and checksums, and places to sign.

    Examples:  dqnfed statement runs/clinics  |  dqnfed statement runs/clinics --client Avon --out for-the-board
    """
    from dqnfed.experiments.catalogue import algorithms
    from dqnfed.report.statements import write_statements

    titles = {str(row["name"]): row for row in algorithms()}
    here = next((path for path in runs if path.is_dir()), Path())
    for path in write_statements(runs, out or here / "statements", titles, clients=client or []):
        if not quiet:
            console.print(escape(f"statement: {path}"), soft_wrap=True)


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    host: Annotated[str, typer.Option("--host", help="Other addresses than loopback let others look.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show the report of runs in progress, live, at a local address with a token.

    Example:  dqnfed watch runs/digits-20260101-120000
    """
    from dqnfed.report.watch import watch as serve

    serve(
        runs, host=host, port=port, open_browser=open_browser, announce=lambda text: console.print(text, soft_wrap=True)
    )


@app.command("list")
def list_things(
    what: Annotated[str, typer.Argument(metavar="algorithms|presets|datasets")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these, with details.")] = None,
    details: Annotated[bool, typer.Option("--details", help="What each method sends, keeps and needs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List what there is, one line each: methods, packaged experiments, datasets.

    Examples:  dqnfed list algorithms  |  dqnfed list algorithms dqn-fed fedavg  |  dqnfed list algorithms --details
    |  dqnfed list presets --json
    """
    from dqnfed.experiments import catalogue

    listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "algorithms": catalogue.algorithms,
        "presets": catalogue.presets,
        "datasets": catalogue.datasets,
    }
    if what not in listings:
        raise ValueError(f"there is nothing called '{what}' to list; there are {', '.join(listings)}.")
    rows = named_rows(listings[what](), names or [])
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if what == "algorithms":
        print_algorithms(rows, details=details or bool(names))
        return
    columns = list(rows[0])
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(escape(plain_text(row[key])) for key in columns))
    console.print(table)


def named_rows(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Return the rows of these names, in the order of the list; all where none is named."""
    import difflib

    called = {next(iter(row.values())): row for row in rows}
    for name in names:
        if name not in called:
            close = difflib.get_close_matches(name, called, n=1)
            raise ValueError(
                f"there is nothing called '{name}' here{f' (did you mean {close[0]!r}?)' if close else ''}; leave the "
                "name out to see what there is."
            )
    return [row for name, row in called.items() if not names or name in names]


def print_algorithms(rows: list[dict[str, Any]], *, details: bool) -> None:
    """Print one line a method, cut to the width of the terminal; with details, what crosses the network below it."""
    width = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        name = Text(row["name"].ljust(width), style="bold")
        name.append(row["title"], style="not bold")
        if not details:
            console.print(name, overflow="ellipsis", no_wrap=True, highlight=False)
            continue
        console.print(name, soft_wrap=True, highlight=False)
        parts = [
            f"sends {row['payload']}",
            f"keeps {row['memory']}" if row["memory"] != "0" else "",
            f"needs {row['needs']}",
            f"{row['problem_kinds'][0]} models only" if len(row["problem_kinds"]) == 1 else "",
            "personal models" if row["personal"] else "",
        ]
        console.print(Text("  " + " | ".join(filter(None, parts)), style="dim"), soft_wrap=True, highlight=False)


@app.command()
def doctor(data_dir: DataDir = None) -> None:
    """Show versions, devices, extras and folders, and what is missing.

    Example:  dqnfed doctor
    """
    from dqnfed.experiments.doctor import findings

    rows = findings(data_dir)
    table = Table(box=None, pad_edge=False, show_header=False)
    for what, found, fine in rows:
        table.add_row(what, escape(found) if fine else f"[red]{escape(found)}[/red]")
    console.print(table)
    if not all(fine for _, _, fine in rows):
        raise typer.Exit(1)
