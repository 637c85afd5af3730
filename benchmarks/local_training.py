"""DQN-Fed at its defaults against tuned baselines, with local training; every number of docs/results/local-training.md.

    python benchmarks/local_training.py tune --out runs/local.jsonl --jobs 6
    python benchmarks/local_training.py run  --out runs/local.jsonl --jobs 6 --seeds 0:5
    python benchmarks/local_training.py rates --out runs/local.jsonl --jobs 6 --seeds 0:3
    python benchmarks/local_training.py starts --out runs/local.jsonl --jobs 6 --seeds 0:5
    python benchmarks/local_training.py kept --out runs/local.jsonl --jobs 6 --seeds 0:5
    python benchmarks/local_training.py show --out runs/local.jsonl

`tune` takes one seed and validation data (a tenth of each client's), the same number of values for every method; `run`
takes each method's best value (mean score over the last quarter of the evaluations; of tuned.toml where the file has no
tuning); `rates` takes DQN-Fed and FedAvg
at 1/3, 1 and 3 times the preset's learning rate; `starts` takes DQN-Fed with one full gradient a round and different
step lengths at the start; `kept` the same at its defaults, the model of the lowest validation loss kept, with different
shares of the training examples held out for that. Lines are appended as runs end, and what is in the file is not run
again. `--only` chooses problems, `--methods` methods; with `--seconds` no run is begun that would not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from many_runs import read_lines, run_all

LOCAL_DIGITS = ("train.epochs=2", "train.batch_size=16", "train.lr=0.3", "train.rounds=60", "eval.every=5")
PROBLEMS: dict[str, tuple[str, ...]] = {
    "digits-10": ("digits", "train.participation=0.1", *LOCAL_DIGITS),
    "digits-30": ("digits", "train.participation=0.3", *LOCAL_DIGITS),
    "setup1": ("cifar10-setup1", "train.rounds=500", "eval.every=25"),
    "writers": ("mnist-by-writer", "eval.every=5"),
    "cnn-10": ("cifar10-setup2-cnn", "train.participation=0.1", "eval.every=5"),
    "cnn-50": ("cifar10-setup2-cnn", "train.participation=0.5", "eval.every=5"),
    "cnn-all": ("cifar10-setup2-cnn", "train.rounds=30", "eval.every=5"),
    "heart": ("heart", "eval.every=5"),
    "fashion": ("fashion-mnist", "train.batch_size=64", "train.rounds=60", "eval.every=5"),
}
FULL: dict[str, tuple[str, ...]] = {  # one full gradient a round
    "setup1-full": ("cifar10-setup1-full", "train.rounds=400", "eval.every=10"),
    "digits-full-10": ("digits", "train.participation=0.1", "eval.every=5"),
    "digits-full-30": ("digits", "train.participation=0.3", "eval.every=5"),
    "heart-full": ("heart", "train.epochs=1", "train.batch_size=full", "eval.every=5"),
}
PROBLEMS |= FULL
RATES = [0.3, 1.0, 2.0, 4.0]  # of the preset's learning rate
SLOW = [0.03, 0.1, 0.3, 1.0]
GRIDS: dict[str, list[dict[str, float]]] = {
    "fedavg": [{"lr": r} for r in RATES],
    "fedlf": [{"lr": r} for r in RATES],
    "scaffold": [{"lr": r} for r in RATES],
    "fedvarp": [{"lr": r} for r in RATES],
    "fedexp": [{"lr": r} for r in RATES],
    "fedavgm": [{"lr": r} for r in SLOW],
    "qffl": [{"q": q, "lr": r} for q in (0.1, 1.0) for r in (1.0, 2.0)],
    "term": [{"t": t, "lr": r} for t in (0.5, 2.0) for r in (1.0, 2.0)],
}
METHODS = ["dqn-fed", *GRIDS]
STARTS = (0.01, 0.1, 1.0)  # of the step length
HELD_OUT = (0.1, 0.05, 0.02)  # shares of the training examples that choose the model


def config_of(problem: str, method: str, settings: dict[str, float], seed: int, extra: tuple[str, ...] = ()) -> Any:
    """Return the config of one run; `lr` in the settings is a multiple of the preset's."""
    from dqnfed.experiments.config import read_config

    preset, *changes = PROBLEMS[problem]
    base = read_config(preset, changes)
    values = {k: v * base.train.lr if k == "lr" else v for k, v in settings.items()}
    sets = [f"algorithms.{method}.{k}={v:g}" for k, v in values.items()]
    device = "cuda" if os.environ.get("DQNFED_DEVICE") == "cuda" else "cpu"
    general = [f"algorithm.name={method}", f"run.seed={seed}", f"run.device={device}", "eval.participants=false"]
    return read_config(preset, [*changes, *general, *sets, *extra])


