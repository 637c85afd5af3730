"""FedMDFG: a common descent direction with a guide to equal losses, and a line search on all clients' losses."""

from __future__ import annotations

from dataclasses import dataclass
from math import acos, degrees, sqrt
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_choice, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths.solvers import min_norm_weights

ARMIJO = 1e-4


class FedMDFGServer(NamedTuple):
    theta: Tensor  # [n]
    direction: Tensor  # [n] the step that is tried: d of this round times its length; zeros: none is
    place: Tensor  # [] of the length that is tried, among 2s + 1, the longest first; -1: none is
    sums: Tensor  # [2s + 1] of the clients' losses at the lengths tried so far, else inf; float64 on the host
    losses: Tensor  # [n_clients] of this round at theta; float64 on the host, as the slopes
    slopes: Tensor  # [n_clients] g_k'd
    is_guided: Tensor  # [] whether this round's losses are to become more equal
    last_cohort: Tensor  # [n_clients] whether the client was in the round before


class Candidate(NamedTuple):
    """A model of which clients report their losses."""

    candidate: Tensor  # [n]


class CandidateLoss(NamedTuple):
    trial_loss: Tensor  # [] training loss at the candidate


@dataclass(frozen=True, kw_only=True)
class FedMDFG(LocalWork[FedMDFGServer, Empty, LossUpdate | CandidateLoss]):
    r"""Multi-gradient descent with fair guidance (Pan et al., AAAI 2023).

    Objective: minimise all clients' losses at once, and make them alike.

    Client: sends its loss F_k and the update of `epochs` of SGD from theta; then its loss at theta - eta d, for one
    length eta after the other.

    Server: g_k = delta_k / lr, all scaled to their mean length. Where the angle between the losses and the vector of
    ones is above `angle` degrees, a row is added: with :math:`\hat L = L / \|L\|` and :math:`\hat p = 1 / \sqrt K`,
    :math:`g_f = h^\top G` with h along :math:`(\hat p \cdot \hat L) \hat L - \hat p`. d is the shortest point of the
    hull of the rows, scaled to the length of their mean. The length eta is the first of 2^s lr, ..., 2^-s lr (s is
    `halvings`) with F_k - F_k(theta - eta d) >= 1e-4 eta g_k'd for all clients and, if guided, losses that are
    more equal; else the longest with a smaller sum of losses; else the one with the smallest sum. Lengths above lr are
    tried where the cohort is that of the round before.

    State: theta; within a round, d and the clients' losses and slopes; who was in the round before.

    Payload: n + 1 floats up and n down; then 1 up and n down for each length, at most 2s + 1.

    Evaluation: the global model.

    Differences: from the authors' code. There the sign of g_k'd is lost, so that losses may rise a little: `armijo =
    "code"` does so, "right" is the paper's. Rows of clients that were in the round before but not in this one are not
    added, since a server that needs products alone does not hold them; the code's second reason for guidance, a loss
    above its running mean, is left out. Clients may make several local steps.

    Reference: Pan, Wang, Li, Wang, Yu & Zhao, FedMDFG: Federated Learning with Multi-Gradient Descent and Fair
    Guidance, AAAI 2023.
    """

    info: ClassVar[Info] = Info(
        server=FedMDFGServer,
        messages=(Theta, Candidate),
        replies=(LossUpdate, CandidateLoss),
        needs=("gram",),
        clip_fields=("delta",),
        nan_ok_fields=("trial_loss",),  # a length may be far too long
    )

    angle: float = 11.25  # degrees from equal losses, above which they guide the step, in [0, 90]
    halvings: int = 5  # s: lengths from 2^s lr to 2^-s lr, >= 0
    armijo: str = "right"  # right | code

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "angle", low=0.0, high=90.0)
        check_range(self, "halvings", low=0, high=30)
        check_choice(self, "armijo", ("right", "code"))

    def init_server(self, problem: Problem, n_clients: int) -> FedMDFGServer:
        theta = problem.theta0
        numbers = torch.full((n_clients,), torch.nan, dtype=torch.float64)
        return FedMDFGServer(
            theta=theta.clone(),
            direction=torch.zeros_like(theta),
            place=torch.tensor(-1),
            sums=torch.full((2 * self.halvings + 1,), torch.inf, dtype=torch.float64),
            losses=numbers,
            slopes=numbers.clone(),
            is_guided=torch.tensor(False),
            last_cohort=torch.zeros(n_clients, dtype=torch.bool),
        )

    def send(self, server: FedMDFGServer) -> Theta | Candidate:
        return Theta(server.theta) if int(server.place) < 0 else Candidate(server.theta - server.direction)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Candidate, memory: Empty
    ) -> tuple[LossUpdate | CandidateLoss, Empty]:
        if isinstance(sent, Candidate):
            return CandidateLoss(client_loss(problem, sent.candidate, task)), memory
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return LossUpdate(delta, client_loss(problem, sent.theta, task)), memory

    def server_step(
        self, server: FedMDFGServer, replies: Replies[LossUpdate | CandidateLoss], cohort: Cohort
    ) -> ServerStep[FedMDFGServer]:
        if replies.kind is CandidateLoss:
            return self._after_trial(server, replies.scalars("trial_loss"), cohort)
        lr, here = self.lr_at(cohort.round), _members(server, cohort)
        losses, M = replies.scalars("loss"), replies.gram("delta") / lr**2
        found = angle_from_equal(losses)
        weights = guided_weights(M, losses, is_guided=found > self.angle)
        first = 0 if torch.equal(here, server.last_cohort) else self.halvings
        kept = server._replace(
            direction=replies.combine("delta", torch.from_numpy(self._rate(first, cohort) * weights / lr)),
            place=torch.tensor(first),
            sums=torch.full_like(server.sums, torch.inf),
            losses=server.losses.index_copy(0, cohort.clients, torch.from_numpy(losses)),
            slopes=server.slopes.index_copy(0, cohort.clients, torch.from_numpy(M @ weights)),
            is_guided=torch.tensor(found > self.angle),
        )
        return ServerStep(kept, Status.AGAIN, {"angle": found, "guided": float(found > self.angle)})

    def _after_trial(self, server: FedMDFGServer, trial: FloatArray, cohort: Cohort) -> ServerStep[FedMDFGServer]:
        """Return the step after a trial: its length is taken, or the next one is tried, or the best of all is taken."""
        place, losses = int(server.place), server.losses[cohort.clients].numpy()
        slopes = (1.0 if self.armijo == "right" else -1.0) * server.slopes[cohort.clients].numpy()
        total = float(trial.sum()) if np.isfinite(trial).all() else torch.inf
        sums = server.sums.index_fill(0, server.place, total)
        if is_accepted(trial, losses, self._rate(place, cohort) * slopes, is_guided=bool(server.is_guided)):
            return self._moved(server, place, cohort)
        if place < 2 * self.halvings:
            shorter = server._replace(direction=0.5 * server.direction, place=server.place + 1, sums=sums)
            return ServerStep(shorter, Status.AGAIN)
        smaller = sums < losses.sum()
        chosen = int(smaller.int().argmax()) if bool(smaller.any()) else int(sums.argmin())
        return self._moved(server, chosen, cohort)

    def _moved(self, server: FedMDFGServer, place: int, cohort: Cohort) -> ServerStep[FedMDFGServer]:
        """Return the step of the length at this place; `direction` holds that of the length tried last."""
        longer = 2.0 ** (int(server.place) - place)
        after = server._replace(
            theta=server.theta - longer * server.direction,
            direction=torch.zeros_like(server.direction),
            place=torch.tensor(-1),
            last_cohort=_members(server, cohort),
        )
        return ServerStep(after, diagnostics={"rate": self._rate(place, cohort)})

    def _rate(self, place: int, cohort: Cohort) -> float:
        return self.lr_at(cohort.round) * 2.0 ** (self.halvings - place)

    def passes(self, sent: Theta | Candidate) -> float:
        return 1 / 3 if isinstance(sent, Candidate) else float(self.epochs)


