"""Wrong labels that were put there on purpose: what a method found of them, and what finding them was good for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.measures import Measure
from dqnfed.report.reader import Run
from dqnfed.report.run_files import block, number

PREFIX = "fedcorr+"
NOISE_MEASURES: tuple[Measure, ...] = (
    Measure("before", "Wrong before %", "Wrong before", 1, False, "training labels that were made wrong"),
    Measure("after", "Wrong after %", "Wrong after", 1, False, "training labels that are wrong at the end"),
    Measure("right", "Changes right %", "Changes right", 1, True, "changed labels that are now right: precision"),
    Measure("repaired", "Repaired %", "Repaired", 1, True, "labels made wrong that are now right: recall"),
    Measure("precision", "Clients precision", "Precision", 2, True, "clients taken for noisy that are"),
    Measure("recall", "Clients recall", "Recall", 2, True, "noisy clients that were found"),
    Measure("f1", "Clients F1", "F1", 2, True, "harmonic mean of the clients' precision and recall"),
)


def noise_values(run: Run) -> dict[str, float]:
    """Return a run's measures of wrong labels, NaN where its method corrects none; nothing where none are wrong."""
    noise = block(run.summary, "noise")
    n_labels = number(noise.get("labels"), 0.0)
    if not n_labels:
        return {}
    clients, corrections = block(noise, "clients"), block(noise, "corrections")
    return {
        "before": 100.0 * number(noise.get("wrong_before")) / n_labels,
        "after": 100.0 * number(noise.get("wrong_after")) / n_labels,
        "right": 100.0 * number(corrections.get("precision")),
        "repaired": 100.0 * number(corrections.get("recall")),
        **{key: number(clients.get(key)) for key in ("precision", "recall", "f1")},
    }


def corrected_pairs(experiment: Experiment) -> list[tuple[Method, Method]]:
    """Return the methods that were run both without and with FedCorr before them."""
    methods = {method.algorithm: method for method in experiment.methods if not method.runs[0].model}
    if "fedcorr" in methods:
        methods.setdefault(f"{PREFIX}fedavg", methods["fedcorr"])
    return [(method, methods[PREFIX + name]) for name, method in methods.items() if PREFIX + name in methods]


def noise_line(summary: Mapping[str, Any]) -> str:
    """Return in words what a run made of wrong labels, for a terminal; empty where there were none."""
    noise = block(summary, "noise")
    clients, corrections = block(noise, "clients"), block(noise, "corrections")
    if not noise:
        return ""
    start = f"wrong labels: {noise['wrong_before']:,} of {noise['labels']:,}, on {noise['n_noisy']} clients"
    if not clients:
        return start
    f1 = "" if math.isnan(number(clients.get("f1"))) else f" (F1 {clients['f1']:.2f})"
    right = number(corrections.get("precision"))
    said = "" if math.isnan(right) else f", {100 * right:.0f} % of them rightly"
    return (
        f"{start}; {clients['detected']} clients taken for noisy{f1}, {noise['changed']:,} labels changed{said}; "
        f"{noise['wrong_after']:,} are wrong now"
    )
