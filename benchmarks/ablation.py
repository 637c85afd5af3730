"""What each part of DQN-Fed brings, one part taken away at a time; the tables of docs/results/ablation.md.

    python benchmarks/ablation.py run --out runs/ablation.jsonl --jobs 2 --seeds 0:5
    python benchmarks/ablation.py page --out runs/ablation.jsonl --hardware "two cores"  # stores the runs, too
    python benchmarks/ablation.py rebuild                                                # the page from what is stored

All variants run at DQN-Fed's defaults and the preset's learning rate; in gradient mode there is none. `--only` chooses
problems, `--variants` variants by a part of their name; with `--seconds` no run is begun that would not end in time.
Lines are appended as runs end, and what is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.algorithms import dqn_fed
from dqnfed.algorithms.parts import cache, votes
from dqnfed.core.numerics import NUMERICS

sys.path.insert(0, str(Path(__file__).parent))
import local_training as runs
from many_runs import read_lines, run_all

NEVER = 1e300
KEPT: dict[str, Any] = {
    "LEAST": cache.LEAST,
    "RISE": votes.RISE,
    "RISE_ALL": votes.RISE_ALL,
    "insert": cache.Cache.insert,
    "client_step": dqn_fed.DQNFed.client_step,
    "retreat_by": votes.Votes.retreat_by,
    "is_above_start": votes.Votes.is_above_start,
}
# Settings of the method, and constants of its modules that have no setting.
PARTIAL: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "default": ({}, {}),
    "no absent rows": ({"cached_clients": 0}, {}),
    "absent rows without credit": ({}, {"cache.LEAST": 1.0}),
    "length of the mean step, no votes": ({"step": "match"}, {}),
    "votes without the guard by losses": ({}, {"votes.RISE": NEVER}),
    "no step is taken back": ({}, {"retreat": NEVER}),
    "ends where no step helps everybody": ({"beyond": "stop"}, {}),
}
TRIED: dict[str, tuple[dict[str, Any], dict[str, float]]] = {  # with local training; not kept
    "tried: credit learnt from the client's next reply": ({}, {"learnt credit": 1.0}),
    "tried: rows as long as a secant of the local training says": ({}, {"secant": 1.0}),
}
RATES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    f"rates: {rule}": ({"rates": rule}, {}) for rule in ("cauchy", "identity", "loss")
}
ALL: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "default": ({}, {}),
    "no metric": ({"metric": "identity"}, {}),
    "votes instead of curvatures": ({"step": "votes"}, {}),
    "no step is taken back": ({}, {"retreat": NEVER}),
    "ends where no step helps everybody": ({"beyond": "stop"}, {}),
    **RATES,
}
LOCAL_ALL = {k: PARTIAL[k] for k in PARTIAL if "absent" not in k}
EXTRA: dict[str, tuple[str, ...]] = {
    "digits-full": ("digits", "train.rounds=60", "eval.every=5"),
    "setup1-short": ("cifar10-setup1", "train.rounds=200", "eval.every=20"),
    "setup1-full-short": ("cifar10-setup1-full", "train.rounds=160", "eval.every=20"),
}
runs.PROBLEMS |= EXTRA
VARIANTS = {
    "digits-10": PARTIAL | TRIED,
    "digits-30": PARTIAL | TRIED,
    "heart": LOCAL_ALL,
    "setup1-short": PARTIAL,
    "writers": PARTIAL,
    "digits-full-10": PARTIAL | RATES,
    "digits-full-30": PARTIAL | RATES,
    "setup1-full-short": PARTIAL | RATES,
    "digits-full": ALL,
    "heart-full": ALL,
}


def learn_credit(self: Any, state: Any, cohort: Any, replies: Any, cut: Any, products: np.ndarray) -> Any:
    """Move the share of a reached rate that stays towards what clients that come again still want along their row."""
    for k, client in enumerate(cohort.clients.tolist()):
        for r in (state.client == client).nonzero().flatten().tolist():
            rate, reached = float(state.rate[r]), float(state.reached[r])
            if rate > 0.0 and reached > 0.5 * rate:
                wanted = min(max(float(products[k, len(cohort.clients) + r]) / rate, 0.0), 1.0)
                cache.LEAST = 0.9 * cache.LEAST + 0.1 * wanted
    return KEPT["insert"](self, state, cohort, replies, cut, products)


def train_and_measure(self: Any, problem: Any, task: Any, sent: Any, memory: Any) -> Any:
    """Return the local update, as long as the minimum of the client's parabola along it (two more gradients)."""
    update, memory = KEPT["client_step"](self, problem, task, sent, memory)
    delta = update.gradient
    (before, _), (after, _) = problem.kernels.gradients(problem, (sent.theta, sent.theta - delta), task)
    slope, curved = (delta * before).sum(), (delta * (before - after)).sum()
    factor = torch.where((slope > 0) & (curved > 0), slope / curved.clamp(min=1e-30), torch.ones_like(slope))
    return update._replace(gradient=factor.clamp(0.3, 3.0) * delta), memory


