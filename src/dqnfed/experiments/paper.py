"""The values printed in the tables of the DQN-Fed paper (Hamidi & Ye, TMLR 2025), as plain data.

A column is named like the measure it should be compared with; `class:NAME` is the accuracy of the client that holds one
class, `seconds` is wall-clock time. Whether printed values can be true at all is checked in `dqnfed.report.impossible`.
"""

from __future__ import annotations

from typing import NamedTuple

from dqnfed.experiments.config import preset_names, read_config

PAPER_SEEDS = 5  # over which the paper averages its tables
Row = tuple[float | None, ...]


class PrintedTable(NamedTuple):
    """One setting's part of a printed table."""

    key: str  # name of the experiment that repeats it
    title: str
    n_clients: int | None  # None where the paper does not say
    columns: tuple[str, ...]
    rows: dict[str, Row]  # by the method's name as printed

    def value(self, algorithm: str, column: str) -> float | None:
        """Return the printed value for a method, or None where the paper prints none."""
        for name, row in self.rows.items():
            if column in self.columns and _plain(algorithm) in _names(name):
                return row[self.columns.index(column)]
        return None

    def printed_name(self, algorithm: str) -> str | None:
        """Return the name under which the paper prints a method, or None where it does not."""
        return next((name for name in self.rows if _plain(algorithm) in _names(name)), None)


def paper_rounds(table: PrintedTable) -> int | None:
    """Return the rounds of the preset that repeats the paper's experiment; None where there is none."""
    return read_config(table.key).train.rounds if table.key in preset_names() else None


TAIL_10 = ("mean", "std", "worst10", "best10")
ANGLE_KL = ("mean", "std", "angle", "kl")

