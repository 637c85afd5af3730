"""Clients with losses F_k + g_k . theta: after one full-batch step losses and updates are what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem
from tests.helpers.baselines import EXAMPLES, GRADIENTS, LOSSES
from tests.helpers.bowls import Case


def linear_clients(
    gradients: Tensor = GRADIENTS,
    losses: Tensor = LOSSES,
    sizes: Sequence[int] = EXAMPLES,
    *,
    layers: Sequence[int] = (),
) -> Case:
    """Return the problem at theta = 0 with these gradients [K, n], losses [K] and example counts; layers cut theta."""
    n = gradients.shape[1]
    cuts = layers or [n]
    problem = Problem(
        theta0=torch.zeros(n, dtype=gradients.dtype),
        layout=tuple((f"part{i}.weight", torch.Size([size])) for i, size in enumerate(cuts)),
        predict=lambda theta, inputs: inputs @ theta,
        losses=lambda outputs, targets: outputs + targets,
        score=lambda outputs, targets, mask: -(outputs * mask).sum(),
        score_name="descent",
    )
    counts = torch.tensor(sizes)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    examples = Examples(gradients.repeat_interleave(counts, 0), losses.repeat_interleave(counts), starts)
    return Case(problem, Federation(examples, examples))