def _members(server: FedMDFGServer, cohort: Cohort) -> Tensor:
    return torch.zeros_like(server.last_cohort).index_fill(0, cohort.clients, True)


def angle_from_equal(losses: FloatArray) -> float:
    """Return the angle between the losses and the vector of ones, in degrees; 0 where all losses are 0."""
    size = float(np.linalg.norm(losses)) * sqrt(len(losses))
    return degrees(acos(min(1.0, max(-1.0, float(losses.sum()) / size)))) if size > 0 else 0.0


def guided_weights(M: FloatArray, losses: FloatArray, *, is_guided: bool) -> FloatArray:
    """Return the weights of the gradients whose Gramian is M in the common direction; all zero where there is none."""
    lengths = np.sqrt(np.maximum(np.diag(M), 0.0))
    alive = lengths > 1e-6
    if not alive.any():
        return np.zeros(len(losses))
    usual = float(lengths[alive].mean())
    scale = np.where(alive, usual / np.where(alive, lengths, 1.0), 0.0)
    scaled = scale[:, None] * M * scale
    rows = np.eye(len(losses))[alive]
    if is_guided:
        rows = np.vstack([rows, guide(losses)])
    found = min_norm_weights(rows @ scaled @ rows.T) @ rows
    length = sqrt(max(float(found @ scaled @ found), 0.0))
    mean = alive / alive.sum()
    wanted = sqrt(max(float(mean @ scaled @ mean), 0.0))
    return np.asarray(scale * found * (wanted / length if length > 1e-12 * usual else 0.0))


def guide(losses: FloatArray) -> FloatArray:
    """Return the combination of the gradients, of length 1, that leads the losses towards equal ones."""
    unit, equal = losses / np.linalg.norm(losses), np.full(len(losses), 1.0 / sqrt(len(losses)))
    h = (equal @ unit) * unit - equal
    return np.asarray(h / max(float(np.linalg.norm(h)), 1e-300))


def is_accepted(trial: FloatArray, losses: FloatArray, slopes: FloatArray, *, is_guided: bool) -> bool:
    """Return whether all losses fell by 1e-4 of their slopes or more and, if guided, are more equal than before."""
    if not np.isfinite(trial).all() or (losses - trial < ARMIJO * slopes).any():
        return False
    return not is_guided or angle_from_equal(trial) < angle_from_equal(losses)
