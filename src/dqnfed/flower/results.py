"""A run as Flower reports it: a log line a round, and a `Result` at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from dqnfed.core.result import RunResult
from dqnfed.core.tensors import named_parameters
from dqnfed.flower.records import array_record
from dqnfed.maths.fairness import known_measures
from dqnfed.sim.ending import DIVERGED
from dqnfed.sim.selection import kept_line

flower_log = logging.getLogger("flwr")


class RoundLog:
    """An observer that writes one line a round into Flower's log."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        flower_log.info("dqnfed: run folder %s", out if out is not None else "none")

    def round(self, record: Mapping[str, Any]) -> None:
        flower_log.info("dqnfed: round %d %s, %s", record["round"], record["status"], _numbers(record))
        for fault in record["dropped"]:
            flower_log.warning("dqnfed: round %d without client %d: %s", record["round"], fault["client"], fault["why"])

    def end(self, summary: Mapping[str, Any]) -> None:
        level = logging.WARNING if summary["status"] == DIVERGED else logging.INFO
        facts = (summary["status"], summary.get("rounds", 0), summary["reason"])
        flower_log.log(level, "dqnfed: %s after %d rounds %s", *facts)
        if line := kept_line(summary):
            flower_log.info("dqnfed: %s", line)


def flower_result(result: RunResult) -> Result:
    """Return the run's final model and its aggregate metrics, by Flower's rounds, which count from 1."""
    found = Result(arrays=array_record(named_parameters(result.theta, result.layout)))
    for record in result.history:
        train = {key: record[key] for key in ("rho", "loss_before", "loss_after") if record[key] is not None}
        if train:
            found.train_metrics_clientapp[record["round"] + 1] = MetricRecord(train)
        if record["accuracy"] is not None:
            evaluated = {"train_loss": record["train_loss"]["mean"], **record["accuracy"]}
            names = known_measures(evaluated, list(evaluated))
            known: dict[str, Any] = {key: float(evaluated[key]) for key in names if evaluated[key] is not None}
            found.evaluate_metrics_clientapp[record["round"] + 1] = MetricRecord(known)
    return found


def _numbers(record: Mapping[str, Any]) -> str:
    parts = [] if record["loss_after"] is None else [f"participants' loss {record['loss_after']:.4g}"]
    if record["accuracy"] is not None:
        accuracy = record["accuracy"]
        named = {"mean": "mean", "std": "std", "worst10": "worst 10%"}
        shown = [f"{named[key]} {accuracy[key]:.2f}" for key in known_measures(accuracy, list(named))]
        parts.append(f"score {', '.join(shown)}")
    return "; ".join(parts) or "not evaluated"
