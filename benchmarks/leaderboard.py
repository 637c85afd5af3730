r"""Every network method tuned alike and run with five seeds; the lines behind docs/results/leaderboard.md.

    python benchmarks/leaderboard.py --out runs/leaderboard.jsonl --jobs 2
    python benchmarks/leaderboard.py --out runs/mine.jsonl --methods mine  # by an entry point, or several by commas
    python -m dqnfed.report.results leaderboard --from docs/results/data/leaderboard.json runs/mine.jsonl
    python benchmarks/leaderboard.py --out runs/leaderboard.jsonl --device cuda \
        --stored docs/results/data/leaderboard.json \
        --problems mnist-by-writer,cifar10-mlp --methods best:10  # of the small problems, and every form of DQN-Fed
    python -m dqnfed.report.results leaderboard --from docs/results/data/leaderboard.json runs/leaderboard.jsonl \
        --hardware "..."

First four values of one setting of every method, one seed, on validation data; then the best of them with five seeds
on test data, the model kept that has the lowest validation loss. Lines are appended as runs end, and what is in the
file is not run again: a call that is cut short, or has `--seconds`, goes on where it was. `--stored` names the page's
summary, whose runs need not be run again either. The runs of one problem and
seed come together, so that a process keeps its federation, and the longest of them come first.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from many_runs import read_lines, run_all

ALL = ("data.validation=0.1", "eval.select=loss", "eval.participants=false")
PROBLEMS: dict[str, tuple[str, ...]] = {  # the preset, and what is changed
    "heart": ("heart", "data.validation=0.2", "train.rounds=40", "eval.every=2"),
    "digits": (
        "digits", "train.participation=0.3", "train.epochs=2", "train.batch_size=16", "train.lr=0.3",
        "train.rounds=40", "eval.every=2",
    ),
    "fashion-mnist": (
        "fashion-mnist-dirichlet", "data.limit=6000", "model.hidden=[64]", "train.epochs=1", "train.batch_size=32",
        "train.lr=0.05", "train.lr_decay=1", "train.weight_decay=0", "train.rounds=40", "eval.every=2",
    ),
    "mnist-by-writer": ("mnist-by-writer", "eval.every=5"),
    "cifar10-mlp": ("cifar10-setup1", "train.rounds=500", "eval.every=25"),
}  # fmt: skip
ON_CPU = ("heart", "digits", "fashion-mnist")
TUNING_SEED = 99
RATES = (0.25, 0.5, 1.0, 2.0)  # times the problem's learning rate: the one setting of every method that uses it
# Methods whose most important setting is another one: those that divide the server's step by its own size, that lean on
# one strength, or that have no learning rate.
OTHERS: dict[str, dict[str, tuple[float, ...]]] = {
    "fedadam": {"server_lr": (0.003, 0.01, 0.03, 0.1)},
    "fedyogi": {"server_lr": (0.003, 0.01, 0.03, 0.1)},
    "fedavgm": {"server_lr": (0.1, 0.2, 0.5, 1.0)},
    "fairmoo": {"prefer": (0.003, 0.03, 0.3, 3.0)},  # the variance of losses above which it lowers nothing but that
    "fedns-ggn": {"damping": (0.01, 0.1, 1.0, 10.0)},
    "fednl-diag": {"mu": (0.01, 0.1, 1.0, 10.0)},
    "fednl-head": {"mu": (0.01, 0.1, 1.0, 10.0)},
    "fednew-cg": {"rho": (0.1, 1.0, 10.0, 100.0)},
}
LEFT_OUT = ("fedcorr",)  # for wrong labels: its sweeps would fill the run
REFERENCES = ("local-only", "pooled")
DQN_FED = ("dqn-fed", "dqn-fed-literal", "server-lbfgs")  # its forms; the literal one is expected to diverge
BEST = "best:"
SHOWN = ("mean", "std", "worst10", "min")
Task = dict[str, Any]


def methods_of(given: str, lines: list[Task]) -> list[str]:
    """Return the two references, FedAvg, which sets the target, and the methods that are named, the best or all."""
    from dqnfed.experiments.experiment import suitable_algorithms

    if given.startswith(BEST):
        found = [*best_methods(int(given.removeprefix(BEST)), lines), *DQN_FED]
    else:
        found = given.split(",") if given else [n for n in suitable_algorithms("network") if n not in LEFT_OUT]
    return list(dict.fromkeys([*REFERENCES, "fedavg", *found]))


def check_method(name: str) -> None:
    """Refuse a method that there is not, before anything is run."""
    from dqnfed.experiments.experiment import method_named

    method_named(name)


def best_methods(count: int, lines: list[Task]) -> list[str]:
    """Return so many methods in the order of the page's table of mean ranks over the problems for a CPU."""
    from dqnfed.report.leaderboard import by_problem, by_rank, comparable

    runs = [line for line in lines if line["kind"] == "test" and "error" not in line]
    problems = by_problem([run for run in runs if run["problem"] in ON_CPU])
    if missing := set(ON_CPU) - problems.keys():
        raise ValueError(
            f"the best methods are those of {', '.join(ON_CPU)}, and --out has no run of {', '.join(sorted(missing))}; "
            "run these problems first, give --stored, or name the methods."
        )
    return by_rank({problem: comparable(methods) for problem, methods in problems.items()})[:count]


