"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

app = typer.Typer(
    name="dqnfed",
    help="Fair and fast federated learning: DQN-Fed, the methods it is compared with, and honest fairness reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every dropped or clipped client, every checkpoint.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a config key, e.g. train.lr=0.3.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/<preset>-<time>.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where datasets lie; default: $DQNFED_DATA, else data.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Estimate time and memory from three rounds; write nothing.")]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds to train.")]


@app.command()
def run(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[PRESET|FILE.toml]", help="See `dqnfed list presets`.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="See `dqnfed list algorithms`.")] = None,
    rounds: Rounds = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0)] = None,
    change: Changes = None,
    out: Out = None,
    data_dir: DataDir = None,
    data: Annotated[Path | None, typer.Option("--data", help="Your own table: CSV, Parquet or NPZ.")] = None,
    client: Annotated[str | None, typer.Option("--client", help="Its column that says who holds a row.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Its column that is to be learnt.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Its column of declared groups of clients.")] = None,
    drop: Annotated[str, typer.Option("--drop", help="Its columns to leave out, separated by commas.")] = "",
    task: Annotated[str, typer.Option("--task", metavar="auto|classification|regression")] = "auto",
    score: Annotated[
        str | None, typer.Option("--score", metavar="accuracy|auc|f1|loss", help="What fairness is measured on.")
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="mlp|linear", help="For --data.")] = "mlp",
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one method on one experiment, or on your own table.

    Examples:  dqnfed run digits  |  dqnfed run digits -a fedavg --set train.lr=0.3  |  dqnfed run my.toml --seed 3
    |  dqnfed run --data clinics.csv --client hospital --label outcome --model mlp
    """
    from dqnfed.experiments.experiment import run_experiment

    if data is not None:
        config = _own_config(
            data, client, label, group, drop, task, score, model, experiment, algorithm, rounds, seed, change
        )
        _print_notes(config, quiet)
    elif experiment is None:
        raise ValueError("name an experiment (`dqnfed list presets` shows them) or your own table with --data.")
    else:
        changes = [*(change or []), *([f"eval.score={score}"] if score else [])]
        config = _config(experiment, algorithm, rounds, seed, changes, data_dir)
    if dry_run:
        _print_estimate(config)
        return
    folder = out or _default_out(config.name)
    _refuse_used(folder)
    result = run_experiment(config, folder, observers=_observers(config, quiet)(config.algorithm.name))
    _print_result(result.summary, folder, quiet)


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml")],
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Names, separated by commas.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every method that suits the experiment.")] = False,
    seeds: Annotated[str, typer.Option("--seeds", help="3, or 0,2,5, or 0:5 (0 to 4).")] = "0",
    rounds: Rounds = None,
    change: Changes = None,
    out: Out = None,
    data_dir: DataDir = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train several methods with the same data and seeds, print the fairness table, write the report.

    Runs into OUT/<method>/<seed>; the same command again goes on where it was stopped.

    Examples:  dqnfed compare digits --seeds 0:5  |  dqnfed compare digits --algorithms dqn-fed,fedavg,qffl
    """
    from dqnfed.experiments import compare as comparison

    config = _config(experiment, None, rounds, None, change, data_dir)
    names = [part.strip() for part in algorithms.split(",") if part.strip()] if algorithms else []
    chosen = comparison.chosen_algorithms(config, names, everything=everything)
    if dry_run:
        for name in chosen:
            _print_estimate(config.with_algorithm(name))
        return
    folder = out or _default_out(config.name)
    numbers = comparison.seeds_from(seeds)
    done = comparison.compare(config, chosen, numbers, folder, observers=_observers(config, quiet))
    if not done:
        raise ValueError("none of the methods could run; the messages above say why.")
    _print_report(done, folder / "report.html", config.name, quiet)


