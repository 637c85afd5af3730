"""Second-order methods written from their papers in plain NumPy, one client after the other: independent oracles."""

from __future__ import annotations

import numpy as np
from scipy.optimize import bisect

from tests.helpers.numpy_clients import Floats, NumpyClient


def mean_loss(clients: list[NumpyClient], x: Floats) -> float:
    """Return the mean of the clients' losses."""
    return float(np.mean([client.loss(x) for client in clients]))


def mean_gradient(clients: list[NumpyClient], x: Floats) -> Floats:
    """Return the gradient of the mean loss."""
    return np.asarray(np.mean([client.gradient(x) for client in clients], axis=0))


def largest_eigenpair(D: Floats) -> Floats:
    """Return the Rank-1 compression of a symmetric matrix: its eigenpair of the largest |eigenvalue|."""
    values, vectors = np.linalg.eigh(D)
    top = int(np.argmax(np.abs(values)))
    return np.asarray(values[top] * np.outer(vectors[:, top], vectors[:, top]))


def largest_entries(D: Floats, k: int) -> Floats:
    """Return the Top-k compression of a symmetric matrix: the k largest |entries| of its upper triangle, mirrored."""
    upper = np.triu_indices(len(D))
    kept = np.argsort(-np.abs(D[upper]), kind="stable")[:k]
    found = np.zeros_like(D)
    found[upper[0][kept], upper[1][kept]] = D[upper][kept]
    return np.asarray(found + np.triu(found, 1).T)


def fednl_iterates(
    clients: list[NumpyClient], rounds: int, *, alpha: float, step: str, start: str, mu: float = 0.0, top: int = 0
) -> list[Floats]:
    """Return the models of FedNL's Algorithm 1 with Rank-1 compression, or Top-k with `top` entries."""
    n = clients[0].A.shape[1]
    x = np.zeros(n)
    estimates = [c.hessian(x) if start == "hessian" else np.zeros((n, n)) for c in clients]
    iterates = [x]
    for _ in range(rounds):
        differences = [c.hessian(x) - e for c, e in zip(clients, estimates, strict=True)]
        H, g = np.mean(estimates, axis=0), mean_gradient(clients, x)
        if step == "projection":
            values, vectors = np.linalg.eigh(H)
            H = (vectors * np.maximum(values, mu)) @ vectors.T
        else:
            H = H + np.mean([np.linalg.norm(D) for D in differences]) * np.eye(n)
        x = x - np.linalg.solve(H, g)
        sent = [largest_entries(D, top) if top else largest_eigenpair(D) for D in differences]
        estimates = [e + alpha * S for e, S in zip(estimates, sent, strict=True)]
        iterates.append(x)
    return iterates


def giant_iterates(
    clients: list[NumpyClient], rounds: int, *, sufficient: float = 0.1
) -> tuple[list[Floats], list[float]]:
    """Return GIANT's models, and the length of every step: the longest of 4^-j, j = 0 ... 9, that goes down enough."""
    x = np.zeros(clients[0].A.shape[1])
    iterates, lengths = [x], []
    for _ in range(rounds):
        g = mean_gradient(clients, x)
        p = np.mean([np.linalg.solve(c.hessian(x), g) for c in clients], axis=0)
        before = mean_loss(clients, x)
        falls = [a for a in 0.25 ** np.arange(10) if mean_loss(clients, x - a * p) <= before - sufficient * a * (g @ p)]
        x = x - max(falls) * p
        iterates.append(x)
        lengths.append(float(max(falls)))
    return iterates, lengths


def fednl_ls_iterates(
    clients: list[NumpyClient], rounds: int, *, mu: float, sufficient: float, shrink: float
) -> tuple[list[Floats], list[float]]:
    """Return the models and lengths of FedNL-LS with Rank-1 compression, unit learning rate, estimates from zero."""
    n = clients[0].A.shape[1]
    x, estimates = np.zeros(n), [np.zeros((n, n)) for _ in clients]
    iterates, lengths = [x], []
    for _ in range(rounds):
        values, vectors = np.linalg.eigh(np.mean(estimates, axis=0))
        g, before = mean_gradient(clients, x), mean_loss(clients, x)
        p = vectors @ ((vectors.T @ g) / np.maximum(values, mu))
        length = 1.0
        while mean_loss(clients, x - length * p) > before - sufficient * length * (g @ p):
            length *= shrink
        estimates = [e + largest_eigenpair(c.hessian(x) - e) for c, e in zip(clients, estimates, strict=True)]
        x = x - length * p
        iterates.append(x)
        lengths.append(length)
    return iterates, lengths


def fednl_cr_losses(clients: list[NumpyClient], rounds: int, *, lipschitz: float | None = None) -> list[float]:
    """Return the mean losses of FedNL-CR with Rank-1 compression, unit learning rate and estimates from zero."""
    n, n_clients = clients[0].A.shape[1], len(clients)
    M = lipschitz or np.mean([np.mean(np.linalg.norm(c.A, axis=1) ** 3) for c in clients]) / (6 * np.sqrt(3))
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
