"""What FedCorr's server and clients keep, what they send, and the same with another finishing method inside."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgServer
from dqnfed.core.algorithm import Empty


class Stage(Enum):
    """What the next message is for."""

    GREETING = "greeting"  # everybody copies its labels
    VISIT = "visit"  # one client after the other trains the model and scores its labels
    VERDICT = "verdict"  # everybody hears which scores are too high; those clients relabel
    FINE_TUNING = "fine-tuning"  # the finishing method, with clean clients only
    CORRECTION = "correction"  # noisy clients relabel once more
    FINISHING = "finishing"  # the finishing method, with everybody


class Progress(NamedTuple):
    """How far the run is."""

    has_greeted: Tensor  # [] bool
    n_sweeps: Tensor  # [] finished ones
    visited: Tensor  # [C] bool, in this sweep
    n_fine_tuning: Tensor  # [] rounds
    is_corrected: Tensor  # [] bool


class Suspicion(NamedTuple):
    """What the server knows about the clients' labels."""

    score: Tensor  # [C] float64: sums of mean local intrinsic dimensions over the sweeps
    threshold: Tensor  # [] float64: clients with a higher score are noisy
    is_noisy: Tensor  # [C] bool: found so far
    level: Tensor  # [C] float64: the noise levels that clients estimate for themselves


class FedCorrServer(NamedTuple):
    theta: Tensor  # [n]
    progress: Progress
    suspicion: Suspicion
    inner: FedAvgServer  # of the finishing method


class FedCorrMemory(NamedTuple):
    labels: Tensor  # [N] the client's labels as they are now
    losses: Tensor  # [N] of its examples, at its own model of the last visit
    score: Tensor  # [] float64, the sum over its visits
    is_noisy: Tensor  # [] bool, whether a verdict was that its labels are
    level: Tensor  # [] float64, the noise level that it estimates for itself
    inner: Empty  # of the finishing method


class Greeting(NamedTuple):
    """Nothing: the client copies its labels."""

    nothing: Tensor  # [0]


class Visit(NamedTuple):
    """The model to train, and then to score one's labels with."""

    theta: Tensor  # [n]


class Verdict(NamedTuple):
    """The model to relabel with, for those whose score is above the threshold."""

    theta: Tensor  # [n]
    threshold: Tensor  # []


class Correction(NamedTuple):
    """The model to relabel with; only noisy clients hear it."""

    theta: Tensor  # [n]


class Greeted(NamedTuple):
    n_labels: Tensor  # []


class Visited(NamedTuple):
    visit_delta: Tensor  # [n] theta before the visit minus theta after it
    score: Tensor  # [] mean local intrinsic dimension of the outputs; NaN: not known


class Relabelled(NamedTuple):
    level: Tensor  # [] estimated noise level, 0 for clean clients
    n_changed: Tensor  # [] labels


OWN_SENT = (Greeting, Visit, Verdict, Correction)
OWN_UPDATES = (Greeted, Visited, Relabelled)


def noisy_clients(suspicion: Suspicion) -> Tensor:
    """Return which clients the server takes for noisy, [C]."""
    return suspicion.is_noisy


def with_inner(kind: type[Any], inner: type[Any]) -> type[Any]:
    """Return the record with the finishing method's own record in the place of FedAvg's."""
    hints = {**get_type_hints(kind), "inner": inner}
    made: type[Any] = NamedTuple(kind.__name__, list(hints.items()))  # type: ignore[misc]
    return made
