"""The servers of FedFV, FedFa and FedLF and a min-norm solver, written again from their papers in plain NumPy.

Whole vectors instead of Gramians, loops instead of matrices: nothing is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
MinNorm = Callable[[FloatArray], FloatArray]


class FedFVOracle:
    """FedFV's server: project conflicts away, average, heed absent clients, restore the length."""

    def __init__(self, theta: FloatArray, alpha: float, tau: int) -> None:
        self.theta, self.alpha, self.tau = theta.copy(), alpha, tau
        self.seen: dict[int, tuple[int, FloatArray]] = {}

    def step(self, round: int, clients: Sequence[int], deltas: FloatArray, losses: FloatArray) -> None:
        m = len(clients)
        for client, delta in zip(clients, deltas, strict=True):
            self.seen[client] = (round, delta)
        order = sorted(range(m), key=lambda k: losses[k])
        untouched = order[math.ceil((m - 1) * (1 - self.alpha)) :] if self.alpha > 0 else []
        projected = [delta.copy() for delta in deltas]
        for i in range(m):
            if i in untouched:
                continue
            for j in order:
                product = float(deltas[j] @ projected[i])
                if j != i and product < 0:
                    projected[i] = projected[i] - product / float(deltas[j] @ deltas[j]) * deltas[j]
        g = np.mean(projected, axis=0)
        if round >= self.tau:
            for age in range(self.tau, 0, -1):
                against = [d for r, d in self.seen.values() if r == round - age and float(d @ g) < 0]
                total = np.sum(against, axis=0) if against else np.zeros_like(g)
                if float(total @ g) < 0:
                    g = g - float(total @ g) / float(total @ total) * total
        self.theta = self.theta - g / np.linalg.norm(g) * np.linalg.norm(np.mean(deltas, axis=0))


class FedFaOracle:
    """FedFa's server in terms of models: theta <- mean + c * velocity, velocity a running mean of the movements."""

    def __init__(self, theta: FloatArray, beta: float, gamma: float, c: float, n_clients: int) -> None:
        self.theta, self.beta, self.gamma, self.c = theta.copy(), beta, gamma, c
        self.movement = np.zeros_like(theta)
        self.n_rounds = [0] * n_clients

    def step(self, clients: Sequence[int], models: FloatArray, accuracies: Sequence[float]) -> None:
        for client in clients:
            self.n_rounds[client] += 1
        counts = [self.n_rounds[client] for client in clients]
        of_accuracy = [-math.log2(a / sum(accuracies) + 1e-6) for a in accuracies]
        of_count = [-math.log2(1 - f / sum(counts) + 1e-5) for f in counts]
        shares = [
            (1 - self.beta) * a / sum(of_accuracy) + self.beta * f / sum(of_count)
            for a, f in zip(of_accuracy, of_count, strict=True)
        ]
        mean = sum((p * model for p, model in zip(shares, models, strict=True)), np.zeros_like(self.theta))
        self.movement = self.gamma * self.movement + (1 - self.gamma) * (mean - self.theta)
        self.theta = mean + self.c * self.movement


class FedLFOracle:
    """FedLF's server: per layer the shortest vector among client, fair and past rows, all of one length."""

    def __init__(self, theta: FloatArray, sizes: Sequence[int], min_norm: MinNorm) -> None:
        self.theta, self.cuts, self.min_norm = theta.copy(), np.cumsum(sizes)[:-1], min_norm
        self.seen: dict[int, tuple[int, FloatArray]] = {}

    def step(self, round: int, clients: Sequence[int], deltas: FloatArray, losses: FloatArray) -> None:
        m, p = len(clients), np.full(len(clients), 1 / math.sqrt(len(clients)))
        size = float(np.linalg.norm(losses))
        h = ((losses @ p) * losses / size - p * size) / size**2
        past = []
        if len(self.seen) > m:
            window = len(self.seen) // m
            past = [d for c, (r, d) in sorted(self.seen.items()) if c not in clients and round - r <= window]
        pieces = []
        for layer, part in enumerate(np.split(deltas, self.cuts, axis=1)):
            length = float(np.mean(np.linalg.norm(part, axis=1)))
            rows = [length * row / np.linalg.norm(row) for row in part]
            fair = np.sum([w * row for w, row in zip(h, rows, strict=True)], axis=0)
            rows.append(length * fair / np.linalg.norm(fair))
            for old in past:
                piece = np.split(old, self.cuts)[layer]
                rows.append(length * piece / np.linalg.norm(piece))
            stacked = np.stack(rows)
            pieces.append(self.min_norm(stacked @ stacked.T) @ stacked)
        d = np.concatenate(pieces)
        self.theta = self.theta - d / np.linalg.norm(d) * np.linalg.norm(deltas.mean(axis=0))
        for client, delta in zip(clients, deltas, strict=True):
            self.seen[client] = (round, delta)


def frank_wolfe_weights(M: FloatArray, *, n_steps: int = 20000, gap: float = 1e-9) -> FloatArray:
    """Return min-norm weights by pairwise Frank-Wolfe with exact line search, to a duality gap relative to max M."""
    x = np.full(len(M), 1 / len(M))
    for _ in range(n_steps):
        slope = M @ x
        best = int(np.argmin(slope))
        worst = int(np.argmax(np.where(x > 0, slope, -np.inf)))
        if slope @ x - slope[best] <= gap * M.max():
            break
        move = np.zeros(len(M))
        move[best], move[worst] = 1.0, -1.0
        curvature = float(move @ M @ move)
        length = x[worst] if curvature <= 0 else min(x[worst], -float(slope @ move) / curvature)
        x = np.clip(x + length * move, 0.0, None)
    return np.asarray(x / x.sum())
