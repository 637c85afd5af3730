"""Pages of results say what their stored summaries say, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dqnfed import FedAvg, run
from dqnfed.experiments.config import read_config
from dqnfed.experiments.paper import TABLES
from dqnfed.report.listing import listing
from dqnfed.report.result_figures import write_pictures
from dqnfed.report.result_summaries import (
    CURVE_POINTS,
    Json,
    binned,
    collected,
    finished_runs,
    run_summary,
    summaries_in,
)
from dqnfed.report.result_tables import LEADERBOARD, by_method
from dqnfed.report.results import (
    BEGIN,
    END,
    INDEX,
    block,
    commands_of,
    experiment_of,
    index_block,
    main,
    pictures_of,
    rebuilt,
    unmeasured_block,
    with_block,
)
from tests.helpers.bowls import network_bowl
from tests.helpers.runs import write_comparison, write_run

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGES = sorted(path.stem for path in (RESULTS / "data").glob("*.json"))
OF_COMMANDS = [page for page in PAGES if page != LEADERBOARD]  # which has a program of its own
MARKED = sorted(path.stem for path in RESULTS.glob("*.md") if BEGIN in path.read_text(encoding="utf-8"))
WANTED = (
    "cifar10-setup1", "cifar10-setup1-full", "cifar10-setup2", "cifar10-setup2-participation", "cifar100-setup1",
    "cifar100-setup2", "fashion-mnist", "mnist-by-writer", "mnist-by-writer-skewed", "shakespeare", "wall-clock",
    "heart",
)  # fmt: skip
# Pages whose numbers are text or are written by programs of their own, beside `label-noise`, `privacy/*` and `speed`,
# which have tests of their own or no stored numbers; none other may be without a stored summary.
TEXT = {"ablation", "label-noise", "local-training", "speed"}


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


def summary_of(runs: Path, *, table: str = "bowls", algorithms: tuple[str, ...] = ()) -> Json:
    return collected(
        summaries_in(runs),
        table=table,
        command=f"dqnfed compare {table}",
        hardware="a desk",
        commit="1a",
        algorithms=algorithms,
    )


def test_a_summary_keeps_what_the_run_ended_with(runs: Path) -> None:
    folder = finished_runs(runs)[0]
    kept, whole = run_summary(folder), json.loads((folder / "summary.json").read_text())
    assert kept["accuracy"]["mean"] == pytest.approx(whole["accuracy"]["mean"], abs=1e-4)
    assert kept["participants"] == 6
    assert kept["curve"][-1][0] == 4
    assert len(json.dumps(kept)) < 5000


def test_a_summary_keeps_what_figures_need(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=130, n_clients=40)
    kept, whole = run_summary(folder), json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [record["rho"] for record in records if record["round"] >= 0]
    assert len(kept["improved_curve"]) == CURVE_POINTS
    sizes = [len(bin_) for bin_ in np.array_split(np.array(shares), CURVE_POINTS)]
    weighted = sum(n * share for n, (_, share) in zip(sizes, kept["improved_curve"], strict=True)) / sum(sizes)
    assert weighted == pytest.approx(np.mean(shares), abs=1e-4)  # every value is rounded to four digits
    assert len(kept["clients"]) == 40
    assert np.mean(kept["clients"]) == pytest.approx(whole["accuracy"]["mean"], abs=0.01)
    assert "client_names" not in kept
    assert len(kept["curve"]) <= CURVE_POINTS + 1
    assert kept["curve"][-1] == [130, round(whole["accuracy"]["mean"], 2)]


def test_a_summary_says_what_the_experiment_sets_for_the_method(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    with (folder / "config.toml").open("a") as file:
        file.write("\n[algorithms.dqn-fed]\nmemory = 3\n\n[algorithms.fedavg]\nlr = 9.0\n")
    assert run_summary(folder)["settings"]["memory"] == 3
    assert "lr" not in run_summary(folder)["settings"]


def test_few_clients_keep_their_names_and_classes_their_columns(tmp_path: Path) -> None:
    write_comparison(tmp_path, name="fashion-mnist", seeds=(0, 1), rounds=3, n_clients=3, one_class_each=True)
    data = summary_of(tmp_path, table="fashion-mnist")
    run = data["runs"][0]
    assert len(run["client_names"]) == 3
    for other in data["runs"]:
        other["client_names"] = ["shirt", "pullover", "T-shirt"]
    text = block(data)
    assert "| method | mean | std | worst 10 % | shirt | pullover | T-shirt | improved |" in text
    shirts = [r["clients"][0] for r in data["runs"] if r["algorithm"] == run["algorithm"]]
    row = next(line for line in text.splitlines() if line.startswith(f"| `{run['algorithm']}`"))
    assert row.split(" | ")[4].startswith(f"{np.mean(shirts):.2f} ±")
    assert "The paper prints for this setting (Fashion-MNIST)" in text


@pytest.mark.parametrize("n", [1, 7, 50, 51, 2000])
def test_bins_hold_every_value_once(n: int) -> None:
    found = binned([(t + 1, 0.5) for t in range(n)])
    assert len(found) == min(n, CURVE_POINTS)
    assert all(value == 0.5 for _, value in found)
    assert [t for t, _ in found] == sorted({t for t, _ in found})
    assert binned([]) == []


def test_summaries_travel_as_lines(runs: Path, tmp_path: Path) -> None:
    found = summaries_in(runs)
    lines = [json.dumps({"key": "first", "sets": [], "wall": 3.0, **run}) for run in found]
    failed = json.dumps({"key": "first", "algorithm": "fedavg", "seed": 0, "error": "no memory"})
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:2], failed, "", *lines[2:]]) + "\n")
    assert summaries_in(tmp_path / "a.jsonl") == found
    (tmp_path / "page.json").write_text(json.dumps(summary_of(runs)))
    assert summaries_in(tmp_path / "page.json") == found


def test_of_a_run_that_is_there_twice_the_later_counts(runs: Path) -> None:
    found = summaries_in(runs)
    again = {**found[0], "seconds": 1234.5}
    data = collected([*found, again], table="bowls", command="c", hardware="h", commit="1a")
    assert len(data["runs"]) == len(found)
    assert data["runs"][0]["seconds"] == 1234.5
    assert {r["algorithm"] for r in summary_of(runs, algorithms=("fedavg-0.2",))["runs"]} == {"fedavg-0.2"}
    with pytest.raises(ValueError, match="no finished run"):
        summary_of(runs, algorithms=("qffl",))


def test_seeds_with_other_settings_are_no_row(runs: Path) -> None:
    first, *others = summaries_in(runs)
    with pytest.raises(ValueError, match="seed 0 has the settings"):
        collected([{**first, "settings": {"lr": 7.0}}, *others], table="t", command="c", hardware="h", commit="1a")


def test_rows_of_another_numerics_are_no_part_of_a_page(runs: Path) -> None:
    first, *others = summaries_in(runs)
    for number, named in ((first["numerics"] + 1, first["numerics"] + 1), (None, "not recorded")):
        other = {key: value for key, value in first.items() if key != "numerics"} | (
            {"numerics": number} if number else {}
        )
        with pytest.raises(
            ValueError, match=f"seed 0, is {named}, and that of .* is {first['numerics']}; run the older"
        ):
            collected([other, *others], table="t", command="c", hardware="h", commit="1a")


def test_the_order_of_lines_does_not_matter(runs: Path) -> None:
    found = summaries_in(runs)
    there, back = (
        collected(some, table="t", command="c", hardware="h", commit="1a") for some in (found, list(reversed(found)))
    )
    assert there == back


def test_the_papers_values_stand_below_the_experiments_that_repeat_them(tmp_path: Path) -> None:
    for setup in ("shakespeare-setup1", "shakespeare-setup2"):
        write_comparison(tmp_path / setup, name=setup, seeds=(0,), rounds=3)
    text = block(summary_of(tmp_path, table="shakespeare"))
    assert text.count("The paper prints for this setting") == 2
    assert "| method | mean | std | worst 10 % | best 10 % | improved |" in text
    assert "The paper prints" not in block(summary_of(tmp_path, table="something-else"))


def test_two_experiments_that_repeat_one_table_print_it_once(tmp_path: Path) -> None:
    for name in ("cifar10-setup1", "cifar10-setup1-full"):
        write_comparison(tmp_path / name, name=name, seeds=(0,), rounds=3)
    text = block(summary_of(tmp_path, table="cifar10-setup1"))
    assert text.count("### cifar10-setup1") == 2
    assert text.count("The paper prints for this setting (CIFAR-10, Setup 1") == 1


def test_a_stand_in_is_evaluated_by_the_measures_of_what_it_stands_for(tmp_path: Path) -> None:
    write_comparison(tmp_path, name="mnist-by-writer", seeds=(0, 1), rounds=3)
    text = block(summary_of(tmp_path, table="mnist-by-writer"))
    assert "| method | mean | std | worst 10 % | angle, ° | KL | improved |" in text
    assert "The paper prints" not in text


def test_figures_are_those_that_the_summaries_allow_and_always_the_same(tmp_path: Path) -> None:
    write_comparison(tmp_path / "runs", rounds=8, seeds=(0, 1))
    data = summary_of(tmp_path / "runs", table="made-up")
    kinds = ("convergence", "clients", "improved")
    assert [p.file for p in pictures_of(data)] == [f"made-up-{kind}.svg" for kind in kinds]
    first, second = (write_pictures(pictures_of(data), tmp_path / name) for name in "ab")
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        texts = {node.text for node in ElementTree.parse(a).iter() if node.tag.endswith("text")}
        assert {"DQN-Fed", "FedAvg", "TERM"} <= texts
        assert f"(figures/{a.name})" in block(data)
    for kept in data["runs"]:
        del kept["clients"], kept["improved_curve"]
    assert [p.file for p in pictures_of(data)] == ["made-up-convergence.svg"]
    assert "made-up-clients" not in block(data)


def test_a_figure_has_room_for_eight_and_shows_dqn_fed_first(runs: Path) -> None:
    run = summaries_in(runs)[0]
    names = ["dqn-fed", "fedavg", *(f"method-{i}" for i in range(20))]
    many = [
        {**run, "algorithm": name, "accuracy": {**run["accuracy"], "mean": float(i)}} for i, name in enumerate(names)
    ]
    shown = pictures_of({**summary_of(runs), "runs": many})[0].runs
    assert set(shown) == {"dqn-fed", "fedavg", *(f"method-{i}" for i in range(14, 20))}


def test_a_page_has_a_row_a_method_and_the_best_first(runs: Path) -> None:
    data = summary_of(runs)
    methods = by_method(data["runs"])
    means = [sum(r["accuracy"]["mean"] for r in of) / len(of) for of in methods.values()]
    assert means == sorted(means, reverse=True)
    text = block(data)
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == list(methods)
    assert f"{means[0]:.2f} ±" in text
    assert "dqnfed compare bowls" in text


def test_a_run_that_diverged_is_named_and_comes_last(runs: Path) -> None:
    data = summary_of(runs)
    lost = data["runs"][0]
    lost["accuracy"] = dict.fromkeys(lost["accuracy"])
    rows = [line for line in block(data).splitlines() if line.startswith("| `")]
    assert rows[-1].startswith(f"| `{lost['algorithm']}` (diverged with 1 of 2 seeds) |")
    assert "diverged" not in "".join(rows[:-1])


def test_a_run_without_numbers_has_a_summary(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    shutil.copytree(runs / "fedavg-0.1" / "0", folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["accuracy"] = dict.fromkeys(summary["accuracy"])
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["accuracy"] = dict.fromkeys(lines[-1]["accuracy"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run_summary(folder)
    assert found["accuracy"]["mean"] is None
    assert all(mean is not None for _, mean in found["curve"])


def test_every_experiment_has_a_table_of_its_own(runs: Path) -> None:
    data = summary_of(runs)
    first = data["runs"]
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
    with pytest.raises(FileNotFoundError, match=r"nothing\.md"):
        main(["nothing"])


def test_a_page_is_measured_by_its_own_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "both.md").write_text(f"{BEGIN}\n{END}\n")
    command = "dqnfed compare digits --algorithms fedavg --rounds 2 --seeds 0:3 --quiet"
    renamed = command + " --set name=twice --set train.lr=0.2"
    (folder / "tables.toml").write_text(f"[both]\ncommands = {json.dumps([command, renamed])}\n")
    assert commands_of("both") == [command, renamed]
    assert commands_of("other") == ["dqnfed compare other --seeds 0:5"]
    main(["both", "--run", "--seeds", "0", "--jobs", "1"])
    text = (folder / "both.md").read_text()
    assert f"```bash\n{command}\n{renamed}\n```".replace("0:3", "0") in text
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### digits", "### twice"]
    assert (folder / "figures" / "both-digits-clients.svg").is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends Ctrl-C to a group of processes")
def test_ctrl_c_saves_the_runs_of_a_page_and_the_same_call_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "long.md").write_text(f"{BEGIN}\n{END}\n")
    command = "dqnfed compare digits --algorithms fedavg --rounds 400 --jobs 1 --quiet"
    (folder / "tables.toml").write_text(f"[long]\ncommands = {json.dumps([command])}\n")
    call = [sys.executable, "-m", "dqnfed.report.results", "long", "--run"]
    lines = tmp_path / "runs" / "results" / "long" / "digits" / "fedavg" / "0" / "metrics.jsonl"
    with subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not (lines.is_file() and lines.read_text().count("\n") > 3) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the same call goes on" in said
    assert "Traceback" not in said
    n_before = len(lines.read_text().splitlines())
    assert 3 < n_before < 401
    subprocess.run(call, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert [json.loads(line)["round"] for line in lines.read_text().splitlines()] == list(range(-1, 400))
    assert "| `fedavg` |" in (folder / "long.md").read_text()


@pytest.mark.parametrize("table", OF_COMMANDS)
def test_every_page_says_how_it_is_measured_and_has_its_figures(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RESULTS.parents[1])
    data = json.loads((RESULTS / "data" / f"{table}.json").read_text())
    known = ("dqnfed compare ", f"python benchmarks/tuned_tables.py {table}")
    assert all(command.startswith(known) for command in commands_of(table))
    for picture in pictures_of(data):
        assert (RESULTS / "figures" / picture.file).is_file()


@pytest.mark.parametrize("table", OF_COMMANDS)
def test_a_pages_commands_give_methods_the_batches_of_its_rows(table: str) -> None:
    data = json.loads((RESULTS / "data" / f"{table}.json").read_text())
    if "trials" in data:  # the presets' own settings of methods do not count there
        return
    presets: dict[str, set[str]] = {}
    for command in data["command"].splitlines():
        words = shlex.split(command)
        presets.setdefault(experiment_of(words[1:]), set()).add(words[2])
    for row in data["runs"]:
        for preset in presets[row["experiment"]]:
            given = read_config(preset).algorithms.get(row["algorithm"], {})
            assert given.get("batch_size") == row["settings"].get("batch_size"), (preset, row["algorithm"])


@pytest.mark.parametrize("table", MARKED)
def test_no_number_on_a_page_differs_from_its_summary(table: str) -> None:
    page, stored = (RESULTS / f"{table}.md").read_text(encoding="utf-8"), RESULTS / "data" / f"{table}.json"
    if table == INDEX:
        assert with_block(page, index_block(RESULTS)) == page
    elif stored.is_file():
        assert rebuilt(page, json.loads(stored.read_text())) == page
    else:
        assert with_block(page, unmeasured_block(table, RESULTS)) == page


def test_every_page_has_a_stored_summary_or_says_that_it_has_no_runs() -> None:
    assert set(WANTED) <= set(MARKED)
    assert set(PAGES) <= set(MARKED)
    assert {path.stem for path in RESULTS.glob("*.md")} - set(MARKED) == TEXT


def test_the_claims_quote_differences_that_stand_on_a_page_which_they_name() -> None:
    """A difference with its standard error, as `+2.5 (0.3)`, stands in the index's own table or on a linked page."""
    claims, _, own = (RESULTS / f"{INDEX}.md").read_text(encoding="utf-8").partition(BEGIN)
    for row in claims.splitlines():
        named = re.findall(r"\(([a-z0-9-]+)\.md", row)
        pages = own + "".join((RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in named)
        quoted = re.findall(r"[+-]\d+\.\d \(\d+\.\d\)", row)
        assert [difference for difference in quoted if difference not in pages] == [], row


def test_the_list_of_settings_says_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "results"
    (folder / "data").mkdir(parents=True)
    entries = [("Bowls", "bowls", ""), ("Saddles", "saddles", ""), ("Far", "", "its files are not at hand")]
    texts = [f'[[setting]]\nname = "{n}"\npage = "{p}"\n' + f'reason = "{r}"\n' * bool(r) for n, p, r in entries]
    (folder / "settings.toml").write_text("".join(texts))
    write_comparison(tmp_path / "runs", name="bowls", algorithms=("dqn-fed", "fedavg"), seeds=(0, 1), rounds=3)
    (folder / "data" / "bowls.json").write_text(json.dumps(summary_of(tmp_path / "runs")))
    head, _, *rows = listing(folder).splitlines()
    assert head.startswith("1 of 3 settings have stored runs")
    assert "measured: 2 methods, 2 seeds, settings of the preset, no trials stored, NUMERICS not recorded" in rows[0]
    assert "not measured: no run is stored; `make results TABLE=saddles RUN=1`" in rows[1]
    assert "not measured: its files are not at hand" in rows[2]


def test_every_setting_of_the_paper_is_listed() -> None:
    listed = tomllib.loads((RESULTS / "settings.toml").read_text())["setting"]
    named = {key for entry in listed for key in (entry.get("experiment", entry.get("page")), entry.get("preset"))}
    stand_ins = {"femnist-skewed": "mnist-by-writer-skewed", "tiny-imagenet": "tinyimagenet"}
    assert {stand_ins.get(table.key, table.key) for table in TABLES} <= named
