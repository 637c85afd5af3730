r"""Every table of the paper, its methods tuned alike: the lines behind the pages of docs/results/tuned.toml.

    python benchmarks/tuned_tables.py mnist-by-writer --device cuda --jobs 6 --seconds 500
    python benchmarks/tuned_tables.py cifar10-setup2-cnn --only cifar10-setup2-cnn-50 --methods dqn-fed,fedavg,fedlf
    python benchmarks/tuned_tables.py cifar100-setup1 --device cuda --keep runs/kept  # long runs go on where they were
    python -m dqnfed.report.results mnist-by-writer --from runs/mnist-by-writer.jsonl --hardware "..."

First the declared trials of every row, one seed, a third of the rounds, on validation examples; then the best of them
with the declared seeds, seed by seed, so that a table that was cut short has as many seeds in every row. Lines are
appended as runs end, and what is in the file is not run again: a call that is cut short, or has `--seconds`, goes on
where it was. Nor is what the page's stored summary holds, where it was computed alike (the same NUMERICS and settings):
a page gets more rows and seeds on another day or another machine. `--anew` runs everything. At the end of `--seconds`
runs are broken off; with `--keep` they go on later. A run that takes longer than `--longest` is broken off and noted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from many_runs import read_lines, run_all

from dqnfed.report.tuned import (
    NETWORKS,
    Row,
    Table,
    Trial,
    best_trial,
    declared,
    declared_names,
    refuse_mixed,
    stored_lines,
)

FOLDER = Path("docs/results")
TUNING_SEED = 99
SHARE_OF_ROUNDS = 3  # a trial has one round in three
Task = dict[str, Any]


class Given(NamedTuple):
    """What the command line says about every run."""

    device: str
    jobs: int
    commit: str
    hardware: str
    keep: str | None
    longest: float


class Watch:
    """Interrupts a run as Ctrl-C would, at a moment or after so many seconds; the round is finished."""

    def __init__(self, until: float, longest: float) -> None:
        self.until, self.latest = until, time.time() + longest

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        """Do nothing."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Interrupt the run if it is time."""
        if time.time() > min(self.until, self.latest):
            signal.raise_signal(signal.SIGINT)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""

    @property
    def took_longer(self) -> bool:
        """Whether the run took longer than it may."""
        return self.latest < min(self.until, time.time())


