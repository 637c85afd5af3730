"""Which model to keep by default where the data are a table of one's own: the numbers of docs/how-to/validation.md.

    python benchmarks/own_tables.py --seeds 0:10
    python benchmarks/own_tables.py --seeds 0:2 --tables wine --rules last,loss

Four tables: `heart`, whose clients are hospitals, and three of scikit-learn, whose rows are dealt to four clients by
the quartiles of one column, which is left out then. Every run is as `dqnfed run --data` makes it by default, but for
the rule by which the model is kept. Printed are test scores, mean over clients / worst client, means over seeds.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets

from dqnfed.experiments.compare import seeds_from
from dqnfed.experiments.config import Config, read_config
from dqnfed.experiments.data_commands import OWN_TRAINING, own_config
from dqnfed.experiments.experiment import run_experiment

METHODS = ("dqn-fed", "fedavg")
RULES = ("last", "loss", "mean", "worst10")


class Dealt(NamedTuple):
    """A table of scikit-learn, and the column by whose quartiles its rows are dealt."""

    load: Callable[..., Any]
    by: str


TABLES = {
    "breast-cancer": Dealt(datasets.load_breast_cancer, "mean texture"),
    "wine": Dealt(datasets.load_wine, "alcohol"),
    "diabetes": Dealt(datasets.load_diabetes, "age"),
}


def write_table(name: str, path: Path) -> None:
    """Write the table with a column `client`: the quartile, 0 to 3, of the column that its rows are dealt by."""
    bunch = TABLES[name].load()
    names = [str(column) for column in bunch.feature_names]
    by = bunch.data[:, names.index(TABLES[name].by)]
    client = np.searchsorted(np.quantile(by, (0.25, 0.5, 0.75)), by, side="right")
    kept = [i for i, column in enumerate(names) if column != TABLES[name].by]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["client", *(names[i] for i in kept), "label"])
        for k, x, y in zip(client, bunch.data, bunch.target, strict=True):
            rows.writerow([f"quarter {k + 1}", *(repr(float(x[i])) for i in kept), y])


def configs(name: str, folder: Path) -> Iterator[tuple[str, Config]]:
    """Give the run of every method, seeds and rules aside."""
    for method in METHODS:
        if name == "heart":
            own = [f"{'algorithm' if key == 'lr' else 'train'}.{key}={value}" for key, value in OWN_TRAINING.items()]
            yield method, read_config("heart", [f"algorithm.name={method}", f"train.lr={OWN_TRAINING['lr']}", *own])
        else:
            path = folder / f"{name}.csv"
            write_table(name, path)
            yield method, own_config(path, client="client", label="label", changes=(f"algorithm.name={method}",))


def measured(config: Config, seed: int, rule: str) -> tuple[float, float]:
    """Return the kept model's test score, mean over clients and worst client."""
    chosen = config.model_copy(update={"eval": config.eval.model_copy(update={"select": rule})})
    found = run_experiment(chosen.with_seed(seed), None).accuracy
    return found["mean"], found["min"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", default="0:10")
    options.add_argument("--tables", default=",".join(["heart", *TABLES]))
    options.add_argument("--rules", default=",".join(RULES))
    chosen = options.parse_args()
    rules, seeds = chosen.rules.split(","), seeds_from(chosen.seeds)
    print("| table | method |", " | ".join(f"`{rule}`" for rule in rules), "|", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.tables.split(","):
            for method, config in configs(name, Path(folder)):
                cells = []
                for rule in rules:
                    mean, worst = np.mean([measured(config, seed, rule) for seed in seeds], axis=0)
                    digits = 3 if name == "diabetes" else 1
                    cells.append(f"{abs(mean):.{digits}f} / {abs(worst):.{digits}f}")
                print(f"| {name} | {method} |", " | ".join(cells), "|", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
