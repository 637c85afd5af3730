"""The paper's figures from run folders, as PNG, SVG or PDF: convergence, client histogram, improved clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dqnfed.report.comparison import Experiment, group
from dqnfed.report.curves import N_POINTS_NOISY, seed_curve
from dqnfed.report.reader import read_intact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
FORMATS = ("png", "svg", "pdf")
# dark enough for text on white, and apart for colour-blind eyes: the page's light palette
COLOURS = ("#0b5db4", "#9a291e", "#00755d", "#8e4a91", "#946100", "#4a395d", "#c21855", "#2b2f77")
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e9ecec",
    "axes.edgecolor": "#57616a",
    "axes.labelcolor": "#1b2125",
    "savefig.bbox": "tight",
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's fonts
    "pdf.fonttype": 42,
    "svg.hashsalt": "dqnfed",  # the same runs give the same file
}


def write_figures(runs: Sequence[Path], out: Path, *, formats: Sequence[str] = ("png", "svg", "pdf")) -> list[Path]:
    """Write every figure of every experiment into the folder `out` and return the files."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"a figure is written as one of {', '.join(FORMATS)}, but {unknown[0]!r} was asked for.")
    reading = read_intact(runs)
    if not reading.runs:
        reasons = "; ".join(map(str, reading.problems)) or "no folder was given"
        raise ValueError(f"there is no run to draw: {reasons}. Give a run folder, or a folder above run folders.")
    out.mkdir(parents=True, exist_ok=True)
    return [
        path
        for experiment in group(reading.runs).experiments
        for name, draw in FIGURES.items()
        for path in write_figure(experiment, draw, out / f"{_file_name(experiment.name)}-{name}", formats)
    ]


def convergence(figure: Figure, experiment: Experiment) -> None:
    """Draw the mean score against rounds, the range over seeds as a band, names at the line ends."""
    axes, ends = figure.add_subplot(), []
    for i, method in enumerate(experiment.methods):
        curve = seed_curve(method.runs, "mean")
        if curve is None:
            continue
        colour, dash = _look(experiment, i)
        axes.plot(curve.rounds, curve.mean, dash, color=colour, linewidth=2.2 if i == experiment.focus else 1.3)
        if len(method.runs) > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=colour, alpha=0.13, linewidth=0)
        ends.append((float(curve.rounds[-1]), float(curve.mean[-1]), method.label, colour))
    axes.set(xlabel="communication rounds", ylabel=_unit(experiment, "mean"))
    _name_ends(axes, ends)


def improved(figure: Figure, experiment: Experiment) -> None:
    """Draw the share of participants whose training loss did not rise, against rounds."""
    axes, ends = figure.add_subplot(), []
    for i, method in enumerate(experiment.methods):
        curve = seed_curve(method.runs, "rho", n_points=N_POINTS_NOISY, exact_ends=False)
        if curve is None:
            continue
        colour, dash = _look(experiment, i)
        axes.plot(curve.rounds, 100 * curve.mean, dash, color=colour, linewidth=2.2 if i == experiment.focus else 1.3)
        ends.append((float(curve.rounds[-1]), 100 * float(curve.mean[-1]), method.label, colour))
    axes.set(xlabel="communication rounds", ylabel="improved clients, %")
    _name_ends(axes, ends)


def histogram(figure: Figure, experiment: Experiment) -> None:
    """Draw how the client scores of all seeds are distributed, one row per method on common bins, means dashed."""
    values = [np.concatenate([run.accuracy for run in method.runs]) for method in experiment.methods]
    values = [found[np.isfinite(found)] for found in values]
    pooled = np.concatenate(values)
    low, high = (float(pooled.min()), float(pooled.max())) if pooled.size else (0.0, 1.0)
    bins = np.linspace(low, high if high > low else low + 1, 25)
    figure.set_size_inches(5.2, 0.75 * len(values) + 0.6)
    rows = figure.subplots(len(values), sharex=True, sharey=True, squeeze=False, gridspec_kw={"hspace": 0.5})[:, 0]
    for i, (axes, method, found) in enumerate(zip(rows, experiment.methods, values, strict=True)):
        colour, _ = _look(experiment, i)
        shares = 100 * np.histogram(found, bins)[0] / max(1, found.size)
        axes.stairs(shares, bins, color=colour, fill=True)
        axes.set_title(method.label, loc="left", color=colour, fontsize=8, fontweight="bold", pad=2)
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False, labelleft=False, bottom=i == len(values) - 1)
        axes.grid(visible=False)
        if found.size:
            axes.axvline(float(found.mean()), color="#1b2125", linewidth=1, linestyle="--")
    rows[-1].set_xlabel(_unit(experiment, "client"))


FIGURES: dict[str, Callable[[Figure, Experiment], None]] = {
    "convergence": convergence,
    "histogram": histogram,
    "improved": improved,
}


def write_figure(drawn: T, draw: Callable[[Figure, T], None], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write one figure in every format beside `stem` and return the files."""
    paths = [stem.with_name(f"{stem.name}.{name}") for name in formats]
    for path in paths:
        write_picture(path, (5.2, 3.3), lambda figure: draw(figure, drawn))
    return paths


def write_picture(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """Write a figure of so many inches; the same drawing gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        draw(figure)
        when = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
        figure.savefig(path, dpi=200, metadata=when)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write every line's name beside its end, moved apart where they would cover each other."""
    low, high = axes.get_ylim()
    right = max((end[0] for end in ends), default=1.0)
    axes.set_xlim(right=right)
    gap = 0.06 * (high - low)
    placed = spread_apart([end[1] for end in ends], gap)
    for (x, y, label, colour), at in zip(ends, placed, strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xytext=(right + 0.03 * right, at),
            color=colour,
            va="center",
            annotation_clip=False,
            fontweight="bold",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 1},
        )


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Return positions in the order of the wanted ones, at least `gap` apart, nearest to them in least squares."""
    order = np.argsort(np.asarray(wanted), kind="stable")
    blocks: list[tuple[list[int], float]] = []  # members in order, centre
    for i in order.tolist():
        members, centre = [i], float(wanted[i])
        while blocks and centre - blocks[-1][1] < gap * (len(members) + len(blocks[-1][0])) / 2:
            members = blocks.pop()[0] + members
            middle = (len(members) - 1) / 2
            centre = float(np.mean([wanted[j] - (place - middle) * gap for place, j in enumerate(members)]))
        blocks.append((members, centre))
    found = [0.0] * len(wanted)
    for members, centre in blocks:
        for place, j in enumerate(members):
            found[j] = centre + (place - (len(members) - 1) / 2) * gap
    return found


def _look(experiment: Experiment, i: int) -> tuple[str, str]:
    focus = experiment.focus
    slot = 0 if i == focus else i + 1 if i < focus else i
    return COLOURS[slot % len(COLOURS)], DASHES[slot // len(COLOURS) % len(DASHES)]


def _unit(experiment: Experiment, what: str) -> str:
    return f"{what} accuracy, %" if experiment.score == "accuracy" else f"{what} {experiment.score}"


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "experiment"