def config_of(task: Task) -> Any:
    """Return the config of one run; of the settings of methods only the declared ones count."""
    from dqnfed.experiments.config import AlgorithmBlock, read_config

    preset, *changes = task["words"]
    general = [f"name={task['experiment']}", f"run.seed={task['seed']}", f"run.device={task['device']}"]
    general += ["run.threads=1"] if task["device"] == "cpu" else []
    if task["kind"] == "tune":
        rounds = max(1, read_config(preset, changes).train.rounds // SHARE_OF_ROUNDS)
        general += [f"train.rounds={rounds}", f"data.validation={task['validation']:g}", "eval.part=validation"]
        general += ["eval.participants=false"]
    config = read_config(preset, [*changes, *general])
    settings = {**task["fixed"], **task["trial"]}
    if "lr" in task["trial"]:
        settings["lr"] = round(task["trial"]["lr"] * config.train.lr, 10)
    method = AlgorithmBlock(name=task["method"])
    return config.model_copy(update={"algorithm": method, "algorithms": {task["method"]: settings}})


def digest(task: Task) -> str:
    """Return a short name of everything that a run computes from."""
    plain = config_of(task).as_dict()
    plain["run"] = {k: v for k, v in plain["run"].items() if k not in ("device", "threads")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def outcome(task: Task) -> Task | None:
    """Run one task and return its line; None where it was broken off because the time is over."""
    from dqnfed.core.numerics import NUMERICS
    from dqnfed.experiments.experiment import method_named
    from dqnfed.report.result_summaries import run_summary

    names = ("kind", "experiment", "algorithm", "method", "seed", "trial", "config", "device", "commit", "hardware")
    line = {**{name: task[name] for name in names}, "numerics": NUMERICS}
    begin, watch = time.perf_counter(), Watch(task["until"], task["longest"])
    kept = Path(task["keep"]) / task["config"] if task["keep"] and task["kind"] == "test" else None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = run_into(config_of(task), kept, Path(scratch) / "run", watch)
            found = None if folder is None else run_summary(folder)
        except Exception as error:  # what a method cannot do is a result
            return {**line, "error": f"{type(error).__name__}: {error}"[:300]}
    if found is None or found["status"] == "interrupted":
        return {**line, "error": f"took longer than {task['longest']:g} s"} if watch.took_longer else None
    if kept is not None:
        shutil.rmtree(kept)
    wall = round(time.perf_counter() - begin, 2)
    if task["kind"] == "tune":
        return {**line, "score": found["late"].get("mean"), "settings": found["settings"], "wall": wall}
    return {**found, **line, "personal": method_named(task["method"]).info.personal, "wall": wall}


def run_into(config: Any, kept: Path | None, scratch: Path, watch: Watch) -> Path | None:
    """Run the experiment, or go on with it, and return its folder; None where nothing of it is to be kept."""
    from dqnfed.experiments.experiment import run_experiment

    if kept is not None:
        run_experiment(config, kept, observers=[watch], resume=(kept / "config.toml").is_file())
        return kept
    result = run_experiment(config, None, observers=[watch])
    return None if result.summary["status"] == "interrupted" else result.save(scratch)


def rows_of(table: Table, given: str) -> list[Row]:
    """Return the rows of a table, or those that are named."""
    from dqnfed.experiments.experiment import suitable_algorithms

    labels = given.split(",") if given else table.methods
    if labels == NETWORKS:
        labels = ["dqn-fed", *table.rows, "dqn-fed-literal", *suitable_algorithms("network")]
    return [table.row(label) for label in dict.fromkeys(labels)]


def choices(table: Table, out: Path) -> dict[str, Trial] | None:
    """Return what a smaller table of the same data chose for its rows; None where this table has trials of its own."""
    if table.settings_from is None:
        return None
    name, experiment = table.settings_from
    lines = read_lines(out.with_name(f"{name}.jsonl"))
    stored = FOLDER / "data" / f"{name}.json"
    runs = json.loads(stored.read_text(encoding="utf-8"))["runs"] if stored.is_file() else []
    found: dict[str, Trial] = {r["algorithm"]: r["trial"] for r in runs if r["experiment"] == experiment}
    labels = {line["algorithm"] for line in lines if line["experiment"] == experiment and line["kind"] == "tune"}
    best = {label: best_trial(lines, experiment, label) for label in labels}
    return {**found, **{label: trial for label, trial in best.items() if trial is not None}}


def known_lines(table: Table, out: Path, *, anew: bool) -> list[Task]:
    """Return the lines of the file, and those behind the page's stored summary, but for what failed on that machine."""
    from dqnfed.core.numerics import NUMERICS

    stored = [] if anew else stored_lines(FOLDER / "data" / f"{table.name}.json", table, NUMERICS)
    return [*(line for line in stored if "error" not in line), *read_lines(out)]


def tasks(
    kind: str, table: Table, rows: list[Row], lines: list[Task], given: Given, *, seeds: int, only: list[str], out: Path
) -> Iterator[Task]:
    """Yield the tasks of a stage: trials row by row, runs seed by seed."""
    chosen = choices(table, out)
    for experiment in only:
        for seed in [TUNING_SEED] if kind == "tune" else range(seeds):
            for row in rows:
                if kind == "tune":
                    tried = table.trials_of(row.label)
                elif chosen is None:
                    tried = [best_trial(lines, experiment, row.label) or {}]
                else:
                    tried = [chosen[row.label]]
                for trial in tried:
                    task = {
                        "kind": kind, "experiment": experiment, "algorithm": row.label, "method": row.method,
                        "seed": seed, "trial": trial, "fixed": row.fixed, "words": table.experiments[experiment],
                        "validation": table.validation, **given._asdict(),
                    }  # fmt: skip
                    yield {**task, "config": digest(task)}


def key(task: Task) -> tuple[str, ...]:
    """Return what identifies a task."""
    return task["kind"], task["algorithm"], task["config"]


def kind_of(task: Task) -> tuple[str, str]:
    """Return which runs take equally long."""
    return f"{task['kind']} {task['experiment']}", task["algorithm"]


def present_commit() -> str:
    """Return the commit of the sources."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def hardware(device: str, jobs: int) -> str:
    """Return what the runs were computed on, in words."""
    together = f"{jobs} runs at a time" if jobs > 1 else "one run at a time"
    if device == "cpu":
        return f"a {platform.machine()} processor, one core a run, {together}"
    import torch

    return f"one {torch.cuda.get_device_name(0)}, {together}"


def n_seeds(text: str) -> int:
    """Return how many of the first seeds are meant."""
    first, _, last = text.rpartition(":")
    if first not in ("", "0"):
        raise argparse.ArgumentTypeError(f"seeds are the first so many, as 3 or 0:3, but '{text}' begins at {first}.")
    return int(last)


def check(table: Table, rows: list[Row], out: Path) -> None:
    """Refuse what cannot be measured, before anything runs."""
    from dqnfed.core.numerics import NUMERICS

    lines = read_lines(out)
    if lines:
        refuse_mixed(lines, NUMERICS)
    chosen = choices(table, out)
    missing = [] if chosen is None else [row.label for row in rows if row.label not in chosen]
    if missing and table.settings_from is not None:
        raise ValueError(
            f"{table.name} takes its settings from {' of '.join(reversed(table.settings_from))}, which has none for "
            f"{', '.join(missing)}; run that table first, or choose --methods."
        )


def main() -> None:
    """Run the command line."""
    from dqnfed.experiments.machine import chosen_device

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=declared_names(FOLDER))
    parser.add_argument("--out", type=Path, help="default: runs/TABLE.jsonl")
    parser.add_argument("--only", nargs="*", help="experiments of the table; default: all")
    parser.add_argument("--methods", default="", help="names of rows, separated by commas; default: those declared")
    parser.add_argument("--seeds", type=n_seeds, help="the first so many, 3 or 0:3; default: as declared")
    parser.add_argument("--stage", choices=("tune", "test", "both"), default="both")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="runs that would end later are not begun")
    parser.add_argument("--longest", type=float, default=math.inf, help="seconds that a run may take")
    parser.add_argument("--keep", help="a folder where unfinished runs are kept, to go on with them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--anew", action="store_true", help="run what the page's stored summary holds, too")
    parser.add_argument("--commit", help="of the sources; default: what git says")
    parser.add_argument("--hardware", help="default: what the machine says of itself")
    said = parser.parse_args()
    begin, table = time.time(), declared(said.table, FOLDER)
    out: Path = said.out or Path("runs") / f"{table.name}.jsonl"
    device = said.device or chosen_device("auto").type
    machine = said.hardware or hardware(device, said.jobs)
    given = Given(device, said.jobs, said.commit or present_commit(), machine, said.keep, said.longest)
    only = said.only or list(table.experiments)
    rows = rows_of(table, said.methods)
    if unknown := set(only) - table.experiments.keys():
        parser.error(f"{table.name} has no experiment {min(unknown)}; it has {', '.join(table.experiments)}.")
    try:
        check(table, rows, out)
    except ValueError as error:
        sys.exit(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    until, seeds = begin + said.seconds, said.seeds or table.seeds
    for kind in ("tune", "test") if said.stage == "both" else (said.stage,):
        lines = known_lines(table, out, anew=said.anew)
        done = {key(line) for line in lines}
        some = list(tasks(kind, table, rows, lines, given, seeds=seeds, only=only, out=out))
        todo = [{**task, "until": until} for task in some if key(task) not in done]
        known: dict[tuple[str, str], float] = {}
        for line in lines:
            known[kind_of(line)] = max(known.get(kind_of(line), 0.0), line.get("wall", 0.0))
        run_all(todo, outcome, out, jobs=said.jobs, seconds=until - time.time(), known=known, kind_of=kind_of)
        done = {key(line) for line in known_lines(table, out, anew=said.anew)}
        if waiting := sum(key(task) not in done for task in todo):
            sys.exit(f"{waiting} of {len(some)} runs of '{kind}' are left; the same command goes on.")


if __name__ == "__main__":
    main()
