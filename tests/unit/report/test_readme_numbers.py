"""README's tables of accuracies say what the stored summaries say.

Covered: the demo's table, Fashion-MNIST, four hospitals, all with their paired differences, and the table of local
training against its page, whose numbers are text. Not covered: seconds (another machine each), and numbers inside
sentences but those asserted here.
"""

from __future__ import annotations

import json
import math
import re
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from scipy import special

from dqnfed.report import tuned_page
from dqnfed.report.results import block
from dqnfed.report.significance import paired_difference
from tests.helpers.repository import ROOT

MINUS = "\N{MINUS SIGN}"
RESULTS = ROOT / "docs" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def stored(page: str) -> dict[str, list[dict[str, Any]]]:
    """Return a page's stored runs by method."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads((RESULTS / "data" / f"{page}.json").read_text())["runs"]:
        found.setdefault(run["algorithm"], []).append(run)
    return found


def table_after(text: str) -> list[list[str]]:
    """Return the cells of the first table after a text of README, without its head."""
    lines = README.partition(text)[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[first + 2 : last]]


def paired(runs: dict[str, list[dict[str, Any]]], key: str, other: str = "fedavg") -> str:
    """Return DQN-Fed's mean paired difference and its standard error."""
    ours, theirs = ({run["seed"]: run["accuracy"][key] for run in runs[name]} for name in ("dqn-fed", other))
    gaps = np.array([ours[seed] - theirs[seed] for seed in ours])
    return f"{gaps.mean():+.1f} ({gaps.std(ddof=1) / math.sqrt(len(gaps)):.1f})"


def test_the_demos_table() -> None:
    runs = stored("demo")
    rows = table_after("The demo's methods on `digits`")
    assert {row[0] for row in rows} == runs.keys()
    for name, *cells in rows:
        found = [[run["accuracy"][key] for run in runs[name]] for key in ("mean", "std", "worst10")]
        expected = [f"{fmean(values):.1f} ± {stdev(values):.1f}" for values in found]
        assert cells == [*expected, f"{100 * fmean(run['improved'] for run in runs[name]):.0f} %"]
    mean, worst = paired(runs, "mean"), paired(runs, "worst10")
    assert f"paired: mean {mean.replace('(', '(standard error ')}, worst 10 % {worst}." in README


def test_the_table_of_fashion_mnist() -> None:
    runs = stored("fashion-mnist")
    page = block(json.loads((RESULTS / "data" / "fashion-mnist.json").read_text()))
    for _, name, mean, worst, catches_up, improved in table_after(
        "round in which the mean accuracy is what FedAvg has"
    ):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`")).split(" | ")
        assert float(mean) == pytest.approx(fmean(run["accuracy"]["mean"] for run in runs[name]), abs=0.05)
        assert float(worst) == pytest.approx(fmean(min(run["clients"]) for run in runs[name]), abs=0.5)
        assert catches_up.split()[0] == row[-2]
        assert improved == f"{100 * fmean(run['improved'] for run in runs[name]):.0f} %"
    worst_class = paired(runs, "worst10")  # three clients: the worst one
    assert f"paired: mean {paired(runs, 'mean').replace('(', '(standard error ')}, worst class {worst_class}." in README


def test_the_table_of_four_hospitals() -> None:
    runs = stored("heart-joining")
    by_name = {row[0]: row[1:] for row in table_after("Its page begins with what each hospital gains by joining")}
    ours, alone = (np.array([run["clients"] for run in runs[name]]) for name in ("dqn-fed", "local-only"))
    for title, found in (("joining, `dqn-fed", ours), ("alone, `local-only", alone)):
        cells = [float(cell) for cell in by_name[title]]
        np.testing.assert_allclose(cells, [*found.mean(axis=0), found.mean()], atol=0.0501)
    gaps = ours - alone
    reach = special.stdtrit(len(gaps) - 1, 0.975) * gaps.std(axis=0, ddof=1) / math.sqrt(len(gaps))
    told = [f"{low:.1f} to {high:.1f}" for low, high in zip(gaps.mean(0) - reach, gaps.mean(0) + reach, strict=True)]
    assert [cell.replace(MINUS, "-") for cell in by_name["change, 95 % interval"][:4]] == told
    for name, value in re.findall(r"(pooling all rows|FedAvg) \((\d+\.\d)\)", README):
        method = {"pooling all rows": "pooled", "FedAvg": "fedavg"}[name]
        assert float(value) == pytest.approx(fmean(run["accuracy"]["mean"] for run in runs[method]), abs=0.0501)
    by_seed = [{run["seed"]: run["accuracy"]["min"] for run in runs[name]} for name in ("dqn-fed", "fedavg")]
    worst = paired_difference(*by_seed)
    assert worst is not None
    mean = paired(runs, "mean").replace(" (", ", standard error ").removesuffix(")")
    assert f"paired: mean {mean}; worst hospital {worst.difference:+.1f}, {worst.error:.1f})" in " ".join(
        README.split()
    )


def test_the_table_of_local_training_stands_on_its_page() -> None:
    """That page's numbers are text: no summary is stored, and nothing but their agreement can be checked."""
    parts = (RESULTS / "local-training.md").read_text(encoding="utf-8").split("\n### ")
    titles = {"CIFAR-10 Setup 1": "CIFAR-10 Setup 1", "MNIST by writer": "MNIST by writer"}
    titles |= {"CIFAR-10, small": "`cifar10-setup2-cnn`"}
    rows = table_after("**Local training, part of the clients a round**")[:-1]  # the last is stored, see below
    assert len(rows) == len(titles)
    for title, ours, fedavg, gaps, best in rows:
        heading = next(found for start, found in titles.items() if title.startswith(start))
        part = next(part for part in parts if part.startswith(heading))
        lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in part.splitlines() if line.startswith("| ")}
        assert [lines["| DQN-Fed, defaults"][i] for i in (0, 2)] == ours.split(" / ")
        assert [lines["| FedAvg"][i] for i in (0, 2)] == fedavg.split(" / ")
        assert lines["| FedAvg"][3:5] == gaps.split(" / ")
        name, _, values = best.partition(" ")
        assert [lines[f"| {name}"][i] for i in (0, 2)] == values.split(" (")[0].split(" / ")


def test_the_row_of_local_training_on_digits() -> None:
    data = json.loads((RESULTS / "data" / "digits-local.json").read_text())
    methods = tuned_page.ranked([run for run in data["runs"] if run["experiment"] == "digits-local-10"])
    one_model = [name for name in methods if name not in data["personal"] and not name.startswith("dqn-fed-")]

    def scores(name: str) -> str:
        return " / ".join(f"{tuned_page.average(methods[name], key):.1f}" for key in ("mean", "worst10"))

    gaps = [tuned_page.differences(methods, key, "fedavg")["dqn-fed"] for key in ("mean", "worst10")]
    cells = [scores("dqn-fed"), scores("fedavg"), " / ".join(f"{g.difference:+.1f} ({g.error:.1f})" for g in gaps)]
    assert one_model[:3] == ["dqn-fed", "adafed", "feddyn"]
    best = f"of {len(one_model) - 2}: AdaFed {scores('adafed')}, FedDyn {scores('feddyn')}"
    assert table_after("**Local training, part of the clients a round**")[-1][1:] == [*cells, best]


def test_what_full_gradients_end_with_on_setup_1() -> None:
    last = fmean(run["accuracy"]["mean"] for run in stored("cifar10-setup1-full")["fedavg"])
    assert f"final mean on CIFAR-10 Setup 1 ({last:.1f} %\nafter 2000 rounds)" in README
