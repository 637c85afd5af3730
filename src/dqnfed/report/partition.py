"""A picture of a partition: who holds how many examples of which class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dqnfed.report.figures import STYLE

MAX_BARS = 100  # clients drawn one by one; more are sorted and thinned
MAX_NAMED = 12  # classes with a legend or a column
MAX_LINES = 40  # clients printed


def write_partition_picture(path: Path, counts: np.ndarray, names: Sequence[str], title: str) -> Path:
    """Write stacked bars, one a client, one colour a class, from counts [K, C], and return the file."""
    import matplotlib
    from matplotlib.figure import Figure

    n_clients, n_classes = counts.shape
    shown = np.arange(n_clients)
    if n_clients > MAX_BARS:
        shown = np.argsort(-counts.sum(axis=1), kind="stable")[np.linspace(0, n_clients - 1, MAX_BARS).astype(int)]
    palette = matplotlib.colormaps["tab20" if n_classes <= 20 else "turbo"]
    colours = [palette(i / max(1, n_classes - 1) if n_classes > 20 else i) for i in range(n_classes)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(min(12.0, 3.0 + 0.12 * len(shown)), 3.4))
        axes = figure.add_subplot()
        bottom = np.zeros(len(shown))
        for c in range(n_classes):
            axes.bar(range(len(shown)), counts[shown, c], bottom=bottom, color=colours[c], width=0.9, label=str(c))
            bottom += counts[shown, c]
        thinned = "" if len(shown) == n_clients else f" ({len(shown)} of {n_clients} shown, by size)"
        axes.set(ylabel="examples", title=title, xlabel=f"clients{thinned}")
        if len(shown) <= 20:
            axes.set_xticks(range(len(shown)), [names[int(k)] for k in shown], rotation=60, ha="right", fontsize=7)
        else:
            axes.set_xticks([])
        if n_classes <= MAX_NAMED:
            axes.legend(title="class", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=7)
        figure.savefig(path, dpi=150)
    return path


def partition_lines(names: Sequence[str], sizes: np.ndarray, counts: np.ndarray | None) -> list[str]:
    """Return the partition as text: sizes [K, 3] of every part and the label histogram [K, C] where there is one."""
    width = max(len("client"), *(len(name) for name in names))
    shown = list(range(len(names)))
    skipped = 0
    if len(shown) > MAX_LINES:
        skipped = len(shown) - MAX_LINES
        shown = shown[: MAX_LINES // 2] + shown[-MAX_LINES // 2 :]
    n_classes = 0 if counts is None else counts.shape[1]
    head = f"{'client':{width}}  {'train':>7} {'valid':>6} {'test':>6}"
    if counts is not None and n_classes <= MAX_NAMED:
        cell = max(4, len(str(int(counts.max()))))
        head += "  " + " ".join(f"{c:>{cell}}" for c in range(n_classes))
    elif counts is not None:
        head += "  classes  most frequent"
    lines = [head]
    for i, k in enumerate(shown):
        line = f"{names[k]:{width}}  {sizes[k, 0]:7d} {sizes[k, 1]:6d} {sizes[k, 2]:6d}"
        if counts is not None and n_classes <= MAX_NAMED:
            line += "  " + " ".join(f"{n:>{cell}d}" if n else " " * (cell - 1) + "." for n in counts[k])
        elif counts is not None:
            top = np.argsort(-counts[k], kind="stable")[:5]
            line += f"  {(counts[k] > 0).sum():7d}  " + ", ".join(f"{c}: {counts[k, c]}" for c in top if counts[k, c])
        lines.append(line)
        if skipped and i + 1 == MAX_LINES // 2:
            lines.append(f"... {skipped} more clients ...")
    total = sizes.sum(axis=1)
    lines.append(
        f"{len(names)} clients, {total.sum()} examples: smallest {total.min()}, median {int(np.median(total))}, "
        f"largest {total.max()}"
    )
    return lines
