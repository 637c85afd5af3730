"""Which clients are evaluated: all, or of very many a sample in which groups and sizes have their shares."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.federation import Federation, Part
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.core.shares import MANY

SAMPLE = 1000  # clients that are evaluated where there are more than `MANY`, unless `eval.clients` says how many


def evaluated_clients(federation: Federation, part: Part, size: int | None, seed: int) -> Tensor:
    """Return the clients that are evaluated, ascending: the same ones in every round of every method.

    A sample is systematic: of the clients with examples to be scored on, in the order of their group and then of their
    number of training examples, chance deciding among equals, every m-th is taken.
    """
    n_clients = federation.n_clients
    wanted = size or (n_clients if n_clients <= MANY else SAMPLE)
    if wanted >= n_clients:
        return torch.arange(n_clients)
    held = np.flatnonzero(federation.examples(part).sizes.numpy() > 0)
    chance = numpy_seed_for(seed, purpose="evaluated clients")
    groups = np.zeros(n_clients, dtype=np.int64)
    if federation.groups is not None:
        groups = np.unique(np.asarray(federation.groups), return_inverse=True)[1]
    order = np.lexsort((chance.random(len(held)), federation.n_examples.numpy()[held], groups[held]))
    wanted = min(wanted, len(held))
    places = ((np.arange(wanted) + chance.random()) * len(held) / wanted).astype(np.int64)
    return torch.from_numpy(np.sort(held[order[places]]))


def sample_line(n_evaluated: int, n_clients: int) -> str:
    """Return the sentence about an evaluation of some of the clients; nothing where all are evaluated."""
    if n_evaluated == n_clients:
        return ""
    return (
        f"scores and losses are of a stratified sample of {n_evaluated:,} of {n_clients:,} clients, the same in every "
        "round (`eval.clients`)"
    )
