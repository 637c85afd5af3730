"""Tables whose methods are tuned alike: the declarations, the choice, what is refused, and what a page says."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dqnfed.core.numerics import NUMERICS
from dqnfed.experiments.config import preset_names
from dqnfed.experiments.experiment import build_algorithm
from dqnfed.experiments.settings import unused_settings
from dqnfed.report import tuned, tuned_page
from dqnfed.report.results import block, commands_of, main
from tests.helpers.repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))
tool = import_module("tuned_tables")
RESULTS = ROOT / "docs" / "results"
TABLES = tuned.declared_names(RESULTS)
LIKE_SETUP_1 = {"mnist-by-writer", "mnist-by-writer-skewed", "cifar10-setup2-cnn"}  # the same methods and trials
UNTRIED = {"dqn-fed"}  # at its defaults; tuned it is another row
DECLARATION = """
[rows]
fedavg-slow = { method = "fedavg", server_lr = 0.5 }
[trials]
any = [{ lr = [0.5, 1] }]
dqn-fed = []
[tables.small]
preset = "digits"
change = ["train.rounds=6", "train.epochs=2", "train.batch_size=32", "eval.every=2", "data.limit=200"]
methods = ["dqn-fed", "fedavg", "fedavg-slow"]
seeds = 2
budget = "little"
[tables.larger]
preset = "digits"
methods = ["fedavg"]
settings_from = ["small", "small"]
seeds = 1
budget = "little"
"""


def line(algorithm: str, seed: int, mean: float | None, **more: Any) -> dict[str, Any]:
    """Return a run's line with a curve that reaches its mean in steps of a tenth."""
    accuracy = {"mean": mean, "std": 3.0, "worst10": mean}
    curve = [] if mean is None else [[r, round(mean * min(1.0, r / 10), 2)] for r in range(1, 11)]
    common = {
        "kind": "test",
        "experiment": "small",
        "trial": {},
        "numerics": 2,
        "personal": False,
        "status": "finished",
    }
    cost = {"rounds": 10, "participants": 2.0, "passes": 20.0, "bytes_up": 2048, "seconds": 1.0}
    shares = {"improved": 0.5, "improved_late": 0.5, "improved_curve": [], "clients": [], "settings": {}, "train": {}}
    place = {"algorithm": algorithm, "seed": seed, "accuracy": accuracy, "late": accuracy, "curve": curve}
    return {**common, **cost, **shares, **place, "hardware": "a desk", "commit": "1a", **more}


def trial(algorithm: str, lr: float, score: float | None, **more: Any) -> dict[str, Any]:
    common = {"kind": "tune", "experiment": "small", "seed": 99, "numerics": 2, "hardware": "a desk", "commit": "1a"}
    return {**common, "algorithm": algorithm, "trial": {"lr": lr}, "score": score, **more}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    found = Path("docs/results")
    found.mkdir(parents=True)
    (found / tuned.DECLARATIONS).write_text(DECLARATION)
    for name in ("small", "larger"):
        (found / f"{name}.md").write_text("# A page\n\n<!-- measured: begin -->\n<!-- measured: end -->\n")
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LIKE_SETUP_1 else ()) for name in TABLES],
)
def test_every_method_of_a_table_has_four_to_six_trials_and_each_has_an_effect(name: str) -> None:
    table = tuned.declared(name, RESULTS)
    for experiment, words in list(table.experiments.items())[:1]:  # the methods of others are the same
        assert words[0] in preset_names()
        for row in tool.rows_of(table, ""):
            trials = table.trials_of(row.label)
            assert 4 <= len(trials) <= 6 or table.settings_from or name == "shakespeare" or row.label in UNTRIED
            for chosen in trials or [{}]:
                task = {"kind": "tune", "experiment": experiment, "algorithm": row.label, "method": row.method}
                task |= {"seed": 0, "trial": chosen, "fixed": row.fixed, "validation": 0.1, "device": "cpu"}
                config = tool.config_of({**task, "words": [w for w in words if not w.startswith("run.")]})
                unused = " ".join(unused_settings(config, build_algorithm(config)))
                assert not [key for key in chosen if key in unused], (row.label, chosen)


def test_trials_are_all_combinations_of_one_table_after_the_other() -> None:
    found = tuned.points([{"q": [1, 2], "lr": [3, 4]}, {"lr": [5]}])
    assert found == [{"q": 1, "lr": 3}, {"q": 1, "lr": 4}, {"q": 2, "lr": 3}, {"q": 2, "lr": 4}, {"lr": 5}]


def test_the_best_trial_has_the_highest_score_and_one_without_a_score_never_wins() -> None:
    lines = [trial("fedavg", 1, 50.0), trial("fedavg", 2, None), trial("fedavg", 3, 60.0), trial("fedavg", 4, 60.0)]
    assert tuned.best_trial(lines, "small", "fedavg") == {"lr": 3}
    assert tuned.best_trial(lines[1:2], "small", "fedavg") is None


