"""The fairness table: its numbers recomputed from clients.csv by hand, its marks, its forms."""

import csv
import io
import json
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from dqnfed.report.comparison import group
from dqnfed.report.measures import MEASURE
from dqnfed.report.reader import read_runs
from dqnfed.report.table_formats import FORMS, table_text
from dqnfed.report.tables import Cell, fairness_table, places, tabulate
from tests.helpers.runs import write_comparison, write_run

ALGORITHMS = {"fedavg": "FedAvg", "term": "TERM", "dqn-fed": "DQN-Fed"}
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_comparison(out, name="cifar10-setup1", algorithms=tuple(ALGORITHMS), seeds=SEEDS, rounds=12, n_clients=40)
    return out


def last_accuracies(folder: Path) -> list[tuple[float, int]]:
    """Read (accuracy, examples) of every client in the last round straight from the file, worst first."""
    with (folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = max(int(row["round"]) for row in rows)
    return sorted((float(row["accuracy"]), int(row["n"])) for row in rows if int(row["round"]) == last)


def recomputed(folder: Path, *, weighted: bool) -> dict[str, float]:
    """Compute the measures again, in plain Python and by other formulas than the product's."""
    pairs = last_accuracies(folder)
    K, unit = len(pairs), sum(n for _, n in pairs) / len(pairs)
    a = [x for x, _ in pairs]
    w = [n / unit if weighted else 1.0 for _, n in pairs]  # in average clients: they sum to K

    def lowest(values: list[tuple[float, float]], room: float) -> float:
        total, left = 0.0, room
        for value, weight in values:
            taken = min(weight, left)
            total, left = total + taken * value, left - taken
        return total / room

    mean = sum(x * y for x, y in zip(a, w, strict=True)) / K
    square = sum(x * x * y for x, y in zip(a, w, strict=True)) / K
    upward, downward = list(zip(a, w, strict=True)), list(zip(a, w, strict=True))[::-1]
    return {
        "mean": mean,
        "std": math.sqrt(square - mean**2),
        "worst5": lowest(upward, K // 20),
        "worst10": lowest(upward, K // 10),
        "best5": lowest(downward, K // 20),
        "best10": lowest(downward, K // 10),
        "angle": math.degrees(math.acos(mean / math.sqrt(square))),
        "kl": sum(y * x / (K * mean) * math.log(x / mean) for x, y in zip(a, w, strict=True) if x > 0),
        "jain": mean**2 / square,
        "gini": sum(y * v * abs(x - u) for x, y in upward for u, v in upward) / (2 * K * K * mean),
    }


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "by size"])
def test_values_are_those_of_clients_csv(runs: Path, weighted: bool) -> None:
    (experiment,) = group(read_runs([runs]).runs).experiments
    table = tabulate(experiment, weighted=weighted)
    for row in table.rows:
        seeds = [recomputed(runs / row.method.algorithm / str(seed), weighted=weighted) for seed in SEEDS]
        for measure, cell in zip(table.columns, row.cells, strict=True):
            if measure.key == "improved":
                continue
            values = [found[measure.key] for found in seeds]
            # std and angle come from a difference of squares here: 1e-6 is far below the printed digits
            assert cell.mean == pytest.approx(statistics.mean(values), abs=1e-6), measure.key
            assert cell.std == pytest.approx(statistics.stdev(values), abs=1e-6), measure.key
            assert cell.n_seeds == len(SEEDS)


def test_improved_is_the_mean_of_rho(runs: Path) -> None:
    (experiment,) = group(read_runs([runs]).runs).experiments
    for row in tabulate(experiment, columns=("improved",)).rows:
        rhos = []
        for seed in SEEDS:
            lines = (runs / row.method.algorithm / str(seed) / "metrics.jsonl").read_text().splitlines()
            values = [json.loads(line)["rho"] for line in lines]
            rhos.append(statistics.mean(100 * value for value in values if value is not None))
        assert row.cells[0].mean == pytest.approx(statistics.mean(rhos))


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("mean", [1.0, 3.0, 2.0], [0, 1, 2]),
        ("std", [1.0, 3.0, 2.0], [1, 0, 2]),
        ("mean", [1.0, 1.001, 0.5], [1, 1, 0]),  # equal as printed: both best, no second
        ("mean", [3.0, 1.0, 1.0], [1, 2, 2]),
        ("mean", [math.nan, 2.0, 1.0], [0, 1, 2]),
        ("mean", [5.0], [0]),
        ("mean", [math.nan, 5.0], [0, 0]),
    ],
)
def test_best_and_second_best(key: str, values: list[float], expected: list[int]) -> None:
    cells = [Cell(value, math.nan, 1, 0) for value in values]
    assert [cell.place for cell in places(cells, MEASURE[key])] == expected


def test_the_terminal_table_fits_eighty_columns_and_marks_places(runs: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console.print(fairness_table([runs]))
    text = console.export_text(styles=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert all(label in plain for label in ALGORITHMS.values())
    assert "…" not in plain  # nothing is cut
    assert "\x1b[1m" in text
    assert "\x1b[4m" in text


def test_long_names_wrap_instead_of_cutting_numbers(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg", "a-method-with-quite-a-long-name"), seeds=(0, 1), rounds=2)
    console = Console(width=80, file=io.StringIO())
    console.print(fairness_table([tmp_path]))
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()


def test_a_single_run_has_no_spread_and_no_places(tmp_path: Path) -> None:
    text = table_text([write_run(tmp_path, rounds=2)], "markdown")
    assert "±" not in text
    assert "**" not in text


def test_markdown_shows_the_papers_value_and_marks_the_impossible(runs: Path) -> None:
    text = table_text([runs], "markdown")
    (row,) = [line for line in text.splitlines() if line.startswith("| FedAvg")]
    assert "| 46.85 |" in row
    assert "| 3.54† |" in row
    assert "at least 7.85" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_csv_has_full_precision_and_the_paper(runs: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(table_text([runs], "csv"))))
    assert [row["method"] for row in rows] == list(ALGORITHMS.values())
    for algorithm, row in zip(ALGORITHMS, rows, strict=True):
        means = [recomputed(runs / algorithm / str(seed), weighted=False)["mean"] for seed in SEEDS]
        assert float(row["mean_mean"]) == pytest.approx(statistics.mean(means), rel=1e-12)
        assert row["n_seeds"] == "3"
    assert rows[0]["std_paper"] == "3.54"
    assert "at least" in rows[0]["std_paper_impossible"]
    assert rows[0]["mean_paper_impossible"] == ""


def test_other_experiments_have_all_columns_and_no_paper(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg", "dqn-fed"), seeds=(0,), rounds=2)
    for form in FORMS:
        assert "paper" not in table_text([tmp_path], form).lower()
    assert "gini_mean" in table_text([tmp_path], "csv")


def test_a_class_per_client_stands_beside_the_papers_classes(tmp_path: Path) -> None:
    write_comparison(
        tmp_path, name="fashion-mnist", algorithms=("fedavg",), seeds=(0,), rounds=2, n_clients=3, one_class_each=True
    )
    (row,) = csv.DictReader(io.StringIO(table_text([tmp_path], "csv")))
    with (tmp_path / "fedavg" / "0" / "clients.csv").open() as file:
        last = [line for line in csv.DictReader(file) if line["round"] == "1"]
    assert float(row["class:shirt_mean"]) == float(last[0]["accuracy"])
    assert row["class:T-shirt_paper"] == "89.9"


def test_unknown_form_and_no_runs_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latex, markdown, csv"):
        table_text([tmp_path], "docx")
    with pytest.raises(ValueError, match="no run to tabulate"):
        table_text([tmp_path], "csv")


def latex_document(runs: Path) -> str:
    table = table_text([runs], "latex")
    return "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n" + table + "\\end{document}\n"


def test_latex_is_well_formed(runs: Path, tmp_path: Path) -> None:
    write_comparison(tmp_path, name="50% & more_#1", algorithms=("fedavg", "a_b%c"), seeds=(0, 1), rounds=1)
    for document in (latex_document(runs), latex_document(tmp_path)):
        check_latex(document)


def check_latex(document: str) -> None:
    """Check nesting of groups and environments, inline maths, and that all rows of a table have its columns."""
    lines = [re.sub(r"(?<!\\)%.*", "", line) for line in document.splitlines()]
    text = "\n".join(lines)
    open_environments: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            open_environments.append(name)
        else:
            assert open_environments.pop() == name
    assert open_environments == []
    depth = 0
    bare = re.sub(r"\\[\\{}$&%#_]", "", text)  # escaped characters mean themselves
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    outside = re.sub(r"\$[^$]*\$", "", bare)
    assert not re.search(r"[#_^~†±·]", outside)
    for spec, body in re.findall(r"\\begin\{tabular\}\{([lrc]+)\}(.*?)\\end\{tabular\}", text, flags=re.S):
        rows = [row for row in body.split(r"\\") if "&" in row]
        for row in rows:
            wide = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row))
            assert len(re.findall(r"(?<!\\)&", row)) + 1 + wide == len(spec), row


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "table.tex").write_text(latex_document(runs))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_latex_has_significance_rounds_and_seeds_and_columns_are_chosen(tmp_path: Path) -> None:
    write_comparison(tmp_path, name="cifar10-setup1", algorithms=("fedavg", "dqn-fed"), seeds=range(5), rounds=15)
    text = table_text([tmp_path], "latex", columns=("mean", "worst10"))
    assert "15 rounds, 5 seeds; the paper's values are of 2,000 rounds and 5 seeds" in text
    assert "differs from DQN-Fed at the 5\\% level (paired $t$-test over seeds, Holm)" in text
    [fedavg] = [line for line in text.splitlines() if line.startswith("FedAvg &")]
    assert fedavg.count("$^{*}$") == 2
    [dqn_fed] = [line for line in text.splitlines() if line.startswith("DQN-Fed &")]
    assert "$^{*}$" not in dqn_fed
    assert "std_mean" not in table_text([tmp_path], "csv", columns=("mean", "worst10"))
    with pytest.raises(ValueError, match="no column 'wurst10'"):
        table_text([tmp_path], "csv", columns=("wurst10",))


def test_one_seed_has_no_significance(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg", "dqn-fed"), seeds=(0,), rounds=5)
    text = table_text([tmp_path], "latex")
    assert "5 rounds, 1 seed." in text
    assert "differs" not in text