def outcome(task: dict[str, Any]) -> dict[str, Any]:
    """Run one task and return its line."""
    from dqnfed.experiments.experiment import run_experiment

    extra = ("data.validation=0.1", "eval.part=validation") if task["kind"] == "tune" else tuple(task.get("extra", ()))
    config = config_of(task["problem"], task["method"], task["settings"], task["seed"], extra)
    begin = time.perf_counter()
    try:
        result = run_experiment(config, None)
    except Exception as error:  # a diverged baseline is a result
        return {**task, "error": repr(error)[:300]}
    lines = [h for h in result.history if h.get("accuracy") and h["round"] >= 0]
    curve = [[h["round"] + 1, *(h["accuracy"][k] for k in ("mean", "std", "worst10", "min"))] for h in lines]
    loss = [h["train_loss"]["mean"] for h in result.history if h.get("train_loss")]
    seconds = time.perf_counter() - begin
    kept = [result.accuracy[k] for k in ("mean", "std", "worst10", "min")]  # with `eval.select`, the best by validation
    return {**task, "curve": curve, "kept": kept, "first_loss": loss[0], "last_loss": loss[-1], "seconds": seconds}


def key(task: dict[str, Any]) -> str:
    """Return what identifies a task."""
    return json.dumps([task[k] for k in ("kind", "problem", "method", "settings", "seed")] + [task.get("extra", [])])


