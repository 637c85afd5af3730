"""What the server of a common descent keeps, what it sends, and what its clients keep and answer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dqnfed.algorithms.absentees import Absentees
from dqnfed.algorithms.testimony import Testimony
from dqnfed.maths.quasi_newton import Pairs


class Search(NamedTuple):
    """A step whose length is still sought; `trials` is 0 when there is none, PROBING before its first length."""

    direction: Tensor  # [n] or [0]
    gradient: Tensor  # [n] or [0]  the cohort's mean gradient, kept if the step is accepted
    members: Tensor  # [C] or [0]   whose mean it is
    losses: Tensor  # [C] or [0]    at theta, by client number
    slopes: Tensor  # [C] or [0]    first-order decreases g_k'u, by client number; NaN: does not count
    length: Tensor  # []
    trials: Tensor  # []


class DescentServer(NamedTuple):
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]     the model before the last step
    step_norm: Tensor  # []         length of the last step
    n_steps: Tensor  # []
    gradient_before: Tensor  # [n] or [0]  mean gradient at theta_before, when everybody takes part
    answered_before: Tensor  # [C] or [0]  whose mean it is
    metric: Pairs  # [m, n] or [0, n]      secant pairs of the mean loss
    search: Search
    testimony: Testimony  # of clients that may be left out
    absentees: Absentees  # gradients of clients who were here before, when the cohort changes


class DescentMemory(NamedTuple):
    pairs: Pairs  # [m, n] or [0, n]  secant pairs of the client's own loss
    scale: Tensor  # []               of its newest pair, when it keeps no more of it; 0: none yet
    theta: Tensor  # [n] or [0]       the model it saw last, when it keeps it
    gradient: Tensor  # [n] or [0]    its gradient there
    n_visits: Tensor  # [] or [0]     asked for when it keeps the model


class Here(NamedTuple):
    """Where a client stands."""

    theta: Tensor  # [n]
    gradient: Tensor  # [n]
    loss: Tensor  # []


class First(NamedTuple):
    """The model, before any step was made: clients probe their curvature."""

    theta: Tensor  # [n]


class Model(NamedTuple):
    """The model; clients remember the one before."""

    theta: Tensor  # [n]


class Models(NamedTuple):
    """The model and the one before, for cohorts that change from round to round."""

    theta: Tensor  # [n]
    theta_before: Tensor  # [n]


class Probe(NamedTuple):
    """The model and a point close by along the first step: clients measure their curvature between the two."""

    theta: Tensor  # [n]
    nearby: Tensor  # [n]


class Trial(NamedTuple):
    """A candidate of the line search."""

    theta: Tensor  # [n]


class DescentUpdate(NamedTuple):
    gradient: Tensor  # [n]
    rate: Tensor  # []             wanted first-order decrease; NaN: not known yet
    curvature: Tensor  # []        s'y / s's along the last global step; NaN: not known
    loss: Tensor  # []
    gradient_change: Tensor  # [n] or [0]  y, for the server's metric when the cohort changes


class LocalUpdate(NamedTuple):
    gradient: Tensor  # [n]  theta before the local epochs minus theta after them, in the gradient's place


class ProbeUpdate(NamedTuple):
    probed_curvature: Tensor  # []
    probed_slope: Tensor  # []  the loss' first-order decrease along the step, for a move of length 1
    probed_loss: Tensor  # []   at the point close by


class TrialUpdate(NamedTuple):
    trial_loss: Tensor  # []
