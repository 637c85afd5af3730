"""The report on wrong labels: what was found, without and with correction, and nothing where labels are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dqnfed.report.comparison import Experiment, display, group
from dqnfed.report.html_tables import noise_html
from dqnfed.report.noise import corrected_pairs, noise_line, noise_values
from dqnfed.report.page import make_report
from dqnfed.report.reader import read_runs
from tests.helpers.runs import write_comparison

INJECTED = {"n_clients": 20, "n_noisy": 8, "labels": 1000, "wrong_before": 250, "wrong_after": 250, "changed": 0}
CORRECTED = {
    **INJECTED,
    "wrong_after": 60,
    "changed": 220,
    "clients": {"detected": 7, "precision": 1.0, "recall": 0.875, "f1": 14 / 15},
    "corrections": {"precision": 0.9, "recall": 0.792, "from_right": 3},
}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = write_comparison(tmp_path, algorithms=("fedavg", "fedcorr+dqn-fed", "fedcorr", "dqn-fed"), seeds=(0, 1))
    for folder in found:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        summary["noise"] = CORRECTED if summary["algorithm"].startswith("fedcorr") else INJECTED
        (folder / "summary.json").write_text(json.dumps(summary))
    return found


def experiment_of(folders: list[Path]) -> Experiment:
    return group(read_runs(folders).runs).experiments[0]


def test_names_and_order_are_the_papers(folders: list[Path]) -> None:
    labels = [method.label for method in experiment_of(folders).methods]
    assert labels == ["FedAvg", "FedCorr", "DQN-Fed", "FedCorr + DQN-Fed"]
    assert display("fedcorr+fedavg") == "FedCorr + FedAvg"


def test_values_are_shares(folders: list[Path]) -> None:
    runs = {run.algorithm: run for run in experiment_of(folders).runs}
    found = noise_values(runs["fedcorr"])
    assert found == pytest.approx(
        {
            "before": 25.0,
            "after": 6.0,
            "right": 90.0,
            "repaired": 79.2,
            "precision": 1.0,
            "recall": 0.875,
            "f1": 14 / 15,
        }
    )
    plain = noise_values(runs["fedavg"])
    assert (plain["before"], plain["after"]) == (25.0, 25.0)
    assert plain["f1"] != plain["f1"]  # not a number: nothing was looked for


def test_methods_are_paired_with_themselves_after_correction(folders: list[Path]) -> None:
    pairs = corrected_pairs(experiment_of(folders))
    assert [(a.algorithm, b.algorithm) for a, b in pairs] == [("fedavg", "fedcorr"), ("dqn-fed", "fedcorr+dqn-fed")]


def test_the_page_has_a_part_on_wrong_labels(folders: list[Path], tmp_path: Path) -> None:
    html = noise_html(experiment_of(folders))
    assert html.count("<table") == 2
    assert "Without and with label correction" in html
    assert "0.93" in html
    page = make_report(folders, tmp_path / "report.html").path.read_text()
    assert '<section id="noise-0" >' in page


def test_without_wrong_labels_there_is_no_such_part(tmp_path: Path) -> None:
    folders = write_comparison(tmp_path, algorithms=("fedavg", "dqn-fed"), seeds=(0,))
    assert noise_html(experiment_of(folders)) == ""
    assert '<section id="noise-0" hidden>' in make_report(folders, tmp_path / "report.html").path.read_text()


def test_in_words() -> None:
    assert noise_line({}) == ""
    assert noise_line({"noise": INJECTED}) == "wrong labels: 250 of 1,000, on 8 clients"
    assert noise_line({"noise": CORRECTED}) == (
        "wrong labels: 250 of 1,000, on 8 clients; 7 clients taken for noisy (F1 0.93), 220 labels changed, 90 % of "
        "them rightly; 60 are wrong now"
    )
    nothing = {
        **CORRECTED,
        "clients": {"detected": 0, "precision": None, "recall": None, "f1": None},
        "corrections": {},
    }
    assert "0 clients taken for noisy, 220 labels changed; 60" in noise_line({"noise": nothing})