@app.command()
def resume(folder: Path, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Go on with a run that was stopped or killed; it ends as if nothing had happened.

    Example:  dqnfed resume runs/digits-20260101-120000
    """
    from dqnfed.core.run_folder import RunFolder
    from dqnfed.experiments.experiment import resumed_config, run_experiment

    config = resumed_config(folder)
    summary = RunFolder(folder).summary()
    if summary is not None and summary["status"] != "interrupted":
        _print_result(summary, folder, quiet)
        return
    result = run_experiment(config, folder, observers=_observers(config, quiet)(config.algorithm.name), resume=True)
    _print_result(result.summary, folder, quiet)


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
        typer.echo(table_text(runs, table, weighted=weighted))
    else:
        here = next((path for path in runs if path.is_dir()), Path())
        _print_report(runs, out or here / "report.html", None, quiet)
    if figures is not None:
        for path in write_figures(runs, figures):
            if not quiet:
                errors.print(f"figure: {path}")


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


@app.command()
def convex(
    problem: Annotated[str, typer.Argument(metavar="a1a|a9a|w8a|phishing|mushrooms|synthetic")] = "synthetic",
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Names, separated by commas.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every second-order method and DQN-Fed.")] = False,
    rounds: Rounds = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the gap against rounds and bits there.")
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Count rounds, bits, passes and seconds to a given gap on the convex benchmark of second-order methods.

    Examples:  dqnfed convex a1a --all  |  dqnfed convex --algorithms newton,fednl,dqn-fed --json out.json
    """
    from dqnfed.experiments.convex import chosen, text_table, traced, write_json
    from dqnfed.experiments.convex_problems import convex_problem
    from dqnfed.report.gaps import draw_gaps

    names = [part.strip() for part in algorithms.split(",") if part.strip()] if algorithms else []
    if not names and not everything:
        names = ["newton", "fednl", "fednew", "giant", "dqn-fed", "fedavg[gd]"]
    benchmark = convex_problem(problem, data_dir)
    entries = chosen(benchmark, names, rounds)
    traces = []
    with errors.status("") as status:
        for i, (name, entry) in enumerate(entries.items()):
            if not quiet:
                status.update(f"[{i + 1}/{len(entries)}] {escape(name)} on {problem}")
            traces.append(traced(benchmark, name, entry, seed=seed))
    typer.echo(text_table(traces))
    if as_json is not None:
        write_json(traces, as_json)
    if picture is not None:
        draw_gaps({trace.algorithm: (trace.gaps, trace.bits) for trace in traces}, picture)


@app.command()
def theory() -> None:
    """Check every theorem of the paper: its assumption, what was measured, whether it holds for the algorithm.

    Example:  dqnfed theory
    """
    from dqnfed.experiments.theory import check_theorems, text_table

    findings = check_theorems()
    typer.echo(text_table(findings))
    if not all(finding.as_documented for finding in findings):
        raise typer.Exit(1)


@app.command()
def sweep(
    experiment: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml")],
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Names, separated by commas.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="3, or 0,2,5, or 0:5 (0 to 4).")] = "0",
    grid: Annotated[str, typer.Option("--grid", metavar="paper|FILE.toml", help="What is tried.")] = "paper",
    sampler: Annotated[str, typer.Option("--sampler", metavar="grid|tpe")] = "grid",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Of TPE, for each method.")] = 20,
    select: Annotated[
        str, typer.Option("--select", metavar="mean|worst10|worst5|min", help="Of the clients' validation scores.")
    ] = "mean",
    storage: Annotated[
        str | None, typer.Option("--storage", help="An Optuna URL, shared by several machines; default: SQLite in OUT.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes on this machine.")] = 1,
    rounds: Rounds = None,
    change: Changes = None,
    out: Out = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Choose every method's settings on validation data, then compare the methods at their best on test data.

    The same command with the same --out goes on where it was stopped.

    Example:  dqnfed sweep digits --algorithms qffl,term,dqn-fed --seeds 0:5 --grid paper --out runs/sweep
    """
    from dqnfed.experiments import compare as comparison
    from dqnfed.experiments.sweep import checked_plan, chosen_grids, final_runs, search

    config = _config(experiment, None, rounds, None, change, data_dir)
    names = [part.strip() for part in algorithms.split(",") if part.strip()] if algorithms else []
    plan = checked_plan(
        config,
        comparison.chosen_algorithms(config, names, everything=False),
        comparison.seeds_from(seeds),
        out or _default_out(f"{config.name}-sweep"),
        chosen_grids(config, grid),
        sampler=sampler,
        n_trials=trials,
        select=select,
        storage=storage,
        jobs=jobs,
    )
    with errors.status(f"searching {config.name}: {', '.join(plan.algorithms)}"):
        found = search(plan)
    for f in found:
        best = ", ".join(f"{key} = {value}" for key, value in f.best.items()) or "defaults"
        score = "" if f.score is None else f" (validation {f.score:.2f})"
        console.print(f"{f.algorithm}: {escape(best)}{score}")
    done = final_runs(plan, found, observers=_observers(config, quiet))
    _print_report(done, plan.out / "report.html", f"{config.name}, every method at its best", quiet)
    if not quiet:
        console.print(f"whole grid: {plan.out / 'sweep.md'}")


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


@app.command("list")
def list_things(
    what: Annotated[str, typer.Argument(metavar="algorithms|presets|datasets")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List what there is: methods, packaged experiments, datasets.

    Examples:  dqnfed list algorithms  |  dqnfed list presets --json
    """
    from dqnfed.experiments import catalogue

    listings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "algorithms": catalogue.algorithms,
        "presets": catalogue.presets,
        "datasets": catalogue.datasets,
    }
    if what not in listings:
        raise ValueError(f"there is nothing called '{what}' to list; there are {', '.join(listings)}.")
    rows = listings[what]()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = [key for key, value in rows[0].items() if not isinstance(value, dict)]  # settings are for --json
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(escape(_text(row[key])) for key in columns))
    console.print(table)


