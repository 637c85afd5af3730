"""Groups inside clients: their intervals against scipy, simulation and counting by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dqnfed.report.breakdown import breakdown, gap_sentence, of_area, of_share
from dqnfed.report.comparison import Experiment
from dqnfed.report.units import unit_of
from tests.helpers.score_tables import experiment_of


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (3, 7), (20, 20), (55, 80), (999, 1000)])
def test_the_interval_of_a_share_is_wilsons(k: int, n: int) -> None:
    found, wanted = of_share(k / n, n), stats.binomtest(k, n).proportion_ci(method="wilson")
    assert found.low == pytest.approx(100 * wanted.low, abs=1e-4)
    assert found.high == pytest.approx(100 * wanted.high, abs=1e-4)
    assert found.low < found.high


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_the_interval_of_an_area_is_as_wide_as_areas_vary(shift: float) -> None:
    """Two normal classes, 400 draws: the half-width is 1.96 standard deviations, to a fifth."""
    rng, areas = np.random.default_rng(0), []
    for _ in range(400):
        low, high = rng.normal(size=40), rng.normal(shift, size=30)
        areas.append(100 * float((high[:, None] > low).mean()))
    mean, spread = float(np.mean(areas)), float(np.std(areas))
    found = of_area(mean, 40, 30)
    assert (mean - found.low) / 1.96 == pytest.approx(spread, rel=0.2)


def test_an_area_of_100_is_not_certain() -> None:
    found = of_area(100.0, 5, 3)
    assert found.low < 50 < found.high == 100.0


def with_groups(folder: Path, seeds: list[list[tuple[str, int, int, int]]]) -> Experiment:
    """Return an experiment with one run a seed, which reports groups as (name, right, n, held) of one client."""
    experiment = experiment_of({"dqn-fed": np.full((len(seeds), 1), 50.0)})
    [method] = experiment.methods
    runs = []
    for run, groups in zip(method.runs, seeds, strict=True):
        home = folder / str(run.seed)
        home.mkdir()
        rows: list[dict[str, Any]] = [
            {
                "client": client, "column": "sex", "group": name, "n": n, "held": held, "score": 100 * right / n,
                "of_class": [n, 0], "right": [right, 0], "said": [right, n - right], "auc": None,
            }
            for client in (None, 0)
            for name, right, n, held in groups
        ]  # fmt: skip
        names = [name for name, *_ in groups]
        content = {"score": "accuracy", "classes": ["a", "b"], "rows": rows}
        columns = [{"name": "sex", "groups": names, "bands": False}]
        (home / "breakdown.json").write_text(json.dumps({**content, "columns": columns}))
        runs.append(run.__class__(**{**run.__dict__, "folder": home}))
    return Experiment("made-up", (method._replace(runs=tuple(runs)),))


def test_rows_that_are_tested_again_tell_nothing_new(tmp_path: Path) -> None:
    """Twenty seeds test 3 of a group's 8 rows, all right each time: the interval is that of 8 rows, not of 60."""
    experiment = with_groups(tmp_path, [[("F", 3, 3, 8), ("M", 30, 40, 200)] for _ in range(20)])
    [column] = breakdown(experiment, experiment.methods[0], 0)
    women, men = column.groups
    assert (women.n, women.score.mean) == (3, 100.0)
    assert women.score.low == pytest.approx(of_share(1.0, 8).low)
    assert men.score.low == pytest.approx(of_share(0.75, 200).low)


def test_seeds_that_differ_more_than_rows_explain_widen_the_interval(tmp_path: Path) -> None:
    experiment = with_groups(tmp_path, [[("F", k, 100, 100)] for k in (20, 90)])
    [column] = breakdown(experiment, experiment.methods[0])
    [women] = column.groups
    assert women.score.high - women.score.low > 2 * (of_share(0.55, 100).high - of_share(0.55, 100).low)


def test_how_far_groups_are_apart_is_told_with_its_doubt(tmp_path: Path) -> None:
    unit = unit_of(experiment_of({"dqn-fed": np.ones((1, 1))}))

    def told(name: str, seeds: list[list[tuple[str, int, int, int]]]) -> str:
        (tmp_path / name).mkdir()
        experiment = with_groups(tmp_path / name, seeds)
        [column] = breakdown(experiment, experiment.methods[0])
        return gap_sentence(column, unit).replace("\N{NO-BREAK SPACE}", " ")

    one = told("one", [[("F", 90, 100, 500), ("M", 70, 100, 500)]])
    assert one == (
        "By sex: the accuracy is best for sex F (90.0 %) and worst for sex M (70.0 %), 20.0 points apart; with one "
        "seed this may be chance."
    )
    open_ = told("open", [[("F", 90, 100, 500), ("M", 70, 100, 500)], [("F", 70, 100, 500), ("M", 80, 100, 500)]])
    assert open_.endswith("5.0 points apart, which the 2 seeds do not settle.")
    sure = told("sure", [[("F", 90 + s % 2, 100, 500), ("M", 70, 100, 500)] for s in range(6)])
    assert "20.5 points apart (95 % interval 19.9 to 21.1, 6 seeds)." in sure
    same = told("same", [[("F", 90, 100, 500), ("M", 90, 100, 500)]])
    assert same == "By sex: all groups have the same accuracy, 90.0 %."
    assert "no two groups" in told("lonely", [[("F", 1, 2, 2)]])


def test_a_run_without_the_file_or_with_a_broken_one_reports_no_groups(tmp_path: Path) -> None:
    experiment = experiment_of({"dqn-fed": np.ones((1, 1))})
    assert breakdown(experiment, experiment.methods[0]) == ()
    broken = with_groups(tmp_path, [[("F", 1, 2, 2)]])
    (tmp_path / "0" / "breakdown.json").write_text('{"rows": []}')
    assert breakdown(broken, broken.methods[0]) == ()
