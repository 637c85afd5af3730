"""The two workloads that all frameworks are timed on, and the protocol by which they are; needs NumPy alone.

W1 is CIFAR-10's shape with a dense network, W2 FEMNIST's with a convolutional one. The examples are random numbers: the
arithmetic does not care, and nothing has to be downloaded.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np


class Workload(NamedTuple):
    """One round of FedAvg: `cohort` clients, one epoch of SGD each."""

    n_clients: int
    n_examples: int  # of each client
    shape: tuple[int, ...]
    n_classes: int
    batch_size: int
    cohort: int
    flops: float  # of one round's products and convolutions


WORKLOADS = {
    "W1": Workload(100, 500, (3072,), 10, 64, 10, 12.9e9),
    "W2": Workload(100, 200, (1, 28, 28), 62, 32, 10, 145e9),
}
LEARNING_RATE = 0.05


def examples(workload: Workload) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs [C, N, ...] float32 and labels [C, N]."""
    generator = np.random.default_rng(0)
    some = generator.standard_normal((workload.cohort, workload.n_examples, *workload.shape), dtype=np.float32)
    inputs = np.concatenate([some] * (workload.n_clients // workload.cohort))  # to draw more would take long
    return inputs, generator.integers(0, workload.n_classes, (workload.n_clients, workload.n_examples))


@cache
def shared_examples(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the workload's examples, drawn once in a process."""
    return examples(WORKLOADS[name])


def torch_model(name: str) -> Any:
    """Return the workload's model as a torch module."""
    from torch import nn

    if name == "W1":
        return nn.Sequential(
            nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, WORKLOADS[name].n_classes)
        )
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, WORKLOADS[name].n_classes),
    )


class Pulse:
    """The conversation with the benchmark: a line that comes in asks for a round, whose seconds are the answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes elsewhere

    def wait(self) -> bool:
        """Wait for the next round; False: there is none."""
        self._began = time.perf_counter()
        is_asked = bool(sys.stdin.readline())
        self._began = time.perf_counter()
        return is_asked

    def done(self) -> None:
        """Tell how long the round took."""
        self.tell({"seconds": time.perf_counter() - self._began})

    def tell(self, facts: dict[str, float]) -> None:
        """Answer with something else than a round's time."""
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def serve(self, play_round: Callable[[int], object]) -> None:
        """Play rounds as they are asked for."""
        round = 0
        while self.wait():
            play_round(round)
            self.done()
            round += 1
