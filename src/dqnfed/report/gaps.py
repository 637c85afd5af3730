"""The picture of the convex workbench: how far from the optimum after so many rounds, and after so many bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

LINES = ("-", "--", "-.", ":")


def draw_gaps(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path) -> None:
    """Draw every method's gap f - f* against rounds and against uplink bits; curves are (gaps, bits) by method."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_rounds, by_bits = figure.subplots(1, 2, sharey=True)
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for i, (name, (gaps, bits)) in enumerate(curves.items()):
        shown = [max(gap, 1e-16) for gap in gaps]
        look = {"color": colours[i % 10], "linestyle": LINES[i // 10 % len(LINES)], "linewidth": 1.4}
        by_rounds.plot(range(len(shown)), shown, label=name, **look)
        by_bits.plot([max(b, 1.0) / 1000 for b in bits], shown, **look)
    by_rounds.set(xlabel="rounds", ylabel="gap to the optimum", yscale="log", ylim=(1e-14, None))
    by_rounds.set_xscale("symlog", linthresh=20)
    by_bits.set(xlabel="kilobits up a client", xscale="log")
    for axes in (by_rounds, by_bits):
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)