def config_of(task: Task) -> Any:
    """Return the config of one run."""
    from dqnfed.experiments.config import read_config

    preset, *changes = PROBLEMS[task["problem"]]
    chosen = [f"algorithms.{task['method']}.{key}={value:g}" for key, value in task["settings"].items()]
    part = ["eval.part=validation"] if task["kind"] == "tune" else []
    one = ["run.threads=1"] if task["device"] == "cpu" else []
    general = [f"algorithm.name={task['method']}", f"run.seed={task['seed']}", f"run.device={task['device']}"]
    return read_config(preset, [*ALL, *changes, *general, *one, *chosen, *part])


def trials_of(problem: str, method: str, device: str) -> list[dict[str, float]]:
    """Return the settings that are tried; none where a method has nothing of these."""
    from dqnfed.experiments.experiment import build_algorithm
    from dqnfed.experiments.settings import unused_of

    if method in OTHERS:
        [(key, values)] = OTHERS[method].items()
        return [{key: value} for value in values]
    config = config_of({"problem": problem, "method": method, "seed": 0, "settings": {}, "device": device, "kind": ""})
    algorithm = build_algorithm(config)
    if "lr" in unused_of(algorithm):
        return []
    return [{"lr": factor * algorithm.lr} for factor in RATES]


def outcome(task: Task) -> Task:
    """Run one task and return its line."""
    from dqnfed.experiments.experiment import run_experiment

    begin = time.perf_counter()
    try:
        result = run_experiment(config_of(task), None)
    except Exception as error:  # what a method cannot do is a result
        return {**task, "error": f"{type(error).__name__}: {error}"[:300]}
    summary, history = result.summary, result.history[1:]
    up, down, curve = 0.0, 0.0, []
    for record in history:
        up, down = up + record["bytes_up"], down + record["bytes_down"]
        if record["accuracy"] is not None and record["accuracy"]["mean"] is not None:
            curve.append([record["round"] + 1, round(record["accuracy"]["mean"], 2), int(up + down)])
    kept = summary.get("kept_round")
    last = history[-1]["round"] if kept is None else kept
    clients = {row[1]: row[5] for row in result.client_rows if row[0] == last}
    asked = sum(len(record["clients"]) for record in history)
    return {
        **task,
        "status": summary["status"],
        "accuracy": {name: summary["accuracy"][name] for name in SHOWN},
        "clients": [None if clients[c] is None else round(clients[c], 2) for c in sorted(clients)],
        "curve": curve,
        "rounds": len(history),
        "passes": round(summary["totals"]["passes"] / max(1, asked), 2),
        "bytes_up": round(up / max(1, asked)),
        "train_seconds": round(summary["totals"]["seconds"], 2),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def best_of(lines: list[Task], problem: str, method: str) -> dict[str, float]:
    """Return the settings with the highest mean on validation data; none where none was tried or could run."""
    tried = [
        line
        for line in lines
        if (line["kind"], line["problem"], line["method"]) == ("tune", problem, method) and "error" not in line
    ]
    found = max(tried, key=lambda line: -math.inf if (s := score(line)) != s else s, default=None)
    return {} if found is None else dict(found["settings"])


def score(line: Task) -> float:
    """Return the mean accuracy that a trial ended with."""
    mean = line["accuracy"]["mean"]
    return math.nan if mean is None else float(mean)


def tasks(kind: str, lines: list[Task], problems: list[str], methods: list[str], given: Any) -> Iterator[Task]:
    """Yield the tasks of a stage, ordered so that a process keeps its federation."""
    seeds = [TUNING_SEED] if kind == "tune" else range(given.seeds)
    for problem in problems:
        for seed in seeds:
            for method in methods:
                base = {"kind": kind, "problem": problem, "method": method, "seed": seed, "device": given.device}
                tuned = (
                    trials_of(problem, method, given.device) if kind == "tune" else [best_of(lines, problem, method)]
                )
                yield from ({**base, "settings": settings} for settings in tuned)


def durations(lines: list[Task], device: str | None = None) -> dict[tuple[str, str], float]:
    """Return the longest time of every problem and method, on the device or on any."""
    found: dict[tuple[str, str], float] = {}
    for line in lines:
        if "seconds" in line and device in (None, line["device"]):
            pair = line["problem"], line["method"]
            found[pair] = max(found.get(pair, 0.0), line["seconds"])
    return found


def expected_durations(
    pairs: set[tuple[str, str]], known: dict[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Return the known times of the pairs; for others the problem's median times the method's multiple elsewhere."""
    medians = {problem: median(t for (p, _), t in known.items() if p == problem) for problem, _ in known}
    multiple: dict[str, float] = {}
    for (problem, method), seconds in known.items():
        multiple[method] = max(multiple.get(method, 0.0), seconds / max(medians[problem], 1e-9))
    return {(p, m): known.get((p, m), medians.get(p, 1.0) * multiple.get(m, 0.0)) for p, m in pairs}


def longest_first(todo: list[Task], lines: list[Task]) -> list[Task]:
    """Return the tasks with those of one problem and seed together and, in these and of problems, the longest first."""
    pair = itemgetter("problem", "method")
    expected = expected_durations({pair(task) for task in todo}, durations(lines))
    total: dict[str, float] = {}
    for task in todo:
        total[task["problem"]] = total.get(task["problem"], 0.0) + expected[pair(task)]
    return sorted(todo, key=lambda t: (-total[t["problem"]], t["problem"], t["seed"], -expected[pair(t)]))


def known_lines(given: Any) -> list[Task]:
    """Return the lines of the file, and those of the stored summary, whose trials had the tuning seed."""
    from dqnfed.report.leaderboard import stored_lines

    stored = [] if given.stored is None else [{"seed": TUNING_SEED, **line} for line in stored_lines(given.stored)]
    return [*stored, *read_lines(given.out)]


def key(task: Task) -> str:
    """Return what identifies a task."""
    return json.dumps([task[name] for name in ("kind", "problem", "method", "seed", "settings")])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard.jsonl"))
    parser.add_argument("--problems", default=",".join(ON_CPU), help=f"of {', '.join(PROBLEMS)}, separated by commas")
    parser.add_argument(
        "--methods", default="", help="names, or best:10 of the small problems; default: all for networks"
    )
    parser.add_argument("--seeds", type=int, default=5, help="the first so many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--stored", type=Path, help="the page's summary, to go on from")
    parser.add_argument("--seconds", type=float, default=math.inf, help="runs that would end later are not begun")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    problems, begin = given.problems.split(","), time.monotonic()
    if unknown := set(problems) - PROBLEMS.keys():
        parser.error(f"there is no problem {sorted(unknown)[0]}; there are {', '.join(PROBLEMS)}.")
    try:
        methods = methods_of(given.methods, known_lines(given))
        for name in methods:
            check_method(name)
    except ValueError as error:
        parser.error(str(error))
    for kind in ("tune", "test"):
        lines = known_lines(given)
        done = {key(line) for line in lines}
        todo = [task for task in tasks(kind, lines, problems, methods, given) if key(task) not in done]
        left = given.seconds - (time.monotonic() - begin)
        known = durations(lines, given.device)
        run_all(longest_first(todo, lines), outcome, given.out, jobs=given.jobs, seconds=left, known=known)
        done = {key(line) for line in known_lines(given)}
        if waiting := sum(key(task) not in done for task in todo):
            sys.exit(f"{waiting} runs of '{kind}' are left; the same command goes on.")


if __name__ == "__main__":
    main()
