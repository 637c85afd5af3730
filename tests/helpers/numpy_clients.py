"""Clients of convex problems in plain NumPy: losses, gradients and Hessians by their formulas, one client at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]


class NumpyClient(ABC):
    """The mean loss over rows A with targets b, plus ridge/2 ||x||^2."""

    def __init__(self, A: Floats, b: Floats, ridge: float) -> None:
        self.A, self.b, self.ridge = A, b, ridge

    @abstractmethod
    def loss(self, x: Floats) -> float: ...

    @abstractmethod
    def gradient(self, x: Floats) -> Floats: ...

    @abstractmethod
    def hessian(self, x: Floats) -> Floats: ...

    def minimiser(self) -> Floats:
        start = np.zeros(self.A.shape[1])
        found = minimize(self.loss, start, jac=self.gradient, hess=self.hessian, method="trust-exact", tol=1e-12)
        return np.asarray(found.x)


class Logistic(NumpyClient):
    """Ridge logistic loss; targets are -1 or +1."""

    def loss(self, x: Floats) -> float:
        return float(np.logaddexp(0.0, -self.b * (self.A @ x)).mean() + self.ridge / 2 * (x @ x))

    def gradient(self, x: Floats) -> Floats:
        z = self.b * (self.A @ x)
        return np.asarray(-(self.A.T @ (self.b * np.exp(-np.logaddexp(0.0, z)))) / len(z) + self.ridge * x)

    def hessian(self, x: Floats) -> Floats:
        z = self.b * (self.A @ x)
        weights = np.exp(-np.logaddexp(0.0, z) - np.logaddexp(0.0, -z)) / len(z)
        return np.asarray((self.A.T * weights) @ self.A + self.ridge * np.eye(len(x)))


class LeastSquares(NumpyClient):
    """Half the mean squared error, with a ridge."""

    def loss(self, x: Floats) -> float:
        return float(0.5 * np.square(self.A @ x - self.b).mean() + self.ridge / 2 * (x @ x))

    def gradient(self, x: Floats) -> Floats:
        return np.asarray(self.A.T @ (self.A @ x - self.b) / len(self.b) + self.ridge * x)

    def hessian(self, x: Floats) -> Floats:
        return np.asarray(self.A.T @ self.A / len(self.b) + self.ridge * np.eye(len(x)))


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
