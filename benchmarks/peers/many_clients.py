"""Rounds of 100 among very many clients of 10 examples: many_clients.py CLIENTS [fedavg | dqn-fed | pfl] [arrays].

The first answer says how long it took to build the federation, and how much memory that took beside the examples; then
a round is played whenever it is asked for. pfl gets the clients' numbers and a function of them, and holds nothing out.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from workloads import LEARNING_RATE, Pulse

COHORT, N_EXAMPLES, N_INPUTS, N_CLASSES = 100, 10, 20, 10
Build = Callable[[], Any]


def kilobytes(field: str) -> int:
    """Return a number of /proc/self/status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def network() -> nn.Module:
    """Return the model of all contestants."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(N_INPUTS, 64), nn.ReLU(), nn.Linear(64, N_CLASSES))


def told(pulse: Pulse, build: Build) -> Any:
    """Return what was built, after telling what it cost."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = kilobytes("VmRSS"), time.perf_counter()
    found = build()
    seconds = time.perf_counter() - began
    pulse.tell({"build": seconds, "megabytes": (kilobytes("VmHWM") - before) / 1024})
    return found


def dqnfed_rounds(pulse: Pulse, n_clients: int, method: str, inputs: Any, labels: Any, form: str) -> None:
    """Play rounds in dqnfed, from arrays and the client of every example, or from a function."""
    from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Problem
    from dqnfed.sim.accelerate import automatic
    from dqnfed.sim.rounds import run_round
    from dqnfed.sim.setup import fresh_state, set_up

    owner, by_client = np.repeat(np.arange(n_clients), N_EXAMPLES), (n_clients, N_EXAMPLES)

    def build() -> Federation:
        if form == "arrays":
            return Federation.from_arrays(inputs, labels, owner)
        x, y = inputs.reshape(*by_client, N_INPUTS), labels.reshape(by_client)
        sizes = np.full(n_clients, N_EXAMPLES)
        return Federation.from_function(lambda c: (x[c], y[c]), sizes, n_classes=N_CLASSES)

    federation = told(pulse, build)
    problem = Problem.from_module(network())
    algorithm = (DQNFed if method == "dqn-fed" else FedAvg)(lr=LEARNING_RATE, batch_size=N_EXAMPLES)
    setup, _ = set_up(
        algorithm,
        problem,
        federation,
        rounds=10**9,
        participation=COHORT / n_clients,
        cohort=automatic(algorithm, problem, federation),
        evaluation=Evaluation(every=10**9, participants=False),
    )
    state = fresh_state(setup)
    pulse.serve(lambda round: run_round(setup, state))


def pfl_rounds(pulse: Pulse, n_clients: int, inputs: Any, labels: Any) -> None:
    """Play the same rounds in pfl."""
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl_rounds import trained

    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)

    def user(client: int) -> PyTorchTensorDataset:
        rows = slice(client * N_EXAMPLES, (client + 1) * N_EXAMPLES)
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(client))

    users = told(pulse, lambda: FederatedDataset(user, get_user_sampler("random", list(range(n_clients)))))
    trained(pulse, network(), users, cohort=COHORT, batch_size=N_EXAMPLES)


def main(clients: str, method: str = "fedavg", form: str = "arrays") -> None:
    pulse, n_clients, generator = Pulse(), int(clients), np.random.default_rng(0)
    inputs = generator.standard_normal((n_clients * N_EXAMPLES, N_INPUTS), dtype=np.float32)
    labels = generator.integers(0, N_CLASSES, n_clients * N_EXAMPLES)
    if method == "pfl":
        pfl_rounds(pulse, n_clients, inputs, labels)
    else:
        dqnfed_rounds(pulse, n_clients, method, inputs, labels, form)


main(*sys.argv[1:])
