"""DQN-Fed at its defaults against FedAvg at the same learning rate, on small problems that are made to be hard.

    python benchmarks/hard_problems.py run --out runs/hard.jsonl --jobs 2 --problems 0:300
    python benchmarks/hard_problems.py show --out runs/hard.jsonl

Problem i is drawn from the number i: data, scale of the features, wrong labels, how clients are dealt (also duplicated
examples, conflicting labels, one class, three examples, one client that the start model already fits), model, clients a
round, local work and learning rate, few of them sensible. Lines are appended, and what is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dqnfed import DQNFed, FedAvg, Federation, Problem, run

DEALS = ("random", "sorted", "skewed", "repeated", "contradicting", "tiny", "fitted")


def examples(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Return features, labels and the number of classes."""
    kind, n = draw.choice(["digits", "clusters", "rings", "plane"]), int(draw.choice([60, 250, 800]))
    if kind == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        chosen = draw.permutation(len(found.target))[: max(n, 250)]
        return found.data[chosen] / 16.0, found.target[chosen], 10
    if kind == "clusters":
        classes, width = int(draw.choice([2, 4, 6])), int(draw.choice([3, 12, 40]))
        labels, centres = draw.integers(0, classes, n), draw.normal(size=(classes, width)) * draw.choice([0.3, 1.5])
        return centres[labels] + draw.normal(size=(n, width)), labels, classes
    if kind == "rings":
        radius, angle = draw.uniform(0.0, 3.0, n), draw.uniform(0.0, 2 * np.pi, n)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), radius.astype(int) % 2, 2
    features = draw.normal(size=(n, 15))
    return features, (features @ draw.normal(size=15) > 0).astype(int), 2


def dealt(draw: np.random.Generator, deal: str, labels: np.ndarray, n_clients: int) -> list[np.ndarray]:
    """Return the rows of each client, four at least but for tiny ones."""
    shuffled, by_label = draw.permutation(len(labels)), np.argsort(labels, kind="stable")
    if deal == "sorted":
        return np.array_split(by_label, n_clients)
    if deal == "tiny":
        small = shuffled[: 3 * (n_clients - 1)].reshape(n_clients - 1, 3)
        return [shuffled[3 * (n_clients - 1) :], *small]
    if deal == "skewed":
        pieces = np.array_split(by_label, 3 * n_clients)
        order = draw.permutation(3 * n_clients)
        return [np.concatenate([pieces[j] for j in order[3 * k : 3 * k + 3]]) for k in range(n_clients)]
    return np.array_split(shuffled, n_clients)


def problem_of(number: int) -> tuple[dict[str, Any], Federation, Problem]:
    """Return the settings of problem `number`, its clients and its model."""
    draw = np.random.default_rng([number, 2025])
    x, y, classes = examples(draw)
    scale, shift = float(draw.choice([1, 1, 1, 0.01, 10, 100])), float(draw.choice([0, 0, 3]))
    x = (x * scale + shift).astype(np.float32)
    wrong = draw.random(len(y)) < draw.choice([0.0, 0.0, 0.2, 0.5])
    y = np.where(wrong, draw.integers(0, classes, len(y)), y)
    deal, n_clients = str(draw.choice(DEALS)), min(int(draw.choice([2, 4, 8, 20, 50])), len(y) // 5)
    torch.manual_seed(number)
    width, hidden = x.shape[1], str(draw.choice(["none", "tanh", "relu", "two relu"]))
    layers: dict[str, list[nn.Module]] = {
        "none": [nn.Linear(width, classes)],
        "tanh": [nn.Linear(width, 20), nn.Tanh(), nn.Linear(20, classes)],
        "relu": [nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, classes)],
        "two relu": [nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, classes)],
    }
    model = nn.Sequential(*layers[hidden])
    clients = []
    for k, rows in enumerate(dealt(draw, deal, y, n_clients)):
        inputs, targets = torch.from_numpy(x[rows]), torch.from_numpy(y[rows])
        if deal == "repeated":
            inputs, targets = inputs[:1].expand_as(inputs).clone(), targets[:1].expand_as(targets).clone()
        if deal == "contradicting" and k % 2:
            targets = (targets + 1) % classes
        if deal == "fitted" and k == 0:
            inputs = inputs * 30.0
            targets = model(inputs).argmax(1).detach()
        clients.append((inputs, targets))
    settings = {
        "deal": deal,
        "scale": scale,
        "hidden": hidden,
        "clients": n_clients,
        "participation": float(draw.choice([1.0, 1.0, 0.5, 0.2, 0.1])),
        "epochs": int(draw.choice([1, 1, 3])),
        "batch_size": [None, None, 16][int(draw.integers(3))],
        "lr": float(draw.choice([0.01, 0.1, 0.3, 1.0])),
        "rounds": int(draw.choice([20, 40, 60])),
    }
    federation = Federation.from_clients(clients, test=0.2, seed=0, n_classes=classes)
    return settings, federation, Problem.from_module(model)


def outcome(number: int) -> dict[str, Any]:
    """Run both methods on one problem and return its line."""
    torch.set_num_threads(1)
    settings, federation, problem = problem_of(number)
    line: dict[str, Any] = {"problem": number, **settings}
    work = {key: settings[key] for key in ("lr", "epochs", "batch_size")}
    plan = {"rounds": settings["rounds"], "participation": settings["participation"], "seed": 0}
    for name, method in (("dqn-fed", DQNFed(**work)), ("fedavg", FedAvg(**work))):
        result = run(method, problem, federation, **plan)
        losses = [h["train_loss"]["mean"] for h in result.history if h.get("train_loss")]
        line[name] = {"first": losses[0], "last": losses[-1], "status": result.summary["status"]}
    return line


def show(lines: list[dict[str, Any]]) -> None:
    """Print how often each method ends lower, and how often above its start."""

    def kind(line: dict[str, Any]) -> str:
        local = "local training" if line["epochs"] > 1 or line["batch_size"] else "gradients"
        cohort = max(1, round(line["participation"] * line["clients"]))
        return f"{local}, {'all' if cohort == line['clients'] else 'one' if cohort == 1 else 'part'}"

    out = sys.stdout.write
    out("| problems | number | lower loss | higher | ends above its start | FedAvg does | only DQN-Fed | by over 5 % |")
    out("\n|---|---|---|---|---|---|---|---|\n")
    for name in [*sorted({kind(x) for x in lines}), "all"]:
        ours = [x for x in lines if name in ("all", kind(x))]
        ends = np.array([[x["dqn-fed"]["last"], x["fedavg"]["last"], x["dqn-fed"]["first"]] for x in ours], dtype=float)
        a, b, start = np.where(np.isfinite(ends), ends, np.inf).T
        rose, theirs = a > start * (1 + 1e-9), b > start * (1 + 1e-9)
        alone = rose & ~theirs
        counts = (a < 0.99 * b, a > 1.01 * b, rose, theirs, alone, alone & (a > 1.05 * start))
        out(f"| {name} | {len(ours)} | {' | '.join(str(int(c.sum())) for c in counts)} |\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", default="0:300")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.command == "show":
        show(lines)
        return
    first, last = map(int, given.problems.split(":"))
    todo = sorted(set(range(first, last)) - {x["problem"] for x in lines})
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.jobs) as pool, given.out.open("a") as file:
        for n, line in enumerate(pool.map(outcome, todo), 1):
            file.write(json.dumps(line) + "\n")
            file.flush()
            sys.stderr.write(f"{n} of {len(todo)}\r")


if __name__ == "__main__":
    main()
