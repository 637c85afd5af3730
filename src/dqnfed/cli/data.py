"""Data: fetch, check and deal out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dqnfed.cli.common import DataDir, Quiet, app, console, errors


@app.command()
def partition(
    name: Annotated[str, typer.Argument(metavar="DATASET|PRESET")],
    clients: Annotated[int | None, typer.Option("--clients", min=1)] = None,
    shards: Annotated[int | None, typer.Option("--shards", min=1, help="Label shards a client.")] = None,
    dirichlet: Annotated[float | None, typer.Option("--dirichlet", help="beta: small is skewed.")] = None,
    classes: Annotated[int | None, typer.Option("--classes", min=1, help="Classes a client.")] = None,
    scheme: Annotated[str | None, typer.Option("--scheme", metavar="iid|natural|label")] = None,
    test: Annotated[float | None, typer.Option("--test", help="Share of each client's examples.")] = None,
    validation: Annotated[float | None, typer.Option("--validation", help="Share of each client's examples.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the manifest and the picture.")] = Path("partitions"),
) -> None:
    """Deal a dataset out to clients; print sizes and label histograms, save the manifest and a picture.

    Examples:  dqnfed partition cifar10 --dirichlet 0.5 --clients 10  |  dqnfed partition cifar10-setup1 --seed 3
    """
    from dqnfed.experiments.data_commands import data_block, dealt_out
    from dqnfed.report.partition import partition_lines, write_partition_picture

    block = data_block(
        name,
        data_dir=data_dir,
        clients=clients,
        shards=shards,
        dirichlet=dirichlet,
        classes=classes,
        scheme=scheme,
        test=test,
        validation=validation,
        seed=seed,
    )
    dealt = dealt_out(block)
    typer.echo("\n".join(partition_lines(dealt.manifest.names, dealt.manifest.sizes, dealt.counts)))
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{name}-{dealt.manifest.scheme}-{seed}"
    dealt.manifest.save(stem.with_suffix(".safetensors"))
    typer.echo(f"manifest: {stem}.safetensors, hash {dealt.manifest.hash()[:16]}")
    if dealt.counts is not None:
        picture = write_partition_picture(stem.with_suffix(".png"), dealt.counts, dealt.manifest.names, dealt.title)
        typer.echo(f"picture: {picture}")


datasets = typer.Typer(help="Fetch and check datasets.", no_args_is_help=True)
app.add_typer(datasets, name="data")


@datasets.command("fetch")
def fetch_data(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `dqnfed list datasets`.")],
    data_dir: DataDir = None,
    source: Annotated[str, typer.Option("--from", metavar="official|hub", help="hub: Hugging Face.")] = "official",
    quiet: Quiet = False,
) -> None:
    """Download datasets from their official source: resumed after a cut, checked, unpacked.

    Example:  dqnfed data fetch fashion_mnist mnist --data-dir data
    """
    from dqnfed.experiments.data_commands import fetched
    from dqnfed.experiments.progress import DownloadBars

    for name in names:
        with DownloadBars(errors, enabled=not quiet and errors.is_terminal) as bars:
            folder = fetched(name, data_dir, source, bars.update)
        console.print(f"{name}: {folder}", soft_wrap=True)


@datasets.command("verify")
def verify_data(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `dqnfed list datasets`.")],
    data_dir: DataDir = None,
) -> None:
    """Check datasets on disk: checksums of what was downloaded, that everything can be read, how many examples.

    Example:  dqnfed data verify fashion_mnist
    """
    from dqnfed.data.fetch import verify

    fine = True
    for name in names:
        for verdict in verify(name, data_dir):
            mark = "[green]right[/green]" if verdict.is_right else "[red]wrong[/red]"
            console.print(f"{mark}  {escape(f'{name}: {verdict.what}: {verdict.detail}')}", soft_wrap=True)
            fine &= verdict.is_right
    if not fine:
        raise typer.Exit(1)


@datasets.command("trace")
def make_trace(
    out: Annotated[Path, typer.Argument(metavar="FILE.csv")],
    clients: Annotated[int, typer.Option("--clients", min=1)],
    rounds: Annotated[int, typer.Option("--rounds", min=1)],
    online: Annotated[float, typer.Option("--online", help="Share of the rounds in which a client is online.")] = 0.5,
    stay: Annotated[float, typer.Option("--stay", help="Rounds that a client stays online, on average.")] = 10.0,
    spread: Annotated[float, typer.Option("--spread", help="Of that share between clients: of its logit.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Write who is online in which round, for `--set train.trace=FILE.csv`: clients come and go by themselves.

    Example:  dqnfed data trace away.csv --clients 20 --rounds 100 --online 0.3
    """
    from dqnfed.sim.availability import drawn_trace, trace_text

    if out.exists():
        raise ValueError(f"{out} exists and is not overwritten; give another name.")
    trace = drawn_trace(clients, rounds, online=online, stay=stay, spread=spread, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(trace_text(trace), encoding="utf-8")
    typer.echo(f"{out}: {trace.mean_online(clients):.1f} of {clients} clients are online in a round")