def test_rows_of_another_numerics_are_refused(folder: Path) -> None:
    table = tuned.declared("small", folder)
    with pytest.raises(ValueError, match=r"share one NUMERICS, but dqn-fed on small was run with 1, and it is 2"):
        tuned.collected([line("fedavg", 0, 50.0), line("dqn-fed", 0, 60.0, numerics=1)], table)
    Path("old.jsonl").write_text(json.dumps(trial("fedavg", 1, 1.0, numerics=NUMERICS + 1)) + "\n")
    with pytest.raises(ValueError, match=f"and it is {NUMERICS} for the others; run the older rows again"):
        tool.check(table, [table.row("fedavg")], Path("old.jsonl"))


def test_a_page_takes_the_runs_at_the_chosen_setting_only(folder: Path) -> None:
    table = tuned.declared("small", folder)
    lines = [trial("fedavg", 0.5, 40.0), trial("fedavg", 1, 45.0), trial("fedavg", 7, 99.0)]  # 7 is not declared
    lines += [line("fedavg", 0, 50.0, trial={"lr": 0.5}), line("fedavg", 0, 52.0, trial={"lr": 1})]
    lines += [line("fedavg", 1, None, trial={"lr": 1}, error="no memory"), line("dqn-fed", 0, 60.0)]
    data = tuned.collected(lines, table)
    assert {(r["algorithm"], r["late"]["mean"]) for r in data["runs"]} == {("dqn-fed", 60.0), ("fedavg", 52.0)}
    assert [t["trial"] for t in data["trials"]] == [{"lr": 0.5}, {"lr": 1}]
    assert "Could not run: `fedavg` with 1 seed (no memory)." in block(data)
    [failed] = data["failed"]
    assert (failed["algorithm"], failed["seed"], failed["trial"], failed["error"]) == (
        "fedavg",
        1,
        {"lr": 1},
        "no memory",
    )


