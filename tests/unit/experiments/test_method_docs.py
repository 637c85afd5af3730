"""The reference pages say what the classes say, and the traffic on file is what clients really send and keep."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction

import pytest
from typer.testing import CliRunner

from dqnfed.algorithms import REFERENCES, REGISTRY
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.cli import app
from dqnfed.core.algorithm import LOCAL_WORK, hyperparameters
from dqnfed.experiments.method_docs import (
    FOLDER,
    LABELS,
    SIZES,
    TRAFFIC,
    described_algorithms,
    documented,
    field_comments,
    formula,
    measured_traffic,
    method_page,
    sections,
    traffic_of,
)
from dqnfed.experiments.prefer import PREFER
from tests.helpers.repository import ROOT

METHODS = documented()
PROMISES = {  # payloads that the docstring gives as a plain formula, "2n + 3 floats up"
    name: found[1]
    for name, kind in METHODS.items()
    if (found := re.match(r"(\d*n(?: \+ \d+)?) floats up[;,.]", sections(kind).get("Payload", "")))
}


def batched(lines: list[str]) -> list[tuple[str, str]]:
    return list(zip(lines[::2], lines[1::2], strict=True))


@dataclass(frozen=True, kw_only=True)
class Another(FedAvg):
    """A method from elsewhere.

    Objective: none. Client: as FedAvg. Server: as FedAvg.
    """

    extra: float = 2.0  # of nothing, > 0


def test_the_committed_pages_are_up_to_date() -> None:
    """If this fails: make reference."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / FOLDER).glob("*.md")}
    script = "import json; from dqnfed.experiments.method_docs import pages; print(json.dumps(pages()))"
    fresh = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )  # no test's doing
    wanted = json.loads(fresh.stdout)
    assert sorted(committed) == sorted(wanted)
    assert [name for name in wanted if committed[name] != wanted[name]] == []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_docstring_is_one_line_or_has_every_part(name: str) -> None:
    """They make the method's page; docs/how-to/add-a-method.md says what belongs into each."""
    found = sections(METHODS[name])
    missing = [f"{label}:" for label in LABELS if not found.get(label)]
    is_one_line = found == {"": ""}
    assert is_one_line or not missing, f"the docstring of {METHODS[name].__name__} lacks {', '.join(missing)}"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_hyper_parameter_is_explained(name: str) -> None:
    comments = field_comments(METHODS[name])
    assert [key for key in hyperparameters(METHODS[name]) if not comments[key]] == []


@pytest.mark.parametrize("name", sorted(set(METHODS) & set(REGISTRY)))
def test_the_traffic_on_file_is_what_is_measured(name: str) -> None:
    """If this fails: make reference."""
    assert traffic_of(name, METHODS[name]) == measured_traffic(METHODS[name])


def test_the_traffic_of_every_method_is_on_file() -> None:
    """If this fails: make reference."""
    assert set(json.loads(TRAFFIC.read_text())) == set(METHODS)


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_the_docstring_promises_the_measured_payload(name: str) -> None:
    assert PROMISES[name] == traffic_of(name, METHODS[name]).up


def test_most_docstrings_promise_a_payload() -> None:
    assert {"dqn-fed", "fedavg", "qffl", "ditto", "scaffold", "adafed", "jd-upgrad"} <= set(PROMISES)


@pytest.mark.parametrize(
    ("square", "linear", "constant", "text"),
    [
        (0, 1, 0, "n"),
        (0, 2, 3, "2n + 3"),
        (Fraction(1, 2), Fraction(3, 2), 0, "n^2/2 + 3n/2"),
        (1, -1, 2, "n^2 - n + 2"),
        (0, 0, 0, "0"),
        (0, 0, 7, "7"),
    ],
)
def test_formulas(square: Fraction, linear: Fraction, constant: int, text: str) -> None:
    assert formula([Fraction(square * n * n + linear * n + constant) for n in SIZES]) == text


