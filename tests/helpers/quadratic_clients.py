"""Clients with f_k(theta) = 1/2 (theta - m_k)' H_k (theta - m_k), as a federation that any method can train on."""

from __future__ import annotations

import torch
from torch import Tensor

from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem
from tests.helpers.bowls import Case, normal


def quadratic_clients(hessians: Tensor, minimisers: Tensor, start: Tensor, *, participation: float = 1.0) -> Case:
    """Return one client per Hessian [K, n, n] and minimiser [K, n]; a client's single example holds both."""
    n = len(start)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        curved = torch.einsum("bij,bj->bi", targets.view(-1, n, n).to(outputs.dtype), outputs)
        return 0.5 * (outputs * curved).sum(1)

    problem = Problem(
        theta0=start,
        layout=(("theta", start.shape),),
        predict=lambda theta, inputs: theta - inputs.to(theta.dtype),
        losses=losses,
        score=lambda outputs, targets, mask: 100.0 * torch.exp(-outputs.square().sum()),
        score_name="closeness",
    )
    examples = Examples(minimisers, hessians.reshape(len(hessians), -1), torch.arange(len(hessians) + 1))
    return Case(problem, Federation(examples, examples), participation)


def narrow_valley() -> Case:
    """Return one client, H = diag(1, 100), at which the paper's step raises the loss 24-fold."""
    hessian = torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64))
    return quadratic_clients(hessian[None], torch.zeros(1, 2, dtype=torch.float64), torch.tensor([1.0, 0.01]).double())


def two_cycle() -> Case:
    """Return two clients between which the paper's step jumps to and fro for ever."""
    hessians = torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, 3.0]))]).double()
    minimisers = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    return quadratic_clients(hessians, minimisers, torch.tensor([0.3, 1.0], dtype=torch.float64))


def consistent_quadratics(n_clients: int, n: int, *, condition: float = 10.0, seed: int = 0) -> Case:
    """Return random Hessians with one minimiser in common, the origin, and a random start."""
    hessians = []
    for k in range(n_clients):
        basis, _ = torch.linalg.qr(normal(n, n, seed=seed, purpose=f"basis {k}"))
        spectrum = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)
        hessians.append(basis @ torch.diag(spectrum) @ basis.T)
    start = normal(n, seed=seed, purpose="start")
    return quadratic_clients(torch.stack(hessians), torch.zeros(n_clients, n, dtype=torch.float64), start)
