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