def test_what_is_no_polynomial_is_a_share_of_n() -> None:
    assert formula([Fraction(7), Fraction(12), Fraction(15), Fraction(30)]) == "about 1.5 n"


def test_what_the_command_line_lists() -> None:
    rows = {row["name"]: row for row in described_algorithms()}
    assert list(rows) == [*REGISTRY, *REFERENCES]
    assert rows["ditto"] == {
        "name": "ditto",
        "title": "Personal models regularised towards the global one (Li et al., ICML 2021, Algorithm 1)",
        "payload": "n",
        "memory": "n",
        "needs": "sum",
        "personal": True,
        "problem_kinds": ["convex", "network"],
        "local_work": list(LOCAL_WORK),
        "hyperparameters": {
            "lam": 1.0,
            "personal_lr": None,
            "proximal": "implicit",
            "server_lr": 1.0,
            "weighting": "examples",
        },
    }
    assert rows["dqn-fed"]["payload"] == "n + 3"
    assert rows["fedavg"]["memory"] == "0"
    assert "momentum" not in rows["scaffold"]["local_work"]


@pytest.mark.parametrize("width", [80, 200])
def test_the_list_has_one_line_a_method(width: int) -> None:
    """At 80 columns a title is cut."""
    lines = CliRunner().invoke(app, ["list", "algorithms"], env={"COLUMNS": str(width)}).stdout.splitlines()
    rows = described_algorithms()
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        assert line.startswith(row["name"])
        assert len(line) <= width


def test_with_details_a_second_line_says_what_crosses_the_network() -> None:
    found = CliRunner().invoke(app, ["list", "algorithms", "--details"], env={"COLUMNS": "80"})
    lines, rows = found.stdout.splitlines(), described_algorithms()
    assert len(lines) == 2 * len(rows)
    for row, (first, second) in zip(rows, batched(lines), strict=True):
        assert first.startswith(row["name"])
        assert f"sends {row['payload']}" in second
        assert f"needs {row['needs']}" in second


def test_a_method_from_elsewhere_is_listed_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "another", Another)
    row = next(row for row in described_algorithms() if row["name"] == "another")
    assert (row["name"], row["title"], row["payload"]) == ("another", "A method from elsewhere", "n")
    assert row["hyperparameters"]["extra"] == 2.0
    assert "another" not in documented()  # its pages are not ours to write
    assert sections(Another) == {"": "", "Objective": "none.", "Client": "as FedAvg.", "Server": "as FedAvg."}


@dataclass(frozen=True, kw_only=True)
class Undocumented(FedAvg):
    """FedAvg under another name (McMahan et al., AISTATS 2017)."""

    factor: float = 1.0


def test_a_docstring_of_one_line_makes_a_page() -> None:
    """A method that is being written can be listed and described before its docstring is complete."""
    page = method_page("undocumented", Undocumented)
    assert "FedAvg under another name" in page
    assert "| `factor` | `1.0` |  |" in page
    assert "All [shared settings](index.md#local-work) of the local work have an effect." in page


def test_pages_say_what_the_server_needs_and_which_shared_settings_count() -> None:
    assert "Of the replies it needs `sum`: weighted sums" in method_page("fedavg", FedAvg)
    page = method_page("scaffold", METHODS["scaffold"])
    assert "of the local work but `momentum`, `optimizer`, `nesterov` have an effect" in page
    assert "local work but `batch_size`, `momentum`, " in method_page("dqn-fed-literal", METHODS["dqn-fed-literal"])
    assert "None of the [shared settings](index.md#local-work)" in method_page("newton", METHODS["newton"])


def test_every_method_of_the_package_says_when_to_prefer_it() -> None:
    """A method that somebody has just added may do without."""
    for name in PREFER:
        assert "**Prefer it** where " in method_page(name, METHODS[name]), name
    assert len(PREFER) >= 67
    assert "**Prefer it**" not in method_page("mine", FedAvg)