def last_quarter(line: dict[str, Any]) -> np.ndarray:
    """Return mean, std, worst 10 % and worst client, averaged over the last quarter of the evaluations."""
    curve = np.array([[np.nan if v is None else v for v in row[1:]] for row in line["curve"]], dtype=float)
    return np.asarray(curve[-max(1, len(curve) // 4) :].mean(axis=0))


def kept_scores(line: dict[str, Any]) -> np.ndarray:
    """Return mean, std, worst 10 % and worst client of the model that was kept."""
    return np.asarray(line["kept"], dtype=float)


def best_settings(lines: list[dict[str, Any]], problem: str, method: str) -> dict[str, float]:
    """Return the tuned settings of a method: the highest mean on validation data."""
    tuned = [x for x in lines if (x["kind"], x["problem"], x["method"]) == ("tune", problem, method) and "curve" in x]
    if method == "dqn-fed":
        return {}
    if not tuned:
        known = tomllib.loads((Path(__file__).parent / "tuned.toml").read_text())
        return dict(known.get(problem, {}).get(method, {}))
    return dict(max(tuned, key=lambda x: np.nan_to_num(last_quarter(x)[0], nan=-1.0))["settings"])


def settings_of(kind: str, lines: list[dict[str, Any]], problem: str, method: str) -> Iterator[dict[str, Any]]:
    """Yield the settings that a command gives a method, and what it changes in the config."""
    if kind == "tune":
        yield from ({"settings": settings} for settings in GRIDS.get(method, []))
    elif kind == "run":
        yield {"settings": best_settings(lines, problem, method)}
    elif kind == "rates" and method in ("dqn-fed", "fedavg"):
        step = {"server_lr": 1.0} if method == "fedavg" else {}
        yield from ({"settings": {"lr": factor} | step} for factor in (1 / 3, 1.0, 3.0))
    elif kind == "starts" and method == "dqn-fed":
        extra = ["algorithms.dqn-fed.step=votes"]
        yield from ({"settings": {"step_size": start}, "extra": extra} for start in STARTS)
    elif kind == "kept" and method == "dqn-fed":
        yield from ({"settings": {}, "extra": [f"data.validation={share:g}", "eval.select=loss"]} for share in HELD_OUT)


def tasks(
    kind: str, problems: list[str], seeds: range, methods: list[str], lines: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a command."""
    for problem in problems:
        for seed in [99] if kind == "tune" else seeds:
            for method in methods:
                for chosen in settings_of(kind, lines, problem, method):
                    yield {"kind": kind, "problem": problem, "method": method, "seed": seed, **chosen}


def smoothed(line: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (round, mean score over up to three evaluations)."""
    curve = line["curve"]
    return [(row[0], float(np.mean([r[1] for r in curve[max(0, i - 2) : i + 1]]))) for i, row in enumerate(curve)]


def out(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


def rounds_to_fedavg(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the rounds to FedAvg's final mean, over FedAvg's own rounds to it."""
    target = smoothed(theirs)[-1][1]
    hits = [next((r for r, v in smoothed(x) if v >= target), np.inf) for x in (ours, theirs)]
    return float(hits[0] / hits[1])


def compared(mine: np.ndarray, theirs: np.ndarray) -> str:
    """Return the mean of the paired differences and its standard error."""
    gaps = mine - theirs
    if len(gaps) < 2:
        return ""
    return f"{gaps.mean():+.1f} ({gaps.std(ddof=1) / np.sqrt(len(gaps)):.1f})"


def show_comparison(problem: str, lines: list[dict[str, Any]]) -> None:
    """Print the table of one problem, in Markdown."""
    runs = [x for x in lines if x["kind"] == "run" and x["problem"] == problem and "curve" in x]
    if not runs:
        return
    found = {m: {x["seed"]: x for x in runs if x["method"] == m} for m in METHODS}
    ours, has_kept = found["dqn-fed"], PROBLEMS[problem][0] == "heart"  # the preset that keeps the best model
    ends = kept_scores if has_kept else last_quarter
    out(f"\n### `{' '.join(PROBLEMS[problem])}`{', kept models' if has_kept else ''}\n")
    out("| method | mean | std | worst 10 % | worst client | DQN-Fed's mean against it | worst 10 % | seeds | tuned |")
    out("|---|---|---|---|---|---|---|---|---|")
    for method, by_seed in found.items():
        both = sorted(set(ours) & set(by_seed))
        if not both:
            continue
        mine, theirs = (np.array([ends(x[s]) for s in both]) for x in (ours, by_seed))
        cells = [f"{v:.1f}" for v in np.array([ends(x) for x in by_seed.values()]).mean(axis=0)]
        against = ["", ""] if method == "dqn-fed" else [compared(mine[:, i], theirs[:, i]) for i in (0, 2)]
        tuned = ", ".join(
            f"{k} {'x' if k == 'lr' else ''}{v:g}" for k, v in next(iter(by_seed.values()))["settings"].items()
        )
        out(f"| {method} | {' | '.join([*cells, *against])} | {len(by_seed)} | {tuned} |")
    shares = [rounds_to_fedavg(ours[s], found["fedavg"][s]) for s in sorted(set(ours) & set(found["fedavg"]))]
    out(f"\nRounds to FedAvg's final mean, as a share of FedAvg's own, by seed: {np.round(shares, 2).tolist()}.")


def show_rates(problem: str, lines: list[dict[str, Any]]) -> None:
    """Print DQN-Fed and FedAvg at wrong learning rates."""
    runs = [x for x in lines if x["kind"] == "rates" and x["problem"] == problem]
    if not runs:
        return
    out(f"\n### `{' '.join(PROBLEMS[problem])}`: mean / worst 10 % of DQN-Fed, then FedAvg, at learning rates x\n")
    for ours in (x for x in runs if x["method"] == "dqn-fed"):
        same = [x for x in runs if x["method"] == "fedavg" and x["seed"] == ours["seed"]]
        theirs = next((x for x in same if x["settings"]["lr"] == ours["settings"]["lr"]), None)
        ends = [
            "error" if x is None or "error" in x else " / ".join(f"{v:.1f}" for v in last_quarter(x)[[0, 2]])
            for x in (ours, theirs)
        ]
        rose = "curve" in ours and not ours["last_loss"] <= ours["first_loss"]
        out(f"- x{ours['settings']['lr']:.2f}, seed {ours['seed']}: {', '.join(ends)}{', above its start' * rose}")


def show_starts(problem: str, lines: list[dict[str, Any]]) -> None:
    """Print DQN-Fed with one gradient a round and different lengths of the first step."""
    runs = [x for x in lines if x["kind"] == "starts" and x["problem"] == problem and "curve" in x]
    for start in sorted({x["settings"]["step_size"] for x in runs}):
        same = [x for x in runs if x["settings"]["step_size"] == start]
        ends = np.array([last_quarter(x) for x in same]).mean(axis=0)
        curve = np.array([[row[1] for row in x["curve"]] for x in same]).mean(axis=0)
        rounds = [row[0] for row in same[0]["curve"]]
        out(f"\n{problem}, start {start:g}, {len(same)} seeds: {' / '.join(f'{v:.1f}' for v in ends)}")
        out("  " + " ".join(f"{r}:{v:.1f}" for r, v in zip(rounds, curve, strict=True)))


def show_kept(problem: str, lines: list[dict[str, Any]]) -> None:
    """Print the models of the lowest validation loss."""
    runs = [x for x in lines if x["kind"] == "kept" and x["problem"] == problem and "kept" in x]
    for extra in sorted({tuple(x["extra"]) for x in runs}):
        same = [x for x in runs if tuple(x["extra"]) == extra]
        ends = np.array([kept_scores(x) for x in same])
        out(f"\n{problem}, {' '.join(extra)}, {len(same)} seeds: {' / '.join(f'{v:.1f}' for v in ends.mean(axis=0))}")
        out("  means by seed " + " ".join(f"{v:.1f}" for v in ends[:, 0]))


def show(lines: list[dict[str, Any]]) -> None:
    """Print all tables."""
    for part in (show_comparison, show_rates, show_starts, show_kept):
        for problem in PROBLEMS:
            part(problem, lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("tune", "run", "rates", "starts", "kept", "show"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(PROBLEMS), default=None)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", default="0:5")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs that would end later are not begun")
    given = parser.parse_args()
    lines = read_lines(given.out)
    if given.command == "show":
        show(lines)
        return
    usual = {"starts": list(FULL), "kept": ["setup1-full"]}
    only = given.only or usual.get(given.command, list(PROBLEMS.keys() - FULL))
    first, last = map(int, given.seeds.split(":"))
    done = {key(x) for x in lines}
    todo = tasks(given.command, only, range(first, last), given.methods, lines)
    run_all((t for t in todo if key(t) not in done), outcome, given.out, jobs=given.jobs, seconds=given.seconds)


if __name__ == "__main__":
    main()
