"""In what scores are told to people: percent, points, or the units of the number that is predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dqnfed.report.comparison import Experiment
from dqnfed.report.measures import Floats
from dqnfed.report.run_files import block, number

MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"
TITLES = {"accuracy": "accuracy", "auc": "AUC", "f1": "F1"}  # of scores from 0 to 100


class Unit(NamedTuple):
    """How a score is named, turned into what people read, and printed."""

    name: str
    higher_is_better: bool = True
    suffix: str = ""  # of a value
    points: str = ""  # of a difference
    decimals: int = 1
    spread: float | None = None  # of the target, where the score is minus the squared error of standardised targets

    def values(self, scores: Floats) -> Floats:
        """Return the scores as they are told: the usual error in the target's units for a regression."""
        if self.higher_is_better:
            return scores
        if self.spread is None:
            return -scores
        with np.errstate(invalid="ignore"):
            return self.spread * np.sqrt(-scores)

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if not math.isfinite(value):
            return "no number"
        return f"{self._digits(value)}{self.suffix}"

    def change(self, value: float) -> str:
        """Return a difference with its sign and unit; one that is not zero is not printed as zero."""
        return f"{self.signed(value)}{self.points}"

    def signed(self, value: float) -> str:
        """Return a difference with its sign; one that is not zero is not printed as zero."""
        if value == 0 or not math.isfinite(value):
            return "0" if value == 0 else "no number"
        shown = self._digits(value)
        if float(shown.replace(MINUS, "-")) == 0:
            shown = f"{value:.1g}".replace("-", MINUS)
        return shown if value < 0 else f"+{shown}"

    def is_gain(self, value: float) -> bool:
        """Return whether a difference of this sign is for the better."""
        return value > 0 if self.higher_is_better else value < 0

    def oriented(self, value: float) -> float:
        """Return the difference with its sign turned so that more is better."""
        return value if self.higher_is_better else -value

    def _digits(self, value: float) -> str:
        is_fixed = self.suffix or self.points or self.spread is not None
        shown = f"{value:.{self.decimals}f}" if is_fixed else f"{value:.4g}"
        return shown.replace("-", MINUS)


def unit_of(experiment: Experiment) -> Unit:
    """Return in what the experiment's score is told."""
    run = experiment.runs[0]
    score = run.score
    if score == "accuracy":
        return Unit("accuracy", suffix=f"{SPACE}%", points=f"{SPACE}points")
    if score in TITLES:
        return Unit(TITLES[score], points=f"{SPACE}points")
    columns = _columns(run.folder)
    if score == "loss" and columns and not columns.get("classes"):
        label = block(run.config, "data").get("label", "the target")
        spread = number(columns.get("target_std"), 1.0)
        return Unit(f"error of {label}", higher_is_better=False, spread=spread, decimals=digits_of(spread))
    return Unit("loss" if score == "loss" else score, higher_is_better=score != "loss")


def score_word(experiment: Experiment) -> str:
    """Return what the score of tables and charts is called, where more is better."""
    return "score" if experiment.score == "loss" else TITLES.get(experiment.score, experiment.score)


def score_note(experiment: Experiment) -> str:
    """Return the sentence that says what a score without a usual name is; nothing for accuracy and the like."""
    if experiment.score != "loss":
        return ""
    if unit_of(experiment).spread is None:
        return " The score is minus the loss: 0 is best."
    what = "minus the mean squared error of the standardised label"
    return f" The score is {what}: 0 is best, {MINUS}1 is what predicting the mean gets."


def digits_of(spread: float) -> int:
    """Return the decimals that show a hundredth of a spread; a target in the thousands has none."""
    return max(0, 2 - math.floor(math.log10(spread))) if spread > 0 and math.isfinite(spread) else 3


def _columns(folder: Path) -> Mapping[str, Any]:
    """Return what a run on a table says about its columns; nothing where there is no such file."""
    try:
        found = json.loads((folder / "features.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
