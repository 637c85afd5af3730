"""The paper's figures from the stored summaries of a page: convergence, clients' accuracies, improved clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dqnfed.report.comparison import ORDER, Experiment, Method, display
from dqnfed.report.figures import convergence, histogram, improved, write_figure
from dqnfed.report.measures import Floats
from dqnfed.report.reader import Evaluation, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = dict[str, Any]
MAX_LINES = 8  # as many as the palette has colours


class Kind(NamedTuple):
    """One of the three figures: which entry of a summary it shows, how, and what a reader sees in it."""

    name: str
    entry: str
    draw: Callable[[Figure, Experiment], None]
    caption: str


KINDS = (
    Kind("convergence", "curve", convergence, "Mean accuracy against rounds, the range over seeds as a band"),
    Kind("clients", "clients", histogram, "Distribution of the clients' accuracies after the last round, all seeds"),
    Kind("improved", "improved_curve", improved, "Share of participants whose training loss a round does not raise"),
)


class Picture(NamedTuple):
    """A figure that a page's summaries allow."""

    file: str  # name in the folder of figures
    experiment: str
    kind: Kind
    runs: dict[str, list[Json]]  # by method, in the order of a table


def pictures(
    table: str, experiments: Mapping[str, Mapping[str, list[Json]]], first: Sequence[str] = ()
) -> list[Picture]:
    """Return the figures of a page whose runs stand by experiment and method, the methods with the best mean first.

    Of many methods those in `first` are shown, then the best: a figure has room for eight.
    """
    found: list[Picture] = []
    for name, methods in experiments.items():
        for kind in KINDS:
            have = {m: kept for m, runs in methods.items() if (kept := [run for run in runs if run.get(kind.entry)])}
            chosen = [*(m for m in first if m in have), *(m for m in have if m not in first)][:MAX_LINES]
            shown = {m: have[m] for m in sorted(chosen, key=_place)}
            stem = table if len(experiments) == 1 else f"{table}-{name}"
            if shown:
                found.append(Picture(f"{stem}-{kind.name}.svg", name, kind, shown))
    return found


def write_pictures(wanted: Sequence[Picture], folder: Path) -> list[Path]:
    """Write the figures and return their files; the same summaries give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in wanted:
        methods = tuple(
            Method(display(name), name, tuple(restored(run, picture.experiment) for run in runs))
            for name, runs in picture.runs.items()
        )
        stem = folder / picture.file.removesuffix(".svg")
        written += write_figure(Experiment(picture.experiment, methods), picture.kind.draw, stem, ("svg",))
    return written


def restored(run: Json, experiment: str) -> Run:
    """Return the run as the figures read it; what a summary does not keep is empty or NaN."""
    curves = {"mean": dict(run.get("curve", ())), "rho": dict(run.get("improved_curve", ()))}
    done = sorted({number for curve in curves.values() for number in curve})
    history: dict[str, Floats] = {
        key: np.array([curve.get(number, np.nan) for number in done]) for key, curve in curves.items()
    }
    unknown = np.full(len(done), np.nan)
    accuracy = np.array(run.get("clients", ()), dtype=np.float64)
    return Run(
        folder=Path(),
        experiment=experiment,
        algorithm=run["algorithm"],
        model="",
        seed=run["seed"],
        status=run["status"],
        config={},
        env={},
        summary={"rho_mean": run["improved"]},
        clients=(),
        rounds=np.array(done, dtype=np.float64) - 1,
        history={**history, "bytes": unknown, "seconds": unknown},
        last_scores={},
        evaluations=(Evaluation(run["rounds"] - 1, accuracy),) if len(accuracy) else (),
    )


def _place(algorithm: str) -> tuple[int, str]:
    return (ORDER.index(algorithm) if algorithm in ORDER else len(ORDER), algorithm)
