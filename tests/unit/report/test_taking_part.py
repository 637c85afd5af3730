"""The report says who took part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dqnfed import FedAvg, Sampling, Stragglers, run
from dqnfed.report.page import write_report
from dqnfed.report.taking_part import part_of, taking_part_html
from dqnfed.sim.availability import Span, Trace
from tests.helpers.bowls import network_bowl

RECORDS = [
    {"round": -1, "clients": []},
    {"round": 0, "clients": [0, 2], "dropped": [{"client": 2, "why": "late"}]},
    {"round": 1, "clients": []},
    {"round": 2, "clients": [0]},
]


def test_rounds_are_counted() -> None:
    part = part_of(RECORDS)
    assert part is not None
    assert part == (3, Counter({0: 2, 2: 1}), Counter({2: 1}), 0, 2, 1)
    assert part_of(RECORDS[:1]) is None


def test_the_section_names_who_was_never_asked() -> None:
    part = part_of(RECORDS)
    assert part is not None
    text = taking_part_html([part, part], ["a", "<b>", "c"])
    assert "0 to 2 of 3 clients were asked in a round" in text
    assert "2 of 6 rounds had nobody" in text
    assert "Never asked: &lt;b&gt;." in text
    assert "<td>a</td><td>66.7 %</td><td>0</td>" in text
    everybody = part_of([{"round": 0, "clients": [0, 1]}])
    assert everybody is not None
    assert taking_part_html([everybody], ["a", "b"]) == ""


@pytest.mark.parametrize("away", [False, True])
def test_the_page_has_it_where_somebody_is_missing(away: bool, tmp_path: Path) -> None:
    problem, federation, _ = network_bowl()
    trace = Trace((Span(0, 0, 5), Span(1, 0, 2))) if away else None
    slow = Stragglers(deadline=1.0, spread=0.0) if away else None
    run(FedAvg(), problem, federation, rounds=4, sampling=Sampling(trace=trace), stragglers=slow, out=tmp_path / "run")
    text = write_report([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert ("Who took part" in text) == away
