"""Pages of results say what their stored summaries say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dqnfed import FedAvg, run
from dqnfed.report.results import BEGIN, END, block, by_method, collected, finished_runs, main, rebuilt, run_summary
from tests.helpers.bowls import network_bowl

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGES = sorted(path.stem for path in (RESULTS / "data").glob("*.json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    case = network_bowl()
    for seed in range(2):
        for lr in (0.1, 0.2):
            config = {"name": "bowls", "algorithm": {"name": f"fedavg-{lr}", "lr": lr}, "train": {"rounds": 4}}
            run(
                FedAvg(lr=lr),
                case.problem,
                case.federation,
                rounds=4,
                seed=seed,
                out=out / f"fedavg-{lr}" / str(seed),
                config=config,
            )
    return out


def summary_of(runs: Path) -> dict[str, object]:
    return collected(finished_runs(runs), table="bowls", command="dqnfed compare bowls", hardware="a desk", commit="1a")


def test_a_summary_keeps_what_the_run_ended_with(runs: Path) -> None:
    folder = finished_runs(runs)[0]
    kept, whole = run_summary(folder), json.loads((folder / "summary.json").read_text())
    assert kept["accuracy"]["mean"] == pytest.approx(whole["accuracy"]["mean"], abs=1e-4)
    assert kept["participants"] == 6
    assert kept["curve"][-1][0] == 4
    assert len(json.dumps(kept)) < 5000


def test_a_page_has_a_row_a_method_and_the_best_first(runs: Path) -> None:
    data = summary_of(runs)
    methods = by_method(data["runs"])  # type: ignore[arg-type]
    means = [sum(r["accuracy"]["mean"] for r in of) / len(of) for of in methods.values()]
    assert means == sorted(means, reverse=True)
    text = block(data)
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == list(methods)
    assert f"{means[0]:.2f} ±" in text
    assert "dqnfed compare bowls" in text


def test_every_experiment_has_a_table_of_its_own(runs: Path) -> None:
    data = summary_of(runs)
    first: list[dict[str, object]] = data["runs"]  # type: ignore[assignment]
    text = block({**data, "runs": [*first, *({**run, "experiment": "saddles"} for run in first)]})
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### bowls", "### saddles"]
    assert text.count("| `fedavg-0.1` |") == 2
    assert "2 seeds each" in text


def test_only_what_stands_between_the_marks_changes(runs: Path) -> None:
    page = f"# Title\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"
    new = rebuilt(page, summary_of(runs))
    assert new.startswith("# Title\n\nBefore.\n\n")
    assert new.endswith("\n\nAfter.\n")
    assert "old" not in new
    assert rebuilt(new, summary_of(runs)) == new
    with pytest.raises(ValueError, match="measured: begin"):
        rebuilt("# Title\n", summary_of(runs))


def test_a_page_is_made_from_runs_and_again_from_its_summary(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "results" / "bowls.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"{BEGIN}\n{END}\n")
    main(["bowls", "--from", str(runs), "--hardware", "a desk"])
    first = page.read_text()
    main(["bowls"])
    assert page.read_text() == first
    assert "a desk" in first
    with pytest.raises(SystemExit, match="--from"):
        main(["nothing"])


@pytest.mark.parametrize("table", PAGES)
def test_no_number_on_a_page_differs_from_its_summary(table: str) -> None:
    page = (RESULTS / f"{table}.md").read_text(encoding="utf-8")
    assert rebuilt(page, json.loads((RESULTS / "data" / f"{table}.json").read_text())) == page
