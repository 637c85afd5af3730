"""What DQN-Fed's server keeps and sends, and what its clients keep and reply."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dqnfed.algorithms.parts.cache import CacheState
from dqnfed.algorithms.parts.metric import Mean, MetricState
from dqnfed.algorithms.parts.rates import RateMemory
from dqnfed.core.trust import TrustState


class Search(NamedTuple):
    """A step whose length is sought in phases of its own; `trials` is 0 when there is none."""

    direction: Tensor  # [n] or [0]
    norm: Tensor  # []              its length
    mean: Mean  # the cohort's mean gradient, for the metric if the step is made
    losses: Tensor  # [C] or [0]    at theta, by client number
    slopes: Tensor  # [C] or [0]    first-order decreases g_k'u, by client number; NaN: does not count
    lengths: Tensor  # [C] or [0]   of the gradients
    length: Tensor  # []            the candidate alpha
    trials: Tensor  # []            PROBING while the first step's curvature is measured


class VotesState(NamedTuple):
    """What is known of the clients' losses, and the length learnt from them."""

    log_m: Tensor  # []      log of the step's length over the length of the clients' mean step
    alpha: Tensor  # []      of the last step; 0: none yet
    is_back: Tensor  # []    whether that step was taken back
    losses: Tensor  # [S]    above the floor, at the model of the client's last reply; NaN: no reply yet
    depth: Tensor  # []      steps from the start model to theta; those that were taken back do not count
    depths: Tensor  # [S]    of the model of the client's last reply
    starts: Tensor  # [S]    above the floor, at the start model; NaN: no reply there
    floor: Tensor  # []      no loss is below it
    clients: Tensor  # [S]   whose numbers these are, ascending, of very many clients; [0]: all clients', S = C


class DescentServer(NamedTuple):
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]  the model before the last step
    theta_start: Tensor  # [n]   the model before the first step
    step_norm: Tensor  # []      length of the last step
    n_steps: Tensor  # []
    metric: MetricState  # secant pairs of the mean loss
    search: Search  # a step whose length is still sought
    trust: TrustState  # consistency of the clients' replies
    cache: CacheState  # last replies of clients that are absent
    votes: VotesState  # the clients' last losses, and the step length learnt from them


class DescentMemory(NamedTuple):
    rates: RateMemory  # secant pairs of the client's own loss
    theta: Tensor  # [n] or [0]       the model of its last reply, where a secant needs it
    gradient: Tensor  # [n] or [0]    its gradient there
    n_replies: Tensor  # []


class First(NamedTuple):  # before any step was made: clients probe their curvature
    theta: Tensor  # [n]


class Models(NamedTuple):  # of methods whose clients keep nothing
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]


class Probe(NamedTuple):  # clients measure their curvature along the first step
    theta: Tensor  # [n]
    nearby: Tensor  # [n]


class Trial(NamedTuple):  # a candidate of the line search
    theta: Tensor  # [n]


class GradientUpdate(NamedTuple):
    gradient: Tensor  # [n]
    rate: Tensor  # []  wanted first-order decrease; NaN: not known yet
    loss: Tensor  # []


class DescentUpdate(NamedTuple):  # where curvatures set the step length
    gradient: Tensor  # [n]
    rate: Tensor  # []
    loss: Tensor  # []
    curvature: Tensor  # []  s'y / s's along the last global step; NaN: not known


class LocalUpdate(NamedTuple):
    gradient: Tensor  # [n]  theta before the local epochs minus theta after them, in the gradient's place
    loss: Tensor  # []       at the model that was sent, over every tenth of the client's examples, 64 at least


class ProbeUpdate(NamedTuple):
    probed_curvature: Tensor  # []
    probed_slope: Tensor  # []  the loss' first-order decrease along the step, for a move of length 1
    probed_loss: Tensor  # []   at the point nearby


class TrialUpdate(NamedTuple):
    trial_loss: Tensor  # []
