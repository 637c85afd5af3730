"""Ten clients of the digits through Flower messages, some of which lie, under the policies that `new-app` writes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from dqnfed import Evaluation, Federation, Policy, RunResult, run
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Examples
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_algorithm, build_problem
from dqnfed.flower.new_app import new_app
from dqnfed.sim.clients import evaluate
from tests.helpers.attacks import ATTACKS, SCALARS, liar
from tests.helpers.bowls import Case
from tests.helpers.flower import deployed

N, ROUNDS, LIAR, COLLUDING = 10, 12, (9,), (8, 9)
N_STARTS = 3
SGD = ["train.epochs=2", "train.batch_size=32", "train.lr=0.1"]
METHODS = {
    "dqn-fed": ["algorithm.name=dqn-fed"],
    "dqn-fed, local SGD": ["algorithm.name=dqn-fed", *SGD],
    "fedavg": ["algorithm.name=fedavg"],
    "qffl": ["algorithm.name=qffl"],
}
SENT = {"dqn-fed": set(SCALARS), "dqn-fed, local SGD": {"loss"}, "fedavg": set(), "qffl": {"loss"}}


@cache
def app_policy() -> Policy:
    """Return the policies of a new app."""
    with tempfile.TemporaryDirectory() as folder:
        files = new_app(Path(folder) / "app", clients=N)
        config = read_config(str(next(file for file in files if file.name == "experiment.toml")), [])
    return Policy(**config.policy.model_dump())


@cache
def setting(method: str) -> tuple[AnyAlgorithm, Case]:
    """Return a method and its ten clients, which hold two or three of the ten digits each."""
    config = read_config("digits", [f"data.clients={N}", "run.device=cpu", *METHODS[method]])
    built = build_problem(config)
    return build_algorithm(config), Case(built.problem, built.federation)


def applies(attack: str, method: str) -> bool:
    """Return whether the method's clients send anything that the attack falsifies."""
    fields = set(attack.split(" x ")[0].split(", "))
    if attack.startswith("scalars"):
        return bool(SENT[method])
    return not fields <= set(SCALARS) or bool(fields & SENT[method])


def attacked(
    method: str, attack: str, liars: Sequence[int], policy: Policy, *, rounds: int = ROUNDS, out: Path | None = None
) -> RunResult:
    """Return the run in which these clients lie from the first message on."""
    algorithm, case = setting(method)
    plans = {client: liar(ATTACKS[attack]) for client in liars}
    return deployed(algorithm, case, lambda m: plans.get(m.client), rounds=rounds, policy=policy, out=out)


def honest_loss(method: str, theta: torch.Tensor, liars: Sequence[int]) -> float:
    """Return the honest clients' mean training loss, measured here: no client is asked."""
    _, case = setting(method)
    honest = torch.tensor([client for client in range(N) if client not in liars])
    found = evaluate(case.problem, theta.to(case.problem.theta0), case.federation.train, honest, with_score=False)
    return float(found.loss.mean())


@cache
def loss_without(method: str, liars: tuple[int, ...], policy: Policy) -> float:
    """Return the honest clients' loss after a run in which the liars do not exist.

    DQN-Fed with gradients ends elsewhere when its start is moved by a hundredth, by up to a half after so few rounds:
    of a few such starts, and of the same runs with honest clients in the liars' place, the largest loss is taken.
    """
    algorithm, case = setting(method)
    others = torch.tensor([client for client in range(N) if client not in liars])

    def cut(part: Examples) -> Examples:
        rows, sizes = part.rows(others), part.sizes[others]
        return Examples(part.inputs[rows], part.targets[rows], torch.cat([torch.zeros(1).long(), sizes.cumsum(0)]))

    fewer = Federation(cut(case.federation.train), cut(case.federation.test), n_classes=case.federation.n_classes)
    seldom = Evaluation(every=ROUNDS, participants=False)
    found = []
    is_noisy = method == "dqn-fed"
    for seed in range(N_STARTS if is_noisy else 1):
        theta = case.problem.theta0
        noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(seed), dtype=theta.dtype)
        problem = replace(case.problem, theta0=theta + (0.01 * theta.std() * noise if seed else 0.0))
        for federation in (fewer, case.federation) if is_noisy else (fewer,):
            result = run(algorithm, problem, federation, rounds=ROUNDS, policy=policy, evaluation=seldom)
            found.append(honest_loss(method, result.theta, liars))
    return max(found)
