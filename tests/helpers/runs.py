"""Run folders made up from a seed, in the exact format that the simulator writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

METHODS = {  # final mean accuracy, spread over clients, rounds until it gets there, share of improved clients
    "fedavg": (71.0, 12.0, 60.0, 0.80),
    "q-ffl": (70.0, 9.0, 80.0, 0.82),
    "term": (72.0, 10.0, 55.0, 0.85),
    "fedmgda-plus": (69.5, 8.5, 70.0, 0.95),
    "dqn-fed": (75.0, 6.5, 20.0, 0.97),
}


def write_comparison(
    out: Path,
    *,
    name: str = "made-up",
    algorithms: Sequence[str] = tuple(METHODS),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    rounds: int = 40,
    n_clients: int = 20,
    eval_every: int = 1,
    participation: float = 1.0,
    groups: Sequence[str] = (),
    one_class_each: bool = False,
) -> list[Path]:
    """Write OUT/<algorithm>/<seed>/ for every algorithm and seed and return the folders."""
    return [
        write_run(
            out / algorithm / str(seed),
            name=name,
            algorithm=algorithm,
            seed=seed,
            rounds=rounds,
            n_clients=n_clients,
            eval_every=eval_every,
            participation=participation,
            groups=groups,
            one_class_each=one_class_each,
        )
        for algorithm in algorithms
        for seed in seeds
    ]


def write_run(
    folder: Path,
    *,
    name: str = "made-up",
    algorithm: str = "dqn-fed",
    seed: int = 0,
    rounds: int = 40,
    n_clients: int = 20,
    eval_every: int = 1,
    participation: float = 1.0,
    groups: Sequence[str] = (),
    one_class_each: bool = False,
    finished: bool = True,
    with_global_model: bool = False,
) -> Path:
    """Write one run folder and return it; `finished=False` leaves out the summary, as a run in progress does."""
    folder.mkdir(parents=True, exist_ok=True)
    partition = np.random.default_rng([seed, n_clients])
    clients = _clients(partition, n_clients, groups, one_class_each)
    offset = partition.normal(size=n_clients)  # the same clients are hard for every method: seeds pair up
    rng = np.random.default_rng([seed, *algorithm.encode()])
    final, spread, pace, improved = METHODS.get(algorithm, (70.0, 10.0, 60.0, 0.85))
    final += rng.normal(scale=0.6)
    n_train = [int(c["n_train"]) for c in clients]  # type: ignore[call-overload]
    lines, rows = (
        [],
        ["round,client,n,loss_before,loss_after,accuracy" + (",accuracy_global" if with_global_model else "")],
    )
    n_sampled = max(1, round(participation * n_clients))
    loss = np.full(n_clients, 2.3)
    accuracy: NDArray[np.float64] = np.full(n_clients, 10.0)
    totals = {"bytes_up": 0, "bytes_down": 0, "passes": 0.0, "seconds": 0.0}
    records = []
    for t in range(-1, rounds):
        start = t == -1
        sampled = [] if start else sorted(rng.choice(n_clients, n_sampled, replace=False).tolist())
        progress = 1 - np.exp(-(t + 1) / (pace * rounds / 200 + 1e-9))
        before, loss = (
            loss,
            2.3 * (1 - 0.9 * progress) * (1 + 0.1 * offset * progress) + rng.normal(scale=0.01, size=n_clients),
        )
        evaluated = start or t % eval_every == eval_every - 1 or t == rounds - 1
        if evaluated:
            raw = 10 + (final - 10) * progress + spread * progress * offset + rng.normal(scale=0.8, size=n_clients)
            accuracy = np.round(np.clip(raw, 0, 100), 2)
        rho = float(min(1.0, rng.binomial(max(1, n_sampled), improved) / max(1, n_sampled)))
        record: dict[str, object] = {
            "round": t,
            "status": "next",
            "clients": sampled,
            "rho": None if start else rho,
            "loss_before": None if start else float(before[sampled].mean()),
            "loss_after": None if start else float(loss[sampled].mean()),
            "train_loss": {"mean": float(loss.mean()), "max": float(loss.max())},
            "accuracy": summary_of(accuracy, n_train) if evaluated else None,
            "bytes_up": 0 if start else 4 * 2410 * n_sampled,
            "bytes_down": 0 if start else 8 * 2410 * n_sampled,
            "passes": 0.0 if start else 2.0 * n_sampled,
            "seconds": 0.0 if start else float(0.05 + 0.01 * rng.random()),
            "dropped": [],
            "clipped": [],
            "diagnostics": {"residual": 0.0},
        }
        shared = np.clip(accuracy - 5.0, 0, 100)
        if with_global_model and evaluated:
            record["models"] = {"global": summary_of(shared, n_train)}
        for key in totals:
            totals[key] += record[key]  # type: ignore[operator]
        records.append(record)
        lines.append(json.dumps(record))
        for k in range(n_clients) if evaluated else sampled:
            took_part = k in sampled
            cells = [str(t), str(k), str(n_train[k])]
            cells += [f"{before[k]:.6f}", f"{loss[k]:.6f}"] if took_part else ["", ""]
            cells += [f"{accuracy[k]:.2f}" if evaluated else ""]
            cells += [f"{shared[k]:.2f}" if evaluated else ""] if with_global_model else []
            rows.append(",".join(cells))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "clients.csv").write_text("\n".join(rows) + "\n")
    (folder / "clients.json").write_text(json.dumps(clients))
    (folder / "config.toml").write_text(
        f'name = "{name}"\n[data]\nname = "digits"\nn_clients = {n_clients}\n[model]\nname = "mlp"\nhidden = [32]\n'
        f'[algorithm]\nname = "{algorithm}"\n[train]\nrounds = {rounds}\nepochs = 1\nbatch_size = 0\nlr = 0.1\n'
        f"participation = {participation}\n[eval]\nevery = {eval_every}\n[policy]\n[run]\nseed = {seed}\n[track]\n"
    )
    (folder / "env.json").write_text(
        json.dumps(
            {
                "dqnfed": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.0", "platform": "Linux x86_64",
                "device": "cpu", "threads": 2, "started": f"2026-11-15T09:0{seed % 10}:00+00:00",
                "command": f"dqnfed run {name} --algorithm {algorithm} --seed {seed}",
            }
        )
    )  # fmt: skip
    if finished:
        rhos = [r["rho"] for r in records if r["rho"] is not None]
        summary = {
            "name": name, "algorithm": algorithm, "seed": seed, "version": "0.1.0", "rounds": rounds,
            "status": "finished", "reason": "all rounds done", "accuracy": records[-1]["accuracy"], "score": "accuracy",
            "train_loss": records[-1]["train_loss"],
            "start": {"accuracy": records[0]["accuracy"], "train_loss": records[0]["train_loss"]},
            "models": records[-1].get("models", {}), "rho_mean": sum(rhos) / max(1, len(rhos)),  # type: ignore[arg-type]
            "totals": totals, "n_dropped": 0, "n_clipped": 0,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def summary_of(accuracy: NDArray[np.float64], n_train: Sequence[int]) -> dict[str, float]:
    """Return the measures that the simulator records, written out client by client."""
    a = sorted(float(x) for x in accuracy)
    K = len(a)
    mean = sum(a) / K
    std = (sum((x - mean) ** 2 for x in a) / K) ** 0.5
    five, ten = max(1, K * 5 // 100), max(1, K * 10 // 100)
    total = sum(a)
    return {
        "mean": mean, "std": std, "min": a[0], "max": a[-1],
        "worst10": sum(a[:ten]) / ten, "best10": sum(a[-ten:]) / ten,
        "worst5": sum(a[:five]) / five, "best5": sum(a[-five:]) / five,
        "angle": float(np.degrees(np.arctan2(std, mean))),
        "kl": sum(x / total * float(np.log(K * x / total)) for x in a if x > 0),
        "jain": total**2 / (K * sum(x * x for x in a)),
        "gini": sum(abs(x - y) for x in a for y in a) / (2 * K * total) if K <= 200 else 0.0,
        "weighted_mean": float(np.average(accuracy, weights=n_train)),
    }  # fmt: skip


def _clients(
    rng: np.random.Generator, n_clients: int, groups: Sequence[str], one_class_each: bool
) -> list[dict[str, object]]:
    clients: list[dict[str, object]] = []
    for k in range(n_clients):
        size = int(rng.integers(40, 200))
        labels = {str(k): size}
        if not one_class_each:
            first, second = (int(x) for x in rng.choice(10, 2, replace=False))
            labels = {str(first): size // 2, str(second): size - size // 2}
        clients.append(
            {
                "client": k,
                "name": f"client {k}" if not one_class_each else ("shirt", "pullover", "T-shirt")[k % 3],
                "n_train": size,
                "n_test": size // 4,
                "labels": labels,
                "group": groups[k % len(groups)] if groups else None,
            }
        )
    return clients