@app.command("new-app")
def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    clients: Annotated[int, typer.Option("--clients", min=1)] = 3,
    algorithm: Annotated[str, typer.Option("--algorithm", "-a", help="See `dqnfed list algorithms`.")] = "dqn-fed",
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 10,
) -> None:
    """Write a Flower app that trains on the data of real clients; see "Deploy on Flower" in the docs.

    Example:  dqnfed new-app my-federation --clients 4
    """
    from dqnfed.flower.new_app import new_app as written_app

    for path in written_app(folder, clients=clients, algorithm=algorithm, rounds=rounds):
        console.print(str(path), soft_wrap=True)


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[Path, typer.Argument(help=".npy, .npz (array x) or .csv")],
    out: Annotated[Path | None, typer.Option("--out", help="Write there instead of to the terminal.")] = None,
) -> None:
    """Print the trained model's prediction for every example of a file.

    Example:  dqnfed predict runs/digits-20260101-120000 new.npy --out classes.csv
    """
    from dqnfed.experiments.predict import predictions

    text = "\n".join(str(value) for value in predictions(folder, data).tolist()) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)


@app.command()
def export(folder: Annotated[Path, typer.Argument(metavar="RUN")], model: Path) -> None:
    """Write the trained model's parameters as a safetensors file.

    Example:  dqnfed export runs/digits-20260101-120000 model.safetensors
    """
    import shutil

    source = folder / "model.safetensors"
    if not source.is_file():
        raise FileNotFoundError(f"{folder} has no trained model yet; `dqnfed resume {folder}` finishes the run.")
    shutil.copyfile(source, model)
    console.print(f"model: {model}")


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


def _config(
    experiment: str,
    algorithm: str | None,
    rounds: int | None,
    seed: int | None,
    changes: Sequence[str] | None,
    data_dir: Path | None,
) -> Any:
    from dqnfed.experiments.config import read_config

    extra = list(changes or [])
    if rounds is not None:
        extra.append(f"train.rounds={rounds}")
    if seed is not None:
        extra.append(f"run.seed={seed}")
    if data_dir is not None:
        extra.append(f"data.dir={json.dumps(str(data_dir))}")
    config = read_config(experiment, extra)
    return config if algorithm is None else config.with_algorithm(algorithm)