def test_a_stored_page_is_added_to_and_ends_as_one_that_was_measured_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tuned.declared("small", folder)
    first = [trial("fedavg", 0.5, 40.0, config="a"), trial("fedavg", 1, 45.0, config="b")]
    first += [line("dqn-fed", 0, 60.0, config="c"), line("fedavg", 0, 50.0, trial={"lr": 1}, config="d")]
    first += [line("fedavg-slow", 0, None, config="e", error="no memory")]
    second = [
        line("dqn-fed", 1, 61.0, config="f", hardware="a chair"),
        line("fedavg", 1, 51.0, trial={"lr": 1}, config="g"),
    ]
    for name, some in (("first", first), ("second", second)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
    main(["small", "--from", "first.jsonl"])
    summary = folder / "data" / "small.json"
    again = tuned.stored_lines(summary, table, 2)
    assert {tool.key(one) for one in again} == {tool.key(one) for one in first}
    assert tuned.best_trial(again, "small", "fedavg") == {"lr": 1}
    monkeypatch.setattr("dqnfed.core.numerics.NUMERICS", 2)
    known = tool.known_lines(table, Path("second.jsonl"), anew=False)  # what failed is tried again elsewhere
    assert [one["config"] for one in known] == ["a", "b", "c", "d", "f", "g"]
    assert [one["config"] for one in tool.known_lines(table, Path("second.jsonl"), anew=True)] == ["f", "g"]
    main(["small", "--from", "second.jsonl"])
    assert json.loads(summary.read_text()) == tuned.collected([*first, *second], table)
    assert "Hardware: a desk; a chair." in (folder / "small.md").read_text()


@pytest.mark.parametrize("change", ["numerics", "declaration", "an old summary", "no summary"])
def test_what_was_not_computed_alike_is_not_added_to(folder: Path, change: str) -> None:
    table = tuned.declared("small", folder)
    (folder / "data").mkdir()
    summary = folder / "data" / "small.json"
    old = {} if change == "an old summary" else {"config": "c"}
    if change != "no summary":
        summary.write_text(json.dumps(tuned.collected([line("dqn-fed", 0, 60.0, **old)], table)))
    if change == "declaration":
        table = table._replace(experiments={"small": ("digits", "train.rounds=7")})
    assert tuned.stored_lines(summary, table, 3 if change == "numerics" else 2) == []
    assert tool.known_lines(table, Path("none.jsonl"), anew=False) == []  # of the present NUMERICS


def test_a_page_says_places_differences_and_shares_of_rounds(folder: Path) -> None:
    gaps = [10.0, 11.0, 12.0]
    lines = [line("dqn-fed", s, 60.0 + gap) for s, gap in enumerate(gaps)] + [line("fedavg", s, 60.0) for s in range(3)]
    lines += [line("ditto", s, 99.0, personal=True) for s in range(3)]
    data = tuned.collected(lines, tuned.declared("small", folder)._replace(trials={"any": []}))
    text = block(data)
    error = np.std(gaps, ddof=1) / np.sqrt(3)
    assert "is number 1 of 2 in the mean (71.0) and number 1 of 2 in the worst tenth (71.0)" in text
    row = next(row for row in text.splitlines() if row.startswith("| `dqn-fed` | +"))
    assert row.startswith(f"| `dqn-fed` | +11.0 ({error:.1f}) *")
    # FedAvg ends, averaged over the last three evaluations, at 54; it gets there in round 10, DQN-Fed in 9, 9 and 9
    assert row.split(" | ")[5] == "0.90"
    assert "Expected were first or second place in both, and half of FedAvg's rounds at most." in text
    assert "NUMERICS 2 in every row" in text


def test_a_method_that_diverged_is_named_and_comes_last(folder: Path) -> None:
    lines = [line("fedavg", s, 50.0) for s in (0, 1)] + [line("dqn-fed", s, 40.0 if s else None) for s in (0, 1)]
    data = tuned.collected(lines, tuned.declared("small", folder)._replace(trials={"any": []}))
    rows = [row for row in block(data).splitlines() if row.startswith("| `")]
    assert rows[1].startswith("| `dqn-fed` (diverged with 1 of 2 seeds) |")


def test_a_method_never_gets_to_fedavgs_end_with_one_seed() -> None:
    ours = [line("dqn-fed", 0, 60.0), line("dqn-fed", 1, 40.0)]
    theirs = [line("fedavg", 0, 50.0), line("fedavg", 1, 50.0)]
    assert tuned_page.share_of_rounds(ours[:1], theirs) is not None
    assert tuned_page.share_of_rounds(ours, theirs) is None


def test_a_page_without_runs_says_how_to_measure_it(folder: Path) -> None:
    main(["small"])
    text = (folder / "small.md").read_text()
    assert "Not measured yet: no run is stored. `make results TABLE=small RUN=1`" in text
    assert "Budget, written first: little." in text
    assert commands_of("small") == ["python benchmarks/tuned_tables.py small"]


def test_a_table_that_takes_its_settings_from_another_names_what_that_lacks(folder: Path) -> None:
    table = tuned.declared("larger", folder)
    with pytest.raises(ValueError, match="small of small, which has none for fedavg; run that table first"):
        tool.check(table, [table.row("fedavg")], Path("larger.jsonl"))
    lines = [trial("fedavg", 0.5, 40.0), trial("fedavg", 1, 45.0)]
    Path("small.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert tool.choices(table, Path("larger.jsonl")) == {"fedavg": {"lr": 1}}


def test_a_run_and_a_trial_have_lines_that_a_page_is_made_from(folder: Path) -> None:
    table = tuned.declared("small", folder)
    given = tool.Given("cpu", 1, "1a", "a desk", None, np.inf)
    for kind in ("tune", "test"):
        tasks = tool.tasks(kind, table, [table.row("fedavg-slow")], [], given, seeds=1, only=["small"], out=Path("x"))
        found = tool.outcome({**next(iter(tasks)), "until": np.inf})
        assert (found["algorithm"], found["method"], found["numerics"]) == ("fedavg-slow", "fedavg", NUMERICS)
        assert found["settings"]["server_lr"] == 0.5
        assert len(json.dumps(found)) < 5000
    assert found["train"]["rounds"] == 6
    assert tuned.collected([{**found, "trial": {}}], table)["runs"][0]["algorithm"] == "fedavg-slow"


def test_a_run_that_is_broken_off_leaves_no_line_and_goes_on_with_the_same_bits(folder: Path) -> None:
    table = tuned.declared("small", folder)

    def outcome(keep: str | None, until: float, longest: float = np.inf) -> Any:
        given = tool.Given("cpu", 1, "1a", "a desk", keep, longest)
        tasks = tool.tasks("test", table, [table.row("dqn-fed")], [], given, seeds=1, only=["small"], out=Path("x"))
        return tool.outcome({**next(iter(tasks)), "until": until})

    whole = outcome(None, np.inf)
    assert outcome("kept", 0.0) is None
    assert [path.name for path in Path("kept").iterdir()] == [whole["config"]]
    slices = 1
    while (resumed := outcome("kept", 0.0)) is None:
        slices += 1
    assert slices >= 3
    assert (resumed["accuracy"], resumed["curve"]) == (whole["accuracy"], whole["curve"])
    assert list(Path("kept").iterdir()) == []
    assert outcome(None, np.inf, longest=0.0)["error"] == "took longer than 0 s"


@pytest.mark.slow
def test_a_tuned_page_is_measured_by_one_command_which_does_nothing_again(folder: Path) -> None:
    Path("benchmarks").symlink_to(ROOT / "benchmarks")
    main(["small", "--run"])
    text, lines = (folder / "small.md").read_text(), Path("runs/small.jsonl").read_text()
    assert text.count("| `fedavg-slow` |") == 2
    assert len(lines.splitlines()) == 4 + 6
    main(["small", "--run"])
    assert Path("runs/small.jsonl").read_text() == lines
    assert (folder / "small.md").read_text() == text
    Path("runs/small.jsonl").unlink()  # on another machine, where the page's summary is all there is
    main(["small", "--run"])
    assert Path("runs/small.jsonl").read_text() == ""
    assert (folder / "small.md").read_text() == text
    main(["small", "--run", "--seeds", "0:3"])
    assert len(Path("runs/small.jsonl").read_text().splitlines()) == 3
    assert "| 3 |" in (folder / "small.md").read_text()
