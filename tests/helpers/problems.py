"""Small problems whose gradients, Hessians and minimisers are known."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.helpers.rows import gaussian_rows


class Quadratics(NamedTuple):
    """K losses (theta - m_k)' H_k (theta - m_k) / 2."""

    hessians: Tensor  # [K, n, n], positive definite
    minimisers: Tensor  # [K, n]

    def losses(self, theta: Tensor) -> Tensor:
        """Return every client's loss, [K]."""
        return torch.einsum("ki,kij,kj->k", theta - self.minimisers, self.hessians, theta - self.minimisers) / 2

    def gradients(self, theta: Tensor) -> Tensor:
        """Return every client's gradient, [K, n]."""
        return torch.einsum("kij,kj->ki", self.hessians, theta - self.minimisers)

    def newton_rates(self, theta: Tensor) -> Tensor:
        """Return every client's exact Newton decrement g' H^-1 g, [K]."""
        g = self.gradients(theta)
        return torch.einsum("ki,ki->k", g, torch.linalg.solve(self.hessians, g))

    def curvatures(self, step: Tensor) -> Tensor:
        """Return every client's curvature along the step, u'H_k u / u'u, [K]."""
        return torch.einsum("i,kij,j->k", step, self.hessians, step) / (step @ step)


def random_quadratics(K: int, n: int, seed: int = 0, *, common_minimiser: bool = False) -> Quadratics:
    """Return positive definite quadratics with eigenvalues of about 0.1 to 4 and minimisers of unit scale."""
    factors = torch.stack([gaussian_rows(n, n, seed=97 * seed + k) for k in range(K)])
    hessians = factors @ factors.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)
    minimisers = gaussian_rows(K, n, seed=97 * seed + K)
    return Quadratics(hessians, minimisers[:1].expand(K, n) if common_minimiser else minimisers)


def two_cycle() -> tuple[Quadratics, Tensor]:
    """Return two clients in the plane, and a start from which the paper's step cycles between two points for ever."""
    H = torch.stack([torch.eye(2, dtype=torch.float64), torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))])
    m = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    return Quadratics(H, m), torch.tensor([0.3, 1.0], dtype=torch.float64)


def one_narrow_valley() -> tuple[Quadratics, Tensor]:
    """Return one client with Hessian diag(1, 100), and a start from which the paper's step climbs."""
    H = torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64))[None]
    return Quadratics(H, torch.zeros(1, 2, dtype=torch.float64)), torch.tensor([1.0, 0.01], dtype=torch.float64)
