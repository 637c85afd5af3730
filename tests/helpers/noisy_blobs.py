"""Clients with well separated classes, some of which have wrong labels: easy to find, quick to train."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.seeds import seed_for
from dqnfed.data.label_noise import LabelNoise, Truth, with_label_noise
from tests.helpers.bowls import federation_of

N_INPUTS, N_CLASSES = 16, 10
WORK = {"epochs": 3, "batch_size": 10, "momentum": 0.5, "lr": 0.1, "neighbours": 10}


class NoisyBlobs(NamedTuple):
    problem: Problem
    federation: Federation
    truth: Truth


def noisy_blobs(
    n_clients: int = 10, n_each: int = 40, *, share: float = 0.4, level: float = 0.7, seed: int = 0
) -> NoisyBlobs:
    """Return clients of unequal sizes, a share of which has the given level of symmetric noise."""
    centres = 1.2 * torch.randn(N_CLASSES, N_INPUTS, generator=seed_for(seed, purpose="centres"), dtype=torch.float64)
    clients = []
    for c in range(n_clients):
        generator = seed_for(seed, client=c, purpose="blobs")
        labels = torch.randint(N_CLASSES, (n_each + c,), generator=generator)
        spread = torch.randn(len(labels), N_INPUTS, generator=generator, dtype=torch.float64)
        clients.append((centres[labels] + spread, labels))
    noise = LabelNoise(share=share, level_low=level, level_high=level)
    federation, truth = with_label_noise(federation_of(clients), noise, seed)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(N_INPUTS, 24), nn.Tanh(), nn.Linear(24, N_CLASSES)).double()
    return NoisyBlobs(Problem.from_module(module), federation, truth)
