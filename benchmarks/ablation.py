"""What each part of DQN-Fed brings, one part taken away at a time; the tables of docs/results/ablation.md.

    python benchmarks/ablation.py run --out runs/ablation.jsonl --jobs 2 --seeds 0:5
    python benchmarks/ablation.py show --out runs/ablation.jsonl

All variants run at DQN-Fed's defaults and the preset's learning rate; in gradient mode there is none. `--only` chooses
problems, `--variants` variants by a part of their name; with `--seconds` no run is begun that would not end in time.
Lines are appended as runs end, and what is in the file is not run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.algorithms import dqn_fed
from dqnfed.algorithms.parts import cache, votes

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


def show(lines: list[dict[str, Any]]) -> None:
    """Print one table a problem, in Markdown."""
    out = sys.stdout.write
    for problem, variants in VARIANTS.items():
        found = {v: {x["seed"]: x for x in lines if (x["problem"], x["variant"]) == (problem, v)} for v in variants}
        if not found["default"]:
            continue
        out(f"\n### `{' '.join(runs.PROBLEMS[problem])}`, {len(found['default'])} seeds\n\n")
        out("| variant | mean | std | worst 10 % | mean against the default | worst 10 % against it |\n")
        out("|---|---|---|---|---|---|\n")
        for variant, by_seed in found.items():
            both = [s for s in by_seed if s in found["default"] and "curve" in by_seed[s]]
            if not both:
                out(f"| {variant} | - | - | - | {'; '.join(x.get('error', '') for x in by_seed.values())[:60]} | |\n")
                continue
            ends = np.array([runs.last_quarter(by_seed[s])[:3] for s in both])
            gaps = ends - np.array([runs.last_quarter(found["default"][s])[:3] for s in both])
            error = gaps.std(axis=0, ddof=1) / np.sqrt(len(both)) if len(both) > 1 else np.full(3, np.nan)
            cells = [f"{v:.1f}" for v in ends.mean(axis=0)]
            against = (
                [f"{gaps[:, i].mean():+.1f} ({error[i]:.1f})" for i in (0, 2)] if variant != "default" else ["", ""]
            )
            out(f"| {variant} | {' | '.join(cells + against)} |\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", default="0:5")
    parser.add_argument("--variants", nargs="*", default=[""])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs that would end later are not begun")
    given = parser.parse_args()
    lines = read_lines(given.out)
    if given.command == "show":
        show(lines)
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
