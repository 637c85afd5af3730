"""What clients on Flower measured, by client, and what was refused of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dqnfed.core.problem import Problem
from dqnfed.flower import checks
from dqnfed.flower.checks import Question, Reported
from dqnfed.flower.exchange import first_line
from dqnfed.sim.clients import Evaluated, Validated

logger = logging.getLogger("dqnfed")


def refusal(error: Exception) -> str:
    """Return why a reply is not used, as the log and `metrics.jsonl` say it."""
    return f"its reply is refused: {first_line(error)}"


class Evaluations:
    """The clients' newest evaluations, and the evaluations and nodes that were refused since the last record."""

    def __init__(self) -> None:
        self.question = Question((), with_loss=True)  # that the clients are asked at present
        self.reports: dict[int, Reported] = {}
        self._usual_loss = 0.0  # the largest median of evaluated losses so far
        self._refused: list[dict[str, Any]] = []

    def enter(self, client: int, content: Any, problem: Problem) -> None:
        """Note what a client reports; an error where it is no answer to the question."""
        self.reports[client] = checks.read_report(content, self.question, problem)

    def refuse(self, why: str, **who: int) -> None:
        """Note that a client or a node was refused."""
        self._refused.append({**who, "why": why})

    def note_silent(self, faults: Mapping[int, str], round: int) -> None:
        """Write down whose evaluation is missing, and why."""
        for client, why in sorted(faults.items()):
            logger.warning("evaluation after round %d: client %d is silent, %s", round, client, why)
            self.refuse(why, client=client)

    def drop_far_off(self) -> dict[int, str]:
        """Leave out evaluations whose losses are far above all that is usual, and return whose, and why."""
        found = checks.far_off(self.reports, self._usual_loss)
        self.reports = {client: each for client, each in self.reports.items() if client not in found}
        self._usual_loss = max(self._usual_loss, checks.usual_loss(self.reports))
        return {client: f"its reply is refused: {why}" for client, why in found.items()}

    def new_refusals(self) -> list[dict[str, Any]]:
        """Return what was refused since the last call, and why."""
        refused, self._refused = self._refused, []
        return refused

    def evaluated(self, names: Sequence[str]) -> Evaluated:
        """Return losses and the scores of the models of these names."""
        who = sorted(self.reports)
        found = [self.reports[client] for client in who]
        scores = [[each.scores[k] for each in found] for k in range(len(names))]
        return Evaluated(
            torch.tensor(who, dtype=torch.long),
            torch.tensor([each.loss for each in found], dtype=torch.float64),
            {name: torch.tensor(each, dtype=torch.float64) for name, each in zip(names, scores, strict=True)},
        )

    def validated(self) -> Validated:
        """Return losses and scores of the primary model."""
        found = [self.reports[client] for client in sorted(self.reports)]
        return Validated(
            torch.tensor([each.losses[0] for each in found], dtype=torch.float64),
            torch.tensor([each.scores[0] for each in found], dtype=torch.float64),
        )
