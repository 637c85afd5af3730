"""Train: one run, several, and one that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dqnfed.cli.common import (
    Breakdown,
    Changes,
    ClientColumn,
    Data,
    DataDir,
    DroppedColumns,
    DryRun,
    GroupColumn,
    LabelColumn,
    ModelName,
    Out,
    OwnTable,
    Quiet,
    Rounds,
    Score,
    Select,
    TaskName,
    Verbose,
    app,
    breakdown_change,
    data_dir_change,
    default_out,
    names_of,
    note_of,
    number_changes,
    observers_of,
    print_diverged,
    print_epsilons,
    print_estimate,
    print_kept,
    print_notes,
    print_report,
    print_result,
    print_unused,
    read_settings,
    refuse_used,
    refuse_without_method,
    run_planned,
    select_change,
)

NOTHING_NAMED = "name an experiment (`dqnfed list presets` shows them) or your own table with --data."


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
    data: Data = None,
    client: ClientColumn = None,
    label: LabelColumn = None,
    group: GroupColumn = None,
    drop: DroppedColumns = "",
    breakdown: Breakdown = "",
    task: TaskName = "auto",
    score: Score = None,
    model: ModelName = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train one method on one experiment, or on your own table.

    Examples:  dqnfed run digits  |  dqnfed run digits -a fedavg --set train.lr=0.3  |  dqnfed run my.toml --seed 3
    |  dqnfed run --data clinics.csv --client hospital --label outcome --model mlp
    """
    from dqnfed.experiments.experiment import run_experiment

    change = [*(change or []), *select_change(select), *breakdown_change(breakdown)]
    table = OwnTable(data, client, label, group, drop, task, score, model)
    if data is not None:
        config = table.config(experiment, rounds, seed, change, algorithm)
        print_notes(config, quiet)
    elif experiment is None:
        raise ValueError(NOTHING_NAMED)
    else:
        config = read_settings(experiment, algorithm, rounds, seed, [*change, *table.score_change()], data_dir)
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
    experiment: Annotated[
        str | None, typer.Argument(metavar="[PRESET|FILE.toml]", help="See `dqnfed list presets`.")
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option("--algorithms", help="Names, separated by commas; with --data, local-only and pooled are added."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every method that suits the experiment.")] = False,
    references: Annotated[
        bool,
        typer.Option("--references/--no-references", help="With --data: train each client alone, and on all rows."),
    ] = True,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="3, or 0,2,5, or 0:5 (0 to 4). Default: 0, with --data or --epsilon 0:5."),
    ] = None,
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
    epsilon: Annotated[
        str | None,
        typer.Option("--epsilon", help="Privacy budgets, as 1,3,8,inf: the same comparison under each of them."),
    ] = None,
    rounds: Rounds = None,
    select: Select = None,
    change: Changes = None,
    out: Out = None,
    data_dir: DataDir = None,
    data: Data = None,
    client: ClientColumn = None,
    label: LabelColumn = None,
    group: GroupColumn = None,
    drop: DroppedColumns = "",
    breakdown: Breakdown = "",
    task: TaskName = "auto",
    score: Score = None,
    model: ModelName = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train several methods with the same data and seeds, print the fairness table, write the report.

    Runs into OUT/<method>/<seed>; the same command again goes on where it was stopped.

    Examples:  dqnfed compare digits --seeds 0:5  |  dqnfed compare digits --algorithms dqn-fed,fedavg,qffl
    |  dqnfed compare --data clinics.csv --client hospital --label outcome --seeds 0:10
    |  dqnfed compare --data clinics/ --label outcome --dry-run  |  dqnfed compare heart --epsilon 1,3,8,inf
    """
    from dqnfed.experiments import compare as comparison
    from dqnfed.experiments import epsilons as budgets

    if epsilon is not None and data is not None:
        raise ValueError("`--epsilon` compares experiments that have a file; put the table into one (`data.file`).")

    change = [*(change or []), *select_change(select), *breakdown_change(breakdown)]
    table = OwnTable(data, client, label, group, drop, task, score, model)
    if data is not None:
        config = table.config(experiment, rounds, None, change, None)
    elif experiment is None:
        raise ValueError(NOTHING_NAMED)
    elif epsilon is not None:
        settings = [*change, *table.score_change(), *number_changes(rounds, None), *data_dir_change(data_dir)]
        config = budgets.with_noise(experiment, settings)
    else:
        config = read_settings(experiment, None, rounds, None, [*change, *table.score_change()], data_dir)
    is_own = data is not None
    names = names_of(algorithms) or (list(config.epsilon.algorithms) if epsilon is not None else [])
    chosen = comparison.chosen_algorithms(config, names, everything=everything, references=is_own and references)
    refuse_without_method(change, config, chosen)
    if is_own:
        print_notes(config, quiet)
    if dry_run:
        for name in chosen:
            print_estimate(config.with_algorithm(name))
        return
    folder = out or default_out(config.name)
    numbers = comparison.seeds_from(seeds or ("0:5" if is_own or epsilon is not None else "0"))
    if epsilon is not None:
        noisy = {e: budgets.with_noise(experiment or "", settings, e) for e in budgets.epsilons_from(epsilon)}
        planned = budgets.planned_with_epsilons(noisy, chosen, numbers, folder)
    else:
        planned = comparison.planned_runs(config, chosen, numbers, folder)
    done = run_planned(planned, config, jobs, folder, quiet)
    if not done:
        raise ValueError("none of the methods could run; the messages above say why.")
    print_unused(planned, done, quiet)
    print_report(done, folder / "report.html", config.name, quiet)
    if epsilon is not None:
        print_epsilons(folder, quiet)
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
