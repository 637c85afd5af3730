"""A dense layer that makes its step in its backward pass ends where plain SGD ends, or is not fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dqnfed.accel.fused_linear import FusedLinear, fused_module
from dqnfed.accel.kernels import FastKernels
from dqnfed.core.kernels import PLAIN, Kernels
from dqnfed.core.problem import Problem, Task
from tests.helpers.bowls import normal


def fused_layers(module: nn.Module) -> int:
    found = fused_module(module)
    return 0 if found is None else sum(isinstance(part, FusedLinear) for part in found.modules())


class Residual(nn.Module):
    """A module that calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.layer(torch.tanh(self.layer(x)))
        return found


def watched() -> nn.Module:
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    module[1].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "n_fused"),
    [
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2, bias=False)), 2),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.GELU(), nn.Linear(4, 2))), 2),
        (
            nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)),
            2,
        ),  # [N, 2, 2]
        (nn.Sequential(Residual(), nn.Linear(4, 2)), 1),
        (nn.Sequential(layer := nn.Linear(4, 4), nn.LayerNorm(4), layer, nn.Linear(4, 2)), 0),  # one layer twice
        (watched(), 0),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_layers_end_where_plain_sgd_ends(module: nn.Module, n_fused: int, decay: float) -> None:
    assert fused_layers(module) == n_fused
    problem = Problem.from_module(module.double(), loss="squared-error", ridge=0.05)
    batches = torch.tensor([[0, 1, 2], [3, 4, -1], [5, 0, 3]])
    task = Task(
        normal(6, 4, seed=1), normal(6, 2, seed=2), torch.ones(6).double(), batches, torch.zeros(0), torch.tensor(0.1)
    )
    own = {"momentum": 0.0, "weight_decay": decay, "pull": None, "correction": None}
    kernels: list[Kernels] = [PLAIN, FastKernels()]
    plain, fast = (replace(problem, kernels=k).kernels.sgd(problem, task, problem.theta0, **own) for k in kernels)  # type: ignore[arg-type]
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-14)


def test_layers_that_share_a_matrix_are_not_fused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    assert fused_layers(module) == 0