def outcome(task: dict[str, Any]) -> dict[str, Any]:
    """Run one variant and return its line."""
    settings, constants = VARIANTS[task["problem"]][task["variant"]]
    cache.LEAST = constants.get("cache.LEAST", KEPT["LEAST"])
    votes.RISE = constants.get("votes.RISE", KEPT["RISE"])
    votes.RISE_ALL = constants.get("votes.RISE", KEPT["RISE_ALL"])
    votes.Votes.retreat_by = (lambda *_: 1.0) if "retreat" in constants else KEPT["retreat_by"]
    votes.Votes.is_above_start = (lambda *_: False) if "retreat" in constants else KEPT["is_above_start"]
    cache.Cache.insert = learn_credit if "learnt credit" in constants else KEPT["insert"]
    dqn_fed.DQNFed.client_step = train_and_measure if "secant" in constants else KEPT["client_step"]
    extra = [f"algorithms.dqn-fed.{k}={v}" for k, v in settings.items()]
    return {**runs.outcome({**task, "settings": {}, "extra": extra}), "variant": task["variant"]}


def stored_rows(lines: list[dict[str, Any]], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is kept of the runs: of every variant of a problem the last quarter's scores by seed."""
    rows = []
    for problem, variants in VARIANTS.items():
        for variant in variants:
            found = [x for x in lines if (x["problem"], x["variant"]) == (problem, variant)]
            runs_ = [{"seed": x["seed"], "scores": scores(x)} for x in sorted(found, key=lambda x: x["seed"])]
            if runs_:
                rows.append({"problem": problem, "method": variant, "runs": runs_, **about})
    return rows


def scores(line: dict[str, Any]) -> list[float] | None:
    """Return mean, std and worst 10 % over the last quarter of a run; None where it could not run."""
    return [round(float(v), 4) for v in runs.last_quarter(line)[:3]] if "curve" in line else None


def section(problem: str, rows: list[dict[str, Any]]) -> str:
    """Return a problem's heading and table."""
    by_variant = {r["method"]: {run["seed"]: run["scores"] for run in r["runs"] if run["scores"]} for r in rows}
    default = by_variant["default"]
    head = f"### `{' '.join(runs.PROBLEMS[problem])}`, {len(default)} seeds"
    about = f"Stored: {rows[0]['hardware']}, commit `{rows[0]['commit']}`, NUMERICS {rows[0]['numerics']}."
    out = [head, "", about, ""]
    out += [
        "| variant | mean | std | worst 10 % | mean against the default | worst 10 % against it |",
        "|---" * 6 + "|",
    ]
    for variant, by_seed in by_variant.items():
        both = [seed for seed in by_seed if seed in default]
        if not both:
            out.append(f"| {variant} | - | - | - | - | - |")
            continue
        ends = np.array([by_seed[seed] for seed in both])
        gaps = ends - np.array([default[seed] for seed in both])
        error = gaps.std(axis=0, ddof=1) / np.sqrt(len(both)) if len(both) > 1 else np.full(3, np.nan)
        cells = [f"{v:.1f}" for v in ends.mean(axis=0)]
        against = [f"{gaps[:, i].mean():+.1f} ({error[i]:.1f})" for i in (0, 2)] if variant != "default" else ["", ""]
        out.append(f"| {variant} | {' | '.join(cells + against)} |")
    return "\n".join(out) + "\n"


def with_tables(page: str, rows: list[dict[str, Any]]) -> str:
    """Return the page with the sections of stored problems made anew; the others keep what they say."""
    for problem in dict.fromkeys(row["problem"] for row in rows):
        start = page.find(f"### `{' '.join(runs.PROBLEMS[problem])}`")
        if start < 0:
            raise ValueError(f"the page has no heading '### `{' '.join(runs.PROBLEMS[problem])}`' for {problem}.")
        end = page.find("\n### ", start)
        rest = "" if end < 0 else page[end:]
        page = page[:start] + section(problem, [row for row in rows if row["problem"] == problem]) + rest
    return page


def rebuild(page: Path) -> None:
    """Write a page's tables from the runs that are stored beside it."""
    stored = page.with_suffix(".json")
    if not stored.is_file():
        sys.exit(f"there is no {stored}; `ablation.py run` measures it, and `ablation.py page` stores the runs.")
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, json.loads(stored.read_text(encoding="utf-8"))), encoding="utf-8")


def store(lines: list[dict[str, Any]], page: Path, hardware: str) -> None:
    """Store the runs beside the page; of a problem that was measured anew they take the place of what was there."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"numerics": NUMERICS, "commit": commit.stdout.strip() or "unknown", "hardware": hardware}
    new, path = stored_rows(lines, about), page.with_suffix(".json")
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    measured = {row["problem"] for row in new}
    kept = [row for row in old if row["problem"] not in measured]
    path.write_text(json.dumps([*kept, *new], separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "page", "rebuild"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablation.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/ablation.md"))
    parser.add_argument("--hardware", default="not stated")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", default="0:5")
    parser.add_argument("--variants", nargs="*", default=[""])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs that would end later are not begun")
    given = parser.parse_args()
    lines = read_lines(given.out)
    if given.command != "run":
        if given.command == "page":
            store(lines, given.page, given.hardware)
        rebuild(given.page)
        return
    first, last = map(int, given.seeds.split(":"))
    done = {(x["problem"], x["variant"], x["seed"]) for x in lines}
    todo = [
        {"kind": "ablation", "problem": problem, "method": "dqn-fed", "variant": variant, "seed": seed}
        for problem in given.only
        for seed in range(first, last)
        for variant in VARIANTS[problem]
        if any(part in variant for part in given.variants) and (problem, variant, seed) not in done
    ]
    run_all(todo, outcome, given.out, jobs=given.jobs, seconds=given.seconds)


if __name__ == "__main__":
    main()
