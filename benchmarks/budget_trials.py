r"""Settings of methods under privacy budgets: trials for every method and budget, judged on validation examples alone.

    python benchmarks/budget_trials.py heart --runs runs/heart-trials.jsonl --csv docs/results/privacy/heart-trials.csv
    python benchmarks/budget_trials.py mnist-by-writer --runs runs/writers.jsonl --jobs 2 --csv ...

The trials below were declared before the first run. The best by the mean validation accuracy of the last model is
printed as a preset's block `epsilon.at`, for `dqnfed compare PRESET --epsilon 1,3,8,inf`. Noise is drawn anew in every
run. Lines are appended, and what is in the file is not run again.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from many_runs import read_lines, run_all

from dqnfed.experiments.compare import planned_runs
from dqnfed.experiments.epsilons import epsilons_from, with_epsilon, with_noise
from dqnfed.experiments.experiment import run_experiment

Task = dict[str, Any]


class Trials(NamedTuple):
    """What is tried on a preset."""

    n_seeds: int
    changes: tuple[str, ...]  # beside those of the preset's block `epsilon`
    settings: dict[str, tuple[str, ...]]


def fixed_steps(rates: str, *sizes: float) -> tuple[str, ...]:
    """Return DQN-Fed without curvatures, with steps of these sizes."""
    return tuple(f"{{metric='identity', rates='{rates}', step='fixed', step_size={size}}}" for size in sizes)


PRESETS = {
    "heart": Trials(
        5,
        ("eval.every=60",),
        {
            "fedavg": tuple(
                f"{{lr={lr}}}" for lr in (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0)
            ),
            "qffl": tuple(f"{{q={q}, lr={lr}}}" for q, lr in product((0.1, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0))),
            "dqn-fed": (
                "{}",
                *fixed_steps("identity", 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
                *fixed_steps("loss", 0.1, 0.3, 1.0),
                *(f"{{metric='identity', rates='identity', step='match', step_size={size}}}" for size in (0.3, 1.0)),
            ),
        },
    ),
    "mnist-by-writer": Trials(
        2,
        ("data.validation=0.2",),
        {
            "fedavg": tuple(f"{{lr={lr}}}" for lr in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
            "qffl": tuple(f"{{q={q}, lr={lr}}}" for q, lr in product((0.0001, 0.001, 0.1), (1.0, 10.0))),
            "dqn-fed": ("{}", *fixed_steps("identity", 0.03, 0.1, 0.3, 1.0), *fixed_steps("loss", 0.3)),
        },
    ),
}


def outcome(task: Task) -> Task:
    """Run one trial and return its line."""
    logging.disable(logging.CRITICAL)
    preset, method, epsilon = task["problem"], task["method"], float(task["epsilon"])
    changes = [*PRESETS[preset].changes, "eval.part='validation'", f"algorithms.{method}={task['settings']}"]
    config = with_epsilon(with_noise(preset, changes), epsilon)
    [planned] = planned_runs(config, [method], [task["seed"]], Path("unused"))
    summary = run_experiment(planned.config, None).summary
    return {**task, "status": summary["status"], "accuracy": summary["accuracy"]["mean"]}


def declared(preset: str, epsilons: list[float]) -> list[Task]:
    """Return every run of a preset's trials."""
    trials = PRESETS[preset]
    return [
        {"problem": preset, "method": method, "epsilon": f"{epsilon:g}", "settings": settings, "seed": seed}
        for seed in range(trials.n_seeds)
        for epsilon in epsilons
        for method, all_settings in trials.settings.items()
        for settings in all_settings
    ]


def key_of(task: Task) -> tuple[Any, ...]:
    return tuple(task[name] for name in ("problem", "epsilon", "method", "settings", "seed"))


def table(preset: str, epsilons: list[float], lines: list[Task]) -> list[tuple[str, str, str, list[float]]]:
    """Return budget, method, settings and the accuracies by seed of all trials; refuses a table with gaps."""
    found = {key_of(line): float(line["accuracy"]) for line in lines}
    missing = [task for task in declared(preset, epsilons) if key_of(task) not in found]
    if missing:
        raise SystemExit(f"{len(missing)} runs are missing, the first is {missing[0]}; run them first.")
    trials = PRESETS[preset]
    return [
        (f"{epsilon:g}", method, settings, [found[preset, f"{epsilon:g}", method, settings, s] for s in seeds])
        for epsilon in epsilons
        for method, all_settings in trials.settings.items()
        for settings in all_settings
        for seeds in [range(trials.n_seeds)]
    ]


def best_settings(rows: list[tuple[str, str, str, list[float]]]) -> dict[str, list[str]]:
    """Return for every budget the changes that give each method its best trial; of equal ones the first."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for epsilon, method, settings, accuracies in rows:
        mean = sum(accuracies) / len(accuracies)
        if mean > best.get((epsilon, method), (-1.0, ""))[0] + 1e-12:
            best[epsilon, method] = mean, settings
    found: dict[str, list[str]] = {}
    for (epsilon, method), (_, settings) in best.items():
        found.setdefault(epsilon, []).append(f"algorithms.{method}={settings}")
    return found


def write_csv(rows: list[tuple[str, str, str, list[float]]], path: Path) -> None:
    """Write all trials, one a line."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        n_seeds = len(rows[0][3])
        writer.writerow(["epsilon", "method", "settings", *(f"seed {seed}" for seed in range(n_seeds)), "mean"])
        for epsilon, method, settings, accuracies in rows:
            numbers = [f"{x:.2f}" for x in (*accuracies, sum(accuracies) / n_seeds)]
            writer.writerow([epsilon, method, settings, *numbers])


def main() -> None:
    """Run what is missing, then print the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--epsilon", default="1,3,8,inf", help="budgets (default: %(default)s)")
    parser.add_argument("--runs", type=Path, required=True, help="lines of finished runs, read and appended to")
    parser.add_argument("--csv", type=Path, help="where to write the table of all trials")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    epsilons = epsilons_from(given.epsilon)
    done = {key_of(line) for line in read_lines(given.runs)}
    todo = [task for task in declared(given.preset, epsilons) if key_of(task) not in done]
    run_all(todo, outcome, given.runs, jobs=given.jobs, seconds=float("inf"))
    rows = table(given.preset, epsilons, read_lines(given.runs))
    if given.csv:
        write_csv(rows, given.csv)
    out = sys.stdout.write
    out("[epsilon.at]\n")
    for epsilon, changes in best_settings(rows).items():
        out(f"{epsilon} = [\n" + "".join(f'  "{change}",\n' for change in changes) + "]\n")


if __name__ == "__main__":
    main()