def _own_config(
    data: Path,
    client: str | None,
    label: str | None,
    group: str | None,
    drop: str,
    task: str,
    score: str | None,
    model: str,
    experiment: str | None,
    algorithm: str | None,
    rounds: int | None,
    seed: int | None,
    changes: Sequence[str] | None,
) -> Any:
    from dqnfed.experiments.config import read_config
    from dqnfed.experiments.data_commands import own_config

    if client is None or label is None:
        raise ValueError(
            "your own table needs --client and --label: the columns that say whose a row is and what is learnt."
        )
    extra = list(changes or [])
    if rounds is not None:
        extra.append(f"train.rounds={rounds}")
    if seed is not None:
        extra.append(f"run.seed={seed}")
    config = own_config(
        data,
        client=client,
        label=label,
        group=group,
        drop=tuple(part.strip() for part in drop.split(",") if part.strip()),
        task=task,
        score=score,
        model=model,
        base=read_config(experiment) if experiment else None,
        changes=tuple(extra),
    )
    return config if algorithm is None else config.with_algorithm(algorithm)


def _print_notes(config: Any, quiet: bool) -> None:
    from dqnfed.experiments.data_source import data_source

    own = data_source(config.data, config.run.seed, config.eval.score).own
    if own is not None and not quiet:
        for note in own.notes:
            console.print(escape(note), soft_wrap=True, highlight=False)


def _observers(config: Any, quiet: bool) -> Callable[[str], Sequence[Any]]:
    from dqnfed.experiments.progress import ProgressBar
    from dqnfed.experiments.trackers import make_trackers

    def made(label: str) -> Sequence[Any]:
        trackers = make_trackers([name for name, wanted in config.track.model_dump().items() if wanted])
        return trackers if quiet or not console.is_terminal else [ProgressBar(console, label), *trackers]

    return made


def _print_estimate(config: Any) -> None:
    from dqnfed.experiments.estimate import estimate

    found = estimate(config)
    console.print(
        f"{config.algorithm.name} on {config.name}: about {found.seconds:.0f} s for {config.train.rounds} rounds "
        f"({1000 * found.seconds_per_round:.1f} ms a round), {found.peak_megabytes:.0f} MB; {found.n_parameters:,} "
        f"parameters, {found.cohort_size} of {found.n_clients} clients a round, "
        f"{found.uplink_bytes_per_client / 1024:.1f} KiB up a client and round."
    )


def _print_report(runs: Sequence[Path], out: Path, title: str | None, quiet: bool) -> None:
    from dqnfed.report.page import make_report

    made = make_report(runs, out, title=title)
    console.print(made.table)
    for problem in made.problems:
        errors.print(f"[yellow]note:[/yellow] {escape(str(problem))}", soft_wrap=True)
    if not quiet:
        console.print(f"report: {made.path}", soft_wrap=True)


def _print_result(summary: dict[str, Any], folder: Path, quiet: bool) -> None:
    accuracy = summary["accuracy"]
    rho = "" if summary["rho_mean"] is None else f", improved clients {100 * summary['rho_mean']:.1f} %"
    console.print(
        f"{summary['algorithm']} on {summary['name']}, {summary['rounds']} rounds: {summary['score']} mean "
        f"{accuracy['mean']:.2f}, std {accuracy['std']:.2f}, worst 10 % {accuracy['worst10']:.2f}, best 10 % "
        f"{accuracy['best10']:.2f}{rho}"
    )
    if summary["reason"]:
        console.print(f"ended early: {summary['reason']}")
    if not quiet:
        console.print(f"run folder: {folder}")
    if summary["status"] == "interrupted":
        console.print(f"interrupted; go on with: dqnfed resume {folder}")
        raise typer.Exit(130)


def _default_out(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_used(folder: Path) -> None:
    if (folder / "config.toml").is_file():
        raise FileExistsError(
            f"{folder} already holds a run; go on with `dqnfed resume {folder}`, or choose another --out."
        )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def main() -> None:
    """Run the command line; errors that a user can mend are one message, not a traceback."""
    verbose = any(flag in sys.argv for flag in ("-v", "--verbose"))
    quiet = any(flag in sys.argv for flag in ("-q", "--quiet"))
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    handler = RichHandler(console=errors, show_path=False, show_time=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        if verbose:
            raise
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("interrupted; what was finished is saved")
        sys.exit(130)


if __name__ == "__main__":
    main()
