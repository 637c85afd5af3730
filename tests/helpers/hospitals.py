"""Four made-up hospitals in one table: mixed columns, holes, and one hospital with twelve patients."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

SIZES = {"Avon": 200, "Brook": 120, "Cedar": 60, "Dale": 12}
GROUP = {"Avon": "urban", "Brook": "urban", "Cedar": "rural", "Dale": "rural"}


def hospital_rows(missing: float = 0.05, seed: int = 0) -> list[dict[str, str]]:
    """Return one row a patient; the outcome depends on age, pressure, smoking and the hospital."""
    rng = np.random.default_rng(seed)
    rows = []
    for k, (name, n) in enumerate(SIZES.items()):
        for _ in range(n):
            age, pressure = rng.normal(55 + 5 * k, 12), rng.normal(130, 15)
            smokes = rng.choice(["never", "former", "current"])
            ward = rng.choice(["A", "B"])
            risk = (
                (age - 60) / 10
                + (pressure - 130) / 15
                + {"never": -1, "former": 0, "current": 1}[smokes]
                + 0.3 * (k - 1)
            )
            outcome = "died" if risk + rng.normal() > 0 else "survived"
            features = {"age": f"{age:.1f}", "pressure": f"{pressure:.0f}", "smokes": smokes, "ward": ward}
            holed = {key: "" if rng.random() < missing else value for key, value in features.items()}
            rows.append({"hospital": name, "region": GROUP[name], **holed, "outcome": outcome})
    return rows


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path
