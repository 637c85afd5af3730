"""The rule by which the best model of a run is chosen from its clients' validation losses and scores."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from torch import Tensor

from dqnfed.maths.fairness import fairness_summary

LAST = "last"
RULES = {  # what is made as low or as high as possible; the scores' names are those of `fairness_summary`
    "loss": "lowest mean validation loss",
    "mean": "highest mean validation score",
    "worst10": "highest validation score of the worst 10 % of clients",
    "worst5": "highest validation score of the worst 5 % of clients",
    "min": "highest validation score of the worst client",
}
SELECTS = (LAST, *RULES)
WINDOW = 3  # evaluations over which a value is averaged: a single one is often good by chance


class Choice(NamedTuple):
    """The best evaluation so far, and the values that the next window begins with."""

    recent: tuple[float, ...] = ()  # the last finite values, at most WINDOW
    round: int | None = None  # of the best one; None: none yet
    value: float | None = None  # mean over the window that ends with that round
    n_evaluations: int = 0  # in that window


def validation_value(select: str, losses: Tensor, scores: Tensor) -> float:
    """Return the number of an evaluation that the rule compares; NaN where some client's is no number, or none is."""
    measured = losses if select == "loss" else scores
    if not len(measured) or not bool(measured.isfinite().all()):
        return math.nan
    return fairness_summary(measured)["mean" if select == "loss" else select]


def updated_choice(choice: Choice, select: str, round: int, value: float) -> Choice:
    """Return the choice after one more evaluation.

    A round's value is the mean over the window of up to WINDOW evaluations that ends with it; of equal ones the
    earlier round is chosen. An evaluation whose value is not finite is left out of every window.
    """
    if not math.isfinite(value):
        return choice
    recent = (*choice.recent, value)[-WINDOW:]
    smoothed = statistics.mean(recent)  # exact before its last rounding: windows of equal values tie, however long
    if choice.value is None or (smoothed < choice.value if select == "loss" else smoothed > choice.value):
        return Choice(recent, round, smoothed, len(recent))
    return choice._replace(recent=recent)
