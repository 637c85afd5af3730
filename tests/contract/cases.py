"""Problems and runs that the contract tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from dqnfed import Evaluation, RunResult
from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem
from dqnfed.sim.setup import cohort_size
from tests.helpers.bowls import (
    BOWLS,
    Case,
    federation_of,
    labelled_clients,
    linear_model,
    normed_network,
    small_network,
)
from tests.helpers.turns import Turn, played_turns

METHODS = sorted(REGISTRY)
LOCAL_WORK: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "mini-batches": {"epochs": 2, "batch_size": 8, "momentum": 0.5, "weight_decay": 1e-3, "lr_decay": 0.9},
}
EDGES = (
    "duplicate clients",
    "identical clients",
    "one sampled client",
    "one client at all",
    "more clients than parameters",
    "a zero-gradient client",
    "equal losses",
    "a tenth of ten clients",
)
# What a method refuses by design. Anything else that it refuses fails the tests.
REFUSED_SETTINGS = {"scaffold": ("momentum",)}
REFUSED_EDGES = {("fedcorr", "one client at all"): "noisy clients are found by comparing clients"}  # the error's words


def suited_case(name: str) -> Case:
    """Return a small problem of a kind that the method declares."""
    kind = next(kind for kind in BOWLS if kind in REGISTRY[name].info.problem_kinds)
    return BOWLS[kind][-1]()


def configured(name: str, settings: Mapping[str, Any]) -> AnyAlgorithm:
    """Return the method with the settings, without those of `REFUSED_SETTINGS`."""
    refused = REFUSED_SETTINGS.get(name, ())
    return REGISTRY[name](**{key: value for key, value in settings.items() if key not in refused})


def five_rounds(name: str, work: str, runner: Callable[..., RunResult]) -> RunResult:
    """Return five rounds of the method on its case, with about two thirds of the clients."""
    case = suited_case(name)
    return runner(
        configured(name, LOCAL_WORK[work]),
        case.problem,
        case.federation,
        rounds=5,
        participation=0.7,
        evaluation=Evaluation(every=2, participants=False),
    )


@cache
def turns_of(name: str) -> list[Turn]:
    """Return the phases of three rounds, with two thirds of the clients."""
    case = suited_case(name)
    size = cohort_size(2 / 3, case.federation.n_clients)
    return played_turns(REGISTRY[name](), case, rounds=3, cohort_size=size)


def hard_case(name: str, edge: str) -> Case:
    """Return the named hard federation, on a problem of a kind that the method declares."""

    def problem(n_inputs: int = 4, n_hidden: int = 3, n_classes: int = 3) -> Problem:
        if "convex" in REGISTRY[name].info.problem_kinds:
            return Problem.from_module(linear_model(n_inputs, n_classes))
        if "network" in REGISTRY[name].info.problem_kinds:
            return Problem.from_module(small_network(n_inputs, n_hidden, n_classes))
        return Problem.from_module(normed_network(n_inputs, n_hidden, n_classes))

    clients = labelled_clients(6, 4)
    if edge == "duplicate clients":
        return Case(problem(), federation_of([clients[0], clients[1], clients[0], clients[2], clients[1]]))
    if edge == "identical clients":
        return Case(problem(), federation_of([clients[0]] * 5))
    if edge == "one sampled client":
        return Case(problem(), federation_of(clients), participation=1 / 6)
    if edge == "one client at all":
        return Case(problem(), federation_of(clients[:1]))
    if edge == "more clients than parameters":  # 4 parameters
        two_inputs = labelled_clients(7, 2, n_classes=2)
        return Case(problem(n_inputs=2, n_hidden=1, n_classes=2), federation_of(two_inputs))
    if edge == "a zero-gradient client":  # no weight reaches inputs of zero, and a bias is pulled equally by all labels
        return Case(problem(), federation_of([*clients, (torch.zeros(6, 4, dtype=torch.float64), torch.arange(6) % 3)]))
    if edge == "equal losses":  # the first outputs are zero, so everybody starts at ln 3
        return Case(problem(), federation_of(clients))
    assert edge == "a tenth of ten clients"
    return Case(problem(), federation_of(labelled_clients(10, 4)), participation=0.1)
