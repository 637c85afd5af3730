"""Study: sweeps, the convex benchmark, the theorems, a new method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dqnfed.cli.common import (
    Changes,
    DataDir,
    Out,
    Quiet,
    Rounds,
    Verbose,
    app,
    console,
    default_out,
    errors,
    names_of,
    print_diverged,
    print_kept,
    print_report,
    print_unused,
    read_settings,
    refuse_without_method,
    run_planned,
)


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

    The same command with the same --out goes on where it was stopped. --select chooses settings; which model each run
    keeps is eval.select, as in --set eval.select=loss.

    Example:  dqnfed sweep digits --algorithms qffl,term,dqn-fed --seeds 0:5 --grid paper --out runs/sweep
    """
    from dqnfed.experiments import compare as comparison
    from dqnfed.experiments.sweep import checked_plan, chosen_grids, final_runs, search

    config = read_settings(experiment, None, rounds, None, change, data_dir)
    chosen = comparison.chosen_algorithms(config, names_of(algorithms), everything=False)
    refuse_without_method(change, config, chosen)
    plan = checked_plan(
        config,
        chosen,
        comparison.seeds_from(seeds),
        out or default_out(f"{config.name}-sweep"),
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
    planned = final_runs(plan, found)
    done = run_planned(planned, config, plan.jobs, plan.out, quiet)
    print_unused(planned, done, quiet)
    print_report(done, plan.out / "report.html", f"{config.name}, every method at its best", quiet)
    print_kept(planned, done, quiet)
    print_diverged(planned, done)
    if not quiet:
        console.print(f"whole grid: {plan.out / 'sweep.md'}")


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

    names = names_of(algorithms)
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


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case words joined by hyphens.")],
    template: Annotated[
        str, typer.Option("--template", metavar="one-phase|two-phase", help="two-phase: with a memory of each client.")
    ] = "one-phase",
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="Root of the clone; default: this folder or one above.")
    ] = None,
) -> None:
    """Write a new method into a clone of this repository: its file, its test and its line in the registry.

    NAME is lower-case words joined by hyphens. What is written works and passes all tests; change it into your method.
    See "Add a method" in the docs.

    Examples:  dqnfed new-method trimmed-mean  |  dqnfed new-method my-clipping --template two-phase
    """
    from dqnfed.experiments.new_method import new_method as written_method

    written = written_method(name, template=template, root=root)
    for path, what in (
        (written.method, "the method"),
        (written.test, "its test"),
        (written.registry, "its import and its line in REGISTRY"),
    ):
        typer.echo(f"{written.root / path}: {what}")
    typer.echo(f"next, in {written.root}:")
    for command in written.commands:
        typer.echo(f"  {command}")
