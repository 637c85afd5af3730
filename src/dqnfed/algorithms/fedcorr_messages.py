"""What FedCorr's server and clients keep, what they send, and the same with another finishing method inside."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgServer
from dqnfed.core.algorithm import Empty


class Stage(Enum):
    """What the next message is for."""

    SETUP = "setup"  # every client copies its labels
    TRAINING_TURN = "training-turn"  # one client after the other trains the model and scores its labels
    RELABELLING = "relabelling"  # all clients get the threshold; those with a higher score relabel
    FINE_TUNING = "fine-tuning"  # the finishing method, with clean clients only
    CORRECTION = "correction"  # noisy clients relabel once more
    FINISHING = "finishing"  # the finishing method, with all clients


class Progress(NamedTuple):
    """How far the run is."""

    is_set_up: Tensor  # [] bool, whether clients have copied their labels
    n_sweeps: Tensor  # [] finished ones
    has_trained: Tensor  # [C] bool, in this sweep
    n_fine_tuning: Tensor  # [] rounds
    is_corrected: Tensor  # [] bool


class NoiseEstimate(NamedTuple):
    """What the server knows about the clients' labels."""

    score: Tensor  # [C] float64: sums of mean local intrinsic dimensions over the sweeps
    threshold: Tensor  # [] float64: clients with a higher score are noisy
    is_noisy: Tensor  # [C] bool: found so far
    level: Tensor  # [C] float64: the noise levels that clients estimate for themselves


class FedCorrServer(NamedTuple):
    theta: Tensor  # [n]
    progress: Progress
    noise_estimate: NoiseEstimate
    inner: FedAvgServer  # of the finishing method


class FedCorrMemory(NamedTuple):
    labels: Tensor  # [N] the client's labels as they are now
    losses: Tensor  # [N] of its examples, at its own model of the last training turn
    score: Tensor  # [] float64, the sum over its training turns
    is_noisy: Tensor  # [] bool, whether it was found noisy
    level: Tensor  # [] float64, the noise level that it estimates for itself
    inner: Empty  # of the finishing method


class CopyLabels(NamedTuple):
    """Nothing: the client copies its labels."""

    nothing: Tensor  # [0]


class TrainTurn(NamedTuple):
    """The model to train; the client scores its labels with the result."""

    theta: Tensor  # [n]


class Relabel(NamedTuple):
    """The model to relabel with, for clients whose score is above the threshold."""

    theta: Tensor  # [n]
    threshold: Tensor  # []


class FinalRelabel(NamedTuple):
    """The model to relabel with; sent to noisy clients only."""

    theta: Tensor  # [n]


class LabelCount(NamedTuple):
    n_labels: Tensor  # []


class TurnUpdate(NamedTuple):
    turn_delta: Tensor  # [n] theta before the training turn minus theta after it
    score: Tensor  # [] mean local intrinsic dimension of the outputs; NaN: not known


class NoiseReport(NamedTuple):
    level: Tensor  # [] estimated noise level, 0 for clean clients
    n_changed: Tensor  # [] labels


OWN_MESSAGES = (CopyLabels, TrainTurn, Relabel, FinalRelabel)
OWN_REPLIES = (LabelCount, TurnUpdate, NoiseReport)


def with_inner(kind: type[Any], inner: type[Any]) -> type[Any]:
    """Return the record with the finishing method's own record in the place of FedAvg's."""
    hints = get_type_hints(kind)
    if hints["inner"] is inner:
        return kind
    made: type[Any] = NamedTuple(kind.__name__, list({**hints, "inner": inner}.items()))  # type: ignore[misc]
    return made
