"""What stays the same during a run: checked and prepared before the first round."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from dqnfed.core.algorithm import (
    AnyAlgorithm,
    is_number,
    is_whole,
)
from dqnfed.core.federation import Federation
from dqnfed.core.numerics import NUMERICS
from dqnfed.core.problem import Problem, check_fit
from dqnfed.core.runners import CohortRunner, vectorised
from dqnfed.core.screening import (
    Policy,
    prepared_with,
)
from dqnfed.secure.methods import secure_method
from dqnfed.secure.noise import Privacy
from dqnfed.sim.accelerate import Acceleration, acceleration_for
from dqnfed.sim.clients import local_clients
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.private import check_privacy
from dqnfed.sim.sampling import Sampling, as_sampling
from dqnfed.sim.secure import SecureClients
from dqnfed.sim.state import Evaluation, Record, Setup, State
from dqnfed.sim.tasks import TaskBuilder


def set_up(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    cohort: CohortRunner | None = None,
    evaluation: Evaluation | None = None,
    policy: Policy | None = None,
    accelerate: bool | None = None,
    secure: bool = False,
    privacy: Privacy | None = None,
    sampling: Sampling | str = "uniform",
) -> tuple[Setup, Acceleration]:
    """Return what stays the same during a run, and the forms in which it computes."""
    drawn_size, rule = cohort_size(participation, federation.n_clients), as_sampling(sampling)
    rule.check(federation.n_clients, drawn_size)
    size = rule.expected_size(federation.n_clients, participation)
    if not is_whole(seed) or seed < 0:
        raise ValueError(f"`seed` must be a whole number >= 0, but is {seed!r}.")
    check_fit(problem, federation.train.inputs, federation.train.targets)
    policy = policy or Policy()
    faster = acceleration_for(problem, federation, algorithm, enabled=accelerate)
    problem = faster.problem(problem)
    if secure:
        algorithm = secure_method(algorithm, policy, problem, federation.n_clients, size)
    prepared = prepared_with(algorithm, policy, problem, federation.n_clients, size)
    setup = Setup(
        prepared,
        problem,
        federation,
        rounds,
        drawn_size,
        seed,
        cohort or vectorised(),
        evaluation or Evaluation(),
        policy,
        TaskBuilder(federation, problem, prepared, seed),
        clients=SecureClients() if secure else local_clients(prepared),
        replies=faster.replies,
        privacy=privacy,
        participation=participation,
        sampling=rule,
    )
    check_privacy(setup)
    return setup, faster


def cohort_size(participation: float, n_clients: int) -> int:
    """Return how many clients a share means: rounded, at least one."""
    if not is_number(participation) or not 0 < participation <= 1:
        raise ValueError(f"participation must be a share in (0, 1], but is {participation!r}.")
    return max(1, round(participation * n_clients))


def check_rounds(rounds: Any) -> None:
    """Raise where the number of rounds is none."""
    if not is_whole(rounds) or rounds < 1:
        raise ValueError(f"`rounds` must be a whole number >= 1, but is {rounds!r}.")


def fresh_state(setup: Setup) -> State:
    """Return the state before the first round."""
    n_clients = setup.federation.n_clients
    state = State(
        server=setup.algorithm.init_server(setup.problem, n_clients),
        memory=MemoryStore(setup.algorithm, setup.problem, n_clients, setup.clients.memory_kind),
        losses=torch.full((n_clients,), torch.nan, dtype=torch.float64),
    )
    if setup.privacy is not None:
        state.totals["releases"] = 0
    return state


def identity_of(setup: Setup) -> Record:
    """Return what must be the same when a run goes on."""
    private: Record = {"privacy.secure": True} if setup.clients.is_secure else {}
    private |= {} if setup.privacy is None else {"privacy": repr(setup.privacy)}
    return {
        **private,
        **({} if setup.sampling.is_plain else {"train.sampling": repr(setup.sampling)}),
        "algorithm": repr(setup.algorithm),
        "precision": str(setup.problem.theta0.dtype),
        "seed": setup.seed,
        "clients": setup.federation.n_clients,
        "parameters": setup.problem.n_parameters,
        "clients a round": setup.cohort_size,
        "eval.select": setup.evaluation.select,
        "NUMERICS": NUMERICS,
        "data": dict(setup.federation.fingerprint if setup.fingerprint is None else setup.fingerprint),
    }


def plain_config(setup: Setup, participation: float) -> dict[str, Any]:
    """Return the settings of a run that no config file describes."""
    return {
        "name": "run",
        "algorithm": {"name": type(setup.algorithm).__name__, **_given(setup.algorithm)},
        "train": {"rounds": setup.rounds, "participation": participation, "sampling": setup.sampling.rule},
        "eval": _given(setup.evaluation),
        "policy": _given(setup.policy),
        "run": {"seed": setup.seed},
    }


def _given(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(settings).items() if value is not None}
