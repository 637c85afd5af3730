"""TERM: clients weighted by a softmax of their losses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, log
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import Reweighted
from dqnfed.core.algorithm import Cohort, Empty, Info, Theta, check_choice, check_range, check_used
from dqnfed.core.problem import Problem, Task

LARGEST_TILT = 1e6  # beyond this the softmax is one-hot for any two losses that float32 can tell apart


class TERMServer(NamedTuple):
    theta: Tensor  # [n]
    log_normaliser: Tensor  # []  running log mean exp(t F); -inf before the first round, and if it is not used


class TERMUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  (inner-tilted) training loss at the theta that was sent


def tilted_weights(prior: Tensor, losses: Tensor, t: float) -> Tensor:
    """Return the weights prior_k exp(t F_k), normalised to sum 1: the prior itself where t = 0."""
    return prior if t == 0 else torch.softmax(prior.log() + t * losses, dim=0)


@dataclass(frozen=True, kw_only=True)
class TERM(Reweighted[TERMServer, Empty, TERMUpdate]):
    """TERM, tilted empirical risk minimisation over clients.

    Objective: minimise log(sum_k p_k exp(t F_k)) / t. t = 0 is the objective of FedAvg, t > 0 stresses clients with
    large losses (towards their maximum), t < 0 plays them down. With `tau` the client's own loss is tilted over its
    examples as well: F_k = log(mean_i exp(tau loss_i)) / tau.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD on it from theta; sends the update
    delta_k and F_k.

    Server: subtracts `server_lr` times sum_k w_k delta_k with w = softmax(log p_k + t F_k), by log-sum-exp. With
    `normaliser = "running"` the weights are p_k exp(t F_k) / Z instead, where Z forgets: Z <- (1 - rho) Z + rho times
    this round's sum_k p_k exp(t F_k); they sum to 1 only on average.

    State: theta, and log Z with the running normaliser.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the official code, the step is not divided by the cohort's size a second time, Z starts at the
    first round's value and not at 0 (which doubles the first step), all rounds share one unit of Z, and clients carry
    the weights p_k because they are sampled uniformly. t = 0 equals FedAvg bit for bit.

    Reference: Li, Beirami, Sanjabi & Smith, "Tilted empirical risk minimization", ICLR 2021; JMLR 2023.
    """

    info: ClassVar[Info] = Info(server=TERMServer, replies=(TERMUpdate,), needs=("sum",), clip_fields=("delta",))

    t: float = 1.0  # tilt over clients, in [-1e6, 1e6]; 0 is FedAvg
    tau: float = 0.0  # tilt over a client's examples, in [-1e6, 1e6]; 0 is the mean
    normaliser: str = "cohort"  # cohort | running
    rho: float = 0.5  # share of the present round in the running normaliser, in (0, 1]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "t", low=-LARGEST_TILT, high=LARGEST_TILT)
        check_range(self, "tau", low=-LARGEST_TILT, high=LARGEST_TILT)
        check_choice(self, "normaliser", ("cohort", "running"))
        check_range(self, "rho", low=0.0, high=1.0, open_low=True)
        check_used(self, "normaliser", used=self.t != 0, why="with t = 0, where the losses do not count")
        check_used(self, "rho", used=self.normaliser == "running", why='with normaliser = "cohort"')

    def init_server(self, problem: Problem, n_clients: int) -> TERMServer:
        return TERMServer(problem.theta0.clone(), torch.tensor(-inf, dtype=torch.float64))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[TERMUpdate, Empty]:
        tilted = tilted_problem(problem, self.tau)
        delta = sent.theta - self.local_sgd(tilted, task, sent.theta)
        return TERMUpdate(delta, tilted.loss(sent.theta, task)), memory

    def weights(self, losses: Tensor, shares: Tensor, server: TERMServer, cohort: Cohort) -> tuple[Tensor, TERMServer]:
        if self.normaliser == "cohort":
            return tilted_weights(shares, losses, self.t), server
        log_normaliser = self._log_normaliser(server.log_normaliser, shares, losses)
        weights = torch.exp(shares.log() + self.t * losses - log_normaliser)
        return weights, server._replace(log_normaliser=log_normaliser)

    def _log_normaliser(self, before: Tensor, prior: Tensor, losses: Tensor) -> Tensor:
        now = torch.logsumexp(prior.log() + self.t * losses, dim=0)
        if bool(before == -inf) or self.rho == 1.0:
            return now
        return torch.logaddexp(log(1.0 - self.rho) + before, log(self.rho) + now)


@dataclass(frozen=True)
class TiltedProblem(Problem):
    """A problem whose losses are log-mean-exps over examples instead of means."""

    tilt: float = 0.0

    def loss(self, theta: Tensor, task: Task) -> Tensor:
        losses = self.losses(self.predict(theta, task.inputs), task.targets)
        return self.regularised(theta, tilted_mean(losses, task.mask > 0, self.tilt))

    def batch_loss(self, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        rows = batch.clamp(min=0)
        losses = self.losses(self.predict(theta, task.inputs[rows]), task.targets[rows])
        return self.regularised(theta, tilted_mean(losses, batch >= 0, self.tilt))


def tilted_problem(problem: Problem, tilt: float) -> Problem:
    """Return the problem with every mean over examples tilted; the problem itself where the tilt is 0."""
    if tilt == 0:
        return problem
    return TiltedProblem(**{f.name: getattr(problem, f.name) for f in fields(problem)}, tilt=tilt)


def tilted_mean(values: Tensor, real: Tensor, tilt: float) -> Tensor:
    """Return log(mean exp(tilt v)) / tilt over the real values, accurate for tiny tilts too; zero where there are none.

    With the largest exponent s it is (s + log(1 + mean(exp(tilt v - s) - 1))) / tilt: nothing overflows or cancels.
    """
    exponents = tilt * values
    largest = torch.where(real.any(), torch.where(real, exponents, -inf).amax().detach(), 0.0)
    excess = torch.expm1(torch.where(real, exponents - largest, 0.0)).sum() / real.sum().clamp(min=1)
    return (largest + torch.log1p(excess)) / tilt
