"""FedNL-CR and Q-FedNew written from their papers in plain NumPy, one client after the other: independent oracles."""

from __future__ import annotations

import numpy as np
from scipy.optimize import bisect

from tests.helpers.numpy_clients import Floats, NumpyClient, largest_eigenpair


def fednl_cr_losses(clients: list[NumpyClient], rounds: int) -> list[float]:
    """Return the mean losses of FedNL-CR with Rank-1 compression, unit learning rate and estimates from zero."""
    n, n_clients = clients[0].A.shape[1], len(clients)
    M = np.mean([np.mean(np.linalg.norm(c.A, axis=1) ** 3) for c in clients]) / (6 * np.sqrt(3))
    x, estimates = np.zeros(n), [np.zeros((n, n)) for _ in clients]
    losses = [np.mean([c.loss(x) for c in clients])]
    for _ in range(rounds):
        g = sum((c.gradient(x) for c in clients), np.zeros(n)) / n_clients
        differences = [c.hessian(x) - e for c, e in zip(clients, estimates, strict=True)]
        shift = np.mean([np.linalg.norm(d) for d in differences])
        A = sum(estimates, np.zeros((n, n))) / n_clients + shift * np.eye(n)

        def length_excess(r: float, A: Floats = A, g: Floats = g) -> float:
            return float(np.linalg.norm(np.linalg.solve(A + M * r / 2 * np.eye(n), g)) - r)

        r = bisect(length_excess, 0.0, np.sqrt(2 * np.linalg.norm(g) / M) + 1e-30, xtol=1e-16, rtol=1e-15)
        x = x - np.linalg.solve(A + M * r / 2 * np.eye(n), g)
        for k, difference in enumerate(differences):
            estimates[k] = estimates[k] + largest_eigenpair(difference)
        losses.append(np.mean([c.loss(x) for c in clients]))
    return [float(loss) for loss in losses]


def q_fednew_losses(
    clients: list[NumpyClient], rounds: int, *, rho: float = 0.1, alpha: float = 0.01, bits: int = 3, seed: int = 0
) -> list[float]:
    """Return the mean losses of Q-FedNew with a new Hessian every round."""
    generator = np.random.default_rng(seed)
    n, n_clients = clients[0].A.shape[1], len(clients)
    x, y = np.zeros(n), np.zeros(n)
    duals, sent = np.zeros((n_clients, n)), np.zeros((n_clients, n))
    losses = [np.mean([c.loss(x) for c in clients])]
    for _ in range(rounds):
        for k, c in enumerate(clients):
            own = np.linalg.solve(c.hessian(x) + (alpha + rho) * np.eye(n), c.gradient(x) - duals[k] + rho * y)
            change = own - sent[k]
            radius = np.abs(change).max()
            if radius > 0:
                width = 2 * radius / (2**bits - 1)
                place = (change + radius) / width
                low = np.floor(place)
                level = low + (generator.random(n) < place - low)
                sent[k] = sent[k] + width * level - radius
        y = sent.mean(0)
        x = x - y
        duals = duals + rho * (sent - y)
        losses.append(np.mean([c.loss(x) for c in clients]))
    return [float(loss) for loss in losses]
