"""A report on a search's best runs shows what was tried; the trials themselves are no runs to compare."""

from __future__ import annotations

import json
from pathlib import Path

from dqnfed.report.page import write_report
from dqnfed.report.reader import find_runs
from tests.helpers.runs import write_run

TRIED = [
    {"settings": {"q": 1.0}, "score": 91.25, "scores": {"0": 91.0, "1": 91.5}, "why": ""},
    {"settings": {"q": 0.1}, "score": 88.0, "scores": {"0": 87.0, "1": 89.0}, "why": ""},
    {"settings": {"q": 9.0}, "score": None, "scores": {}, "why": "its validation number 'mean' is <not> finite"},
]


def written_search(out: Path) -> Path:
    for name in ("qffl", "fedavg"):
        write_run(out / "best" / name / "0", algorithm=name, rounds=2)
        write_run(out / "trials" / name / "q=1" / "0", algorithm=name, rounds=2)
    methods = {
        "qffl": {"best": {"q": 1.0}, "score": 91.25, "tried": TRIED},
        "fedavg": {"best": {}, "score": None, "tried": []},
    }
    search = {"part": "validation", "select": "worst10", "seeds": [0, 1], "algorithms": methods}
    (out / "sweep.json").write_text(json.dumps(search))
    return out


def test_the_whole_grid_and_the_best_settings_are_on_the_page(tmp_path: Path) -> None:
    out = written_search(tmp_path / "sweep")
    html = write_report([out / "best"], out / "report.html").read_text(encoding="utf-8")
    assert "worst10 validation score, mean over 2 seeds" in html
    assert "<strong>qffl</strong>: <code>q = 1.0</code> (3 tried)" in html
    assert "<td><strong>91.25</strong></td><td>91.00, 91.50</td>" in html
    assert "<td>88.00</td><td>87.00, 89.00</td>" in html
    assert "could not run: its validation number &#x27;mean&#x27; is &lt;not&gt; finite" in html
    assert "<strong>fedavg</strong>: <code>defaults, nothing to choose</code>" in html


def test_runs_that_no_search_chose_say_nothing_of_one(tmp_path: Path) -> None:
    write_run(tmp_path / "fedavg" / "0", algorithm="fedavg", rounds=2)
    assert "Settings that were tried" not in write_report([tmp_path], tmp_path).read_text(encoding="utf-8")


def test_a_search_folder_is_reported_without_its_trials(tmp_path: Path) -> None:
    out = written_search(tmp_path / "trials")  # the user's own name for it, not the search's
    folders, _ = find_runs([out])
    assert folders == [out / "best" / name / "0" for name in ("fedavg", "qffl")]
    trial = out / "trials" / "qffl" / "q=1" / "0"
    assert find_runs([trial])[0] == [trial]  # asked for by name
