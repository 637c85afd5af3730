"""Train: one run, several, and one that was stopped; use what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dqnfed.cli.common import (
    Changes,
    DataDir,
    DryRun,
    Out,
    Quiet,
    Rounds,
    Select,
    Verbose,
    app,
    console,
    default_out,
    names_of,
    note_of,
    observers_of,
    own_settings,
    print_diverged,
    print_estimate,
    print_kept,
    print_notes,
    print_report,
    print_result,
    print_unused,
    read_settings,
    refuse_used,
    refuse_without_method,
    refuse_without_table,
    run_planned,
    select_change,
)


@app.command()
def run(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[PRESET|FILE.toml]", help="See `dqnfed list presets`.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="See `dqnfed list algorithms`.")] = None,
    rounds: Rounds = None,
    select: Select = None,
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
    model: Annotated[
        str | None, typer.Option("--model", metavar="mlp|linear", help="For --data; default: mlp.")
    ] = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one method on one experiment, or on your own table.

    Examples:  dqnfed run digits  |  dqnfed run digits -a fedavg --set train.lr=0.3  |  dqnfed run my.toml --seed 3
    |  dqnfed run --data clinics.csv --client hospital --label outcome --model mlp
    """
    from dqnfed.experiments.experiment import run_experiment

    change = [*(change or []), *select_change(select)]
    if data is not None:
        config = own_settings(
            data, client, label, group, drop, task, score, model or "mlp", experiment, algorithm, rounds, seed, change
        )
        print_notes(config, quiet)
    elif experiment is None:
        raise ValueError("name an experiment (`dqnfed list presets` shows them) or your own table with --data.")
    else:
        about_table = {"--client": client, "--label": label, "--group": group, "--drop": drop}
        about_table |= {"--task": "" if task == "auto" else task, "--model": model}
        refuse_without_table([option for option, value in about_table.items() if value])
        changes = [*change, *([f"eval.score={score}"] if score else [])]
        config = read_settings(experiment, algorithm, rounds, seed, changes, data_dir)
    if dry_run:
        print_estimate(config)
        return
    folder = out or default_out(config.name)
    refuse_used(folder)
    observers = observers_of(config, quiet)(config.algorithm.name)
    result = run_experiment(config, folder, observers=observers, note=note_of(quiet))
    print_result(result.summary, folder, quiet)


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml")],
    algorithms: Annotated[str | None, typer.Option("--algorithms", help="Names, separated by commas.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every method that suits the experiment.")] = False,
    seeds: Annotated[str, typer.Option("--seeds", help="3, or 0,2,5, or 0:5 (0 to 4).")] = "0",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="Runs at a time, each in a process with its share of the cores; the results are the same. Default: "
            "on a CPU as many as there are cores and 3 GB of free memory for; on a GPU, or where the experiment sets "
            "run.threads or computes over Ray, 1.",
        ),
    ] = None,
    rounds: Rounds = None,
    select: Select = None,
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

    change = [*(change or []), *select_change(select)]
    config = read_settings(experiment, None, rounds, None, change, data_dir)
    names = names_of(algorithms)
    chosen = comparison.chosen_algorithms(config, names, everything=everything)
    refuse_without_method(change, config, chosen)
    if dry_run:
        for name in chosen:
            print_estimate(config.with_algorithm(name))
        return
    folder = out or default_out(config.name)
    numbers = comparison.seeds_from(seeds)
    planned = comparison.planned_runs(config, chosen, numbers, folder)
    done = run_planned(planned, config, jobs, folder, quiet)
    if not done:
        raise ValueError("none of the methods could run; the messages above say why.")
    print_unused(planned, done, quiet)
    print_report(done, folder / "report.html", config.name, quiet)
    print_kept(planned, done, quiet)
    print_diverged(planned, done)
    if len(done) < len(planned):
        raise typer.Exit(1)  # some method could not run; the messages above say which and why


@app.command()
def resume(folder: Path, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Go on with a run that was stopped or killed; it ends as if nothing had happened.

    Example:  dqnfed resume runs/digits-20260101-120000
    """
    from dqnfed.core.checksums import damaged_files
    from dqnfed.core.run_folder import RunFolder
    from dqnfed.experiments.experiment import resumed_config, run_experiment

    config = resumed_config(folder)
    if RunFolder(folder).is_over() and not damaged_files(folder):
        print_result(RunFolder(folder).summary() or {}, folder, quiet)
        return
    observers = observers_of(config, quiet)(config.algorithm.name)
    result = run_experiment(config, folder, observers=observers, resume=True, note=note_of(quiet))
    print_result(result.summary, folder, quiet)


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

    from dqnfed.core.checksums import refuse_damaged

    source = folder / "model.safetensors"
    if not source.is_file():
        raise FileNotFoundError(f"{folder} has no trained model yet; `dqnfed resume {folder}` finishes the run.")
    refuse_damaged(folder)
    shutil.copyfile(source, model)
    console.print(f"model: {model}")
