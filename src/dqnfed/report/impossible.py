"""Which printed values no set of client accuracies can have.

Printed values are means over seeds. Every bound below holds for one seed and survives averaging over seeds, because it
is convex (lower bounds) or concave (upper bounds) in the printed quantities; where it is neither, a margin is allowed.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

from dqnfed.experiments.paper import PrintedTable
from dqnfed.report.measures import tail_size

ROUNDING = 0.005  # printed values have two decimals
SEED_MARGIN = 0.05  # relative; seed averages of angle and KL are not functions of seed averages of mean and std


class StdBounds(NamedTuple):
    """Smallest and largest standard deviation that mean and tails leave room for."""

    low: float
    high: float


def impossible_values(table: PrintedTable, method: str) -> dict[str, str]:
    """Return the columns of a printed row that cannot be true, each with the reason; `method` is the printed name."""
    row = {c: v for c, v in zip(table.columns, table.rows[method], strict=True) if v is not None}
    if "mean" not in row or "std" not in row:
        return {}
    found: dict[str, str] = {}
    classes = [value for column, value in row.items() if column.startswith("class:")]
    if classes and len(classes) == table.n_clients:
        found |= _class_reasons(row, classes)
    elif table.n_clients is not None:
        found |= _tail_reasons(row, table.n_clients)
    if "angle" in row:
        angle = math.degrees(math.atan2(row["std"], row["mean"]))
        if abs(row["angle"] - angle) > SEED_MARGIN * angle:
            found["angle"] = f"the angle is atan(std / mean) = {angle:.2f}° for the printed std and mean"
    if "kl" in row:
        most = math.log1p((row["std"] / row["mean"]) ** 2)
        if row["kl"] - 0.0005 > (1 + SEED_MARGIN) * most:
            found["kl"] = f"KL is at most ln(1 + (std / mean)²) = {most:.3f} for the printed std and mean"
    return found


def std_bounds(mean: float, worst: float | None, best: float | None, n_clients: int, tail: float) -> StdBounds:
    """Return the range of standard deviations open to K accuracies with this mean and these means of the tails.

    Smallest: all clients of a tail alike, and all others alike. Largest: the others lie between the tail means, and a
    tail's clients lie beyond the mean of the others (which lie between them and the other tail), all but one as near to
    it as possible. With a = mean - worst and b = best - mean both are square roots of quadratic forms in (a, b); the
    larger of its value and of the chord between its axes bounds the second one for averages over seeds too.
    """
    m = tail_size(n_clients, tail)
    below, above = (0.0 if worst is None else mean - worst), (0.0 if best is None else best - mean)
    tails = m * (worst is not None) + m * (best is not None)
    middle = m * (below - above) / (n_clients - tails) if tails < n_clients else 0.0
    low = math.sqrt((m * below**2 + m * above**2 + (n_clients - tails) * middle**2) / n_clients)
    if worst is None or best is None or tails >= n_clients:
        return StdBounds(low, math.inf)
    chord = below * _largest_std(1.0, 0.0, n_clients, m) + above * _largest_std(0.0, 1.0, n_clients, m)
    return StdBounds(low, max(chord, _largest_std(below, above, n_clients, m)))


def _largest_std(below: float, above: float, n_clients: int, m: int) -> float:
    inner = n_clients - 2 * m
    middle = m * (below - above) / inner
    others = inner * below * above - m * (above - below) ** 2  # (x + below)(above - x) >= 0 for each of them, summed
    lowest = (m * below + (m - 1) * middle) ** 2 + (m - 1) * middle**2
    highest = (m * above - (m - 1) * middle) ** 2 + (m - 1) * middle**2
    return math.sqrt(max(0.0, others + lowest + highest) / n_clients)


def _tail_reasons(row: dict[str, float], n_clients: int) -> dict[str, str]:
    tail = 0.05 if "worst5" in row or "best5" in row else 0.10
    worst, best = row.get("worst5", row.get("worst10")), row.get("best5", row.get("best10"))
    if worst is None and best is None:
        return {}
    bounds = _rounded_bounds(row["mean"], worst, best, n_clients, tail)
    if row["std"] + ROUNDING < bounds.low:
        square = row["std"] ** 2
        hint = f" (its square, {square:.2f}, is possible)" if bounds.low <= square <= bounds.high else ""
        return {"std": f"with the printed mean and tails it is at least {bounds.low:.2f}{hint}"}
    if row["std"] - ROUNDING > bounds.high:
        return {"std": f"with the printed mean and tails it is at most {bounds.high:.2f}"}
    return {}


def _rounded_bounds(mean: float, worst: float | None, best: float | None, n_clients: int, tail: float) -> StdBounds:
    """Return the widest bounds over all values that are printed like these."""
    steps = (-ROUNDING, 0.0, ROUNDING)
    found = [
        std_bounds(mean + x, None if worst is None else worst + y, None if best is None else best + z, n_clients, tail)
        for x, y, z in product(steps, steps, steps)
    ]
    return StdBounds(min(bounds.low for bounds in found), max(bounds.high for bounds in found))


def _class_reasons(row: dict[str, float], classes: list[float]) -> dict[str, str]:
    found = {}
    mean = sum(classes) / len(classes)
    if abs(mean - row["mean"]) > 3 * ROUNDING:
        found["mean"] = f"the mean of the printed classes is {mean:.2f}"
    low = math.sqrt(sum((value - mean) ** 2 for value in classes) / len(classes))
    if row["std"] + 2 * ROUNDING < low:
        found["std"] = f"the standard deviation of the printed classes is {low:.2f}"
    return found