TABLES: tuple[PrintedTable, ...] = (
    PrintedTable(
        "cifar10-setup1", "CIFAR-10, Setup 1; seconds on one RTX 3090", 100,
        ("mean", "std", "worst5", "best5", "seconds"),
        {
            "FedAvg": (46.85, 3.54, 19.84, 69.28, 1250.0),
            "q-FFL": (46.30, 3.27, 23.39, 68.02, 1360.0),
            "FedMGDA": (45.34, 3.37, 24.00, 68.51, 1333.0),
            "FedHEAL": (46.40, 3.61, 19.33, 69.30, None),
            "TERM": (47.11, 3.66, 28.21, 69.51, 1312.0),
            "Ditto": (46.31, 3.44, 27.14, 68.44, 1320.0),
            "FedNL": (47.33, 3.92, 24.41, 69.52, 2320.0),
            "FedNew": (47.51, 3.68, 25.77, 69.74, 2140.0),
            "DQN-Fed": (47.72, 3.20, 29.34, 69.37, 1810.0),
        },
    ),
    PrintedTable(
        "cifar10-setup2", "CIFAR-10, Setup 2", 10, TAIL_10,
        {
            "FedAvg": (63.55, 5.44, 53.40, 72.24),
            "q-FFL": (57.27, 5.60, 47.29, 66.92),
            "FedMGDA": (62.05, 4.88, 52.69, 70.77),
            "FedHEAL": (63.05, 4.95, 48.69, 70.88),
            "TERM": (64.15, 5.90, 56.21, 72.20),
            "Ditto": (63.49, 5.70, 55.99, 71.34),
            "FedNL": (64.72, 6.02, 56.20, 72.33),
            "FedNew": (64.58, 6.11, 56.96, 72.12),
            "DQN-Fed": (64.88, 4.90, 58.01, 72.88),
        },
    ),
    PrintedTable(
        "cifar10-setup2-participation10", "CIFAR-10, Setup 2, 10 % participation", 10, ("mean", "std", "best10"),
        {
            "FedAvg": (61.41, 6.36, 68.12),
            "q-FFL": (56.55, 6.24, 65.89),
            "FedMGDA": (61.05, 5.80, 69.07),
            "FedHEAL": (61.26, 6.12, 68.52),
            "TERM": (63.22, 5.93, 70.56),
            "Ditto": (62.87, 6.07, 69.92),
            "FedNL": (63.25, 6.16, 70.81),
            "FedNew": (63.80, 6.07, 71.21),
            "DQN-Fed": (64.14, 5.67, 72.21),
        },
    ),
    PrintedTable(
        "cifar10-setup2-participation50", "CIFAR-10, Setup 2, 50 % participation", 10, ("mean", "std", "best10"),
        {
            "FedAvg": (62.74, 6.01, 70.15),
            "q-FFL": (58.97, 5.95, 68.22),
            "FedMGDA": (62.57, 5.54, 70.52),
            "FedHEAL": (62.92, 5.71, 70.72),
            "TERM": (63.81, 5.66, 71.83),
            "Ditto": (63.51, 5.76, 71.24),
            "FedNL": (64.15, 5.90, 71.92),
            "FedNew": (64.56, 5.80, 72.08),
            "DQN-Fed": (64.71, 5.48, 72.55),
        },
    ),
    PrintedTable(
        "cifar100-setup1", "CIFAR-100, Setup 1", 10, TAIL_10,
        {
            "FedAvg": (30.05, 4.03, 25.20, 40.31),
            "q-FFL": (28.86, 4.44, 25.38, 39.77),
            "FedMGDA": (29.12, 4.17, 25.67, 39.71),
            "FedLF": (30.28, 3.68, 25.33, 39.45),
            "TERM": (30.34, 3.51, 27.03, 39.35),
            "Ditto": (29.81, 3.79, 26.90, 39.39),
            "FedNL": (31.58, 4.55, 27.14, 40.62),
            "FedNew": (30.95, 4.39, 27.19, 40.55),
            "DQN-Fed": (32.58, 3.60, 27.91, 40.99),
        },
    ),
    PrintedTable(
        "cifar100-setup2", "CIFAR-100, Setup 2", 50, TAIL_10,
        {
            "FedAvg": (20.15, 6.40, 11.20, 33.80),
            "q-FFL": (20.20, 6.24, 11.09, 34.02),
            "FedMGDA": (20.15, 5.41, 11.12, 33.92),
            "FedLF": (18.92, 4.90, 11.29, 28.60),
            "TERM": (17.88, 5.98, 10.09, 31.68),
            "Ditto": (17.52, 5.65, 10.21, 31.25),
            "FedNL": (22.74, 6.02, 12.15, 34.44),
            "FedNew": (21.16, 5.27, 11.77, 34.27),
            "DQN-Fed": (23.15, 4.45, 12.81, 35.11),
        },
    ),
    PrintedTable(
        "femnist-original", "FEMNIST, original", 500, ANGLE_KL,
        {
            "FedAvg": (80.42, 11.16, 10.18, 0.017),
            "q-FFL": (80.91, 10.62, 9.71, 0.016),
            "FedMGDA": (81.00, 10.41, 10.04, 0.016),
            "TERM": (81.08, 10.32, 9.15, 0.015),
            "FedLF": (82.45, 9.85, 9.01, 0.012),
            "Ditto": (83.77, 10.13, 9.34, 0.014),
            "FedNL": (84.21, 11.22, 10.07, 0.015),
            "FedNew": (84.25, 10.88, 9.78, 0.014),
            "DQN-Fed": (85.15, 9.58, 8.14, 0.010),
        },
    ),
    PrintedTable(
        "femnist-skewed", "FEMNIST, skewed", 100, ANGLE_KL,
        {
            "FedAvg": (79.24, 22.30, 12.29, 0.054),
            "q-FFL": (84.65, 18.56, 12.01, 0.038),
            "FedMGDA": (85.41, 17.36, 11.63, 0.032),
            "TERM": (84.29, 13.88, 11.27, 0.025),
            "FedLF": (85.21, 14.92, 11.44, 0.027),
            "Ditto": (92.51, 14.32, 11.45, 0.022),
            "FedNL": (92.94, 16.45, 12.56, 0.045),
            "FedNew": (92.25, 15.21, 11.92, 0.037),
            "DQN-Fed": (93.80, 13.91, 11.41, 0.011),
        },
    ),
    PrintedTable(
        "shakespeare-setup1", "Shakespeare, Setup 1", 31, TAIL_10,
        {
            "FedAvg": (53.21, 9.25, 51.01, 58.41),
            "q-FFL": (53.90, 7.52, 51.52, 58.47),
            "FedMGDA": (53.08, 8.14, 52.84, 58.51),
            "FedLF": (54.58, 8.44, 52.87, 59.84),
            "TERM": (54.16, 8.21, 52.09, 59.15),
            "Ditto": (60.74, 8.32, 53.57, 64.92),
            "FedNL": (60.25, 8.24, 53.15, 64.15),
            "FedNew": (60.59, 7.55, 53.18, 64.09),
            "DQN-Fed": (61.65, 6.55, 53.79, 64.86),
        },
    ),
    PrintedTable(
        "shakespeare-setup2", "Shakespeare, Setup 2", 20, TAIL_10,
        {
            "FedAvg": (50.48, 1.24, 48.20, 52.10),
            "q-FFL": (50.72, 1.07, 48.90, 52.29),
            "FedMGDA": (50.41, 1.09, 48.18, 51.99),
            "FedLF": (52.45, 1.23, 50.02, 54.17),
            "TERM": (52.17, 1.11, 49.14, 53.62),
            "Ditto": (53.12, 1.20, 50.94, 55.23),
            "FedNL": (52.24, 1.25, 50.77, 54.41),
            "FedNew": (52.49, 1.19, 50.82, 54.36),
            "DQN-Fed": (52.89, 0.98, 51.02, 54.48),
        },
    ),
    PrintedTable(
        "fashion-mnist", "Fashion-MNIST", 3, ("mean", "std", "class:shirt", "class:pullover", "class:T-shirt"),
        {
            "FedAvg": (80.42, 3.39, 64.26, 87.00, 89.90),
            "q-FFL": (78.53, 2.27, 71.29, 81.46, 82.86),
            "FedMGDA+": (79.29, 2.53, 72.46, 79.74, 85.66),
            "FedHEAL": (80.22, 3.41, 63.71, 86.87, 89.94),
            "DQN-Fed": (81.27, 2.31, 72.57, 88.21, 90.99),
        },
    ),
    PrintedTable(
        "cinic10", "CINIC-10", 50, TAIL_10,
        {
            "q-FFL": (86.57, 14.91, 57.70, 100.00),
            "Ditto": (86.31, 15.14, 56.91, 100.00),
            "FedLF": (86.49, 15.12, 57.62, 100.00),
            "TERM": (86.40, 15.10, 57.30, 100.00),
            "DQN-Fed": (87.34, 14.85, 57.88, 99.99),
        },
    ),
    PrintedTable(
        "tiny-imagenet", "TinyImageNet", 20, TAIL_10,
        {
            "q-FFL": (18.90, 3.20, 13.12, 23.72),
            "FedLF": (16.55, 2.38, 12.40, 20.25),
            "TERM": (16.41, 2.77, 11.52, 21.02),
            "FedMGDA+": (14.00, 2.71, 9.88, 19.21),
            "DQN-Fed": (19.05, 2.35, 13.24, 23.58),
        },
    ),
    PrintedTable(
        "clothing1m", "Clothing1M", None, TAIL_10,
        {
            "FedAvg": (70.49, 13.25, 43.09, 91.05),
            "FedCorr": (72.55, 13.27, 43.12, 91.15),
            "DQN-Fed": (70.35, 5.17, 49.91, 90.77),
            "FedCorr + DQN-Fed": (72.36, 8.07, 46.77, 91.15),
        },
    ),
)  # fmt: skip


VARIANTS = {"cifar10setup1full": "cifar10setup1"}  # experiments that differ in the batches of some methods only


def printed_table(experiment: str) -> PrintedTable | None:
    """Return the printed table that an experiment repeats, or None; punctuation and case of the name do not matter."""
    wanted = VARIANTS.get(_plain(experiment), _plain(experiment))
    return next((table for table in TABLES if _plain(table.key) == wanted), None)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("+", "plus") if c.isalnum())


def _names(printed: str) -> set[str]:
    plain = _plain(printed)
    if plain in ("fedmgda", "fedmgdaplus"):  # the paper's text compares with FedMGDA+ throughout
        return {"fedmgda", "fedmgdaplus"}
    return {plain} if plain != "qffl" else {"qffl", "qfedavg"}
