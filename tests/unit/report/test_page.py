"""The page as a file: self-contained, escaped, complete without its scripts, small."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dqnfed.report.page import make_report, write_report
from tests.helpers.runs import write_comparison, write_run

VOID = {"meta", "link", "input", "br"}


class Structure(HTMLParser):
    """Checks that elements nest, and collects ids, addresses and visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.addresses += [str(found[name]) for name in ("src", "href", "action", "data") if name in found]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text.append(data)


def structure(path: Path) -> Structure:
    found = Structure()
    found.feed(path.read_text(encoding="utf-8"))
    assert found.stack == []
    return found


def embedded(path: Path) -> Any:
    (text,) = re.findall(r'id="data">([^<]*)<', path.read_text(encoding="utf-8"))
    return json.loads(zlib.decompress(base64.b64decode(text)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_comparison(out, algorithms=("fedavg", "dqn-fed"), seeds=(0, 1), rounds=6, groups=("rural", "urban"))
    return write_report([out], out / "report.html")


def test_the_page_is_whole_and_asks_for_nothing(report: Path) -> None:
    found = structure(report)
    assert len(set(found.ids)) == len(found.ids)
    for address in found.addresses:
        assert address.startswith("#") or address == "data:,"
        assert not address.startswith("#") or address[1:] in found.ids
    text = report.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def test_tables_and_settings_need_no_script(report: Path) -> None:
    text = " ".join(structure(report).text)
    for words in ("DQN-Fed", "Worst", "rural", "urban", "train.lr", "dqnfed run made-up --algorithm fedavg --seed 1"):
        assert words in text
    assert "has the highest mean accuracy" in text


def test_the_embedded_data_holds_final_accuracies_and_label_mixes(report: Path) -> None:
    (experiment,) = embedded(report)
    clients = json.loads((report.parent / "fedavg" / "1" / "clients.json").read_text())
    rows = [line.split(",") for line in (report.parent / "fedavg" / "1" / "clients.csv").read_text().splitlines()]
    assert experiment["final"][1][0] == [float(row[5]) for row in rows if row[0] == "5"]
    for k, client in enumerate(clients):
        mix = experiment["clients"][1]["mix"][k]
        assert {experiment["labels"][mix[i]]: mix[i + 1] for i in range(0, len(mix), 2)} == client["labels"]
        assert experiment["clients"][1]["train"][k] == client["n_train"]


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", name="</script><b>x", algorithm="<img src=x>", rounds=2)
    clients = json.loads((folder / "clients.json").read_text())
    (folder / "clients.json").write_text(json.dumps([c | {"name": "<script>alert(1)</script>"} for c in clients]))
    found = structure(write_report([folder], tmp_path / "page.html", title='"><script>'))
    assert "img" not in found.stack
    assert '"><script>' in " ".join(found.text)


def test_unequal_runs_are_named_on_the_page(tmp_path: Path) -> None:
    write_comparison(tmp_path / "good", algorithms=("fedavg",), seeds=(0,), rounds=3)
    write_run(tmp_path / "other", name="elsewhere", rounds=2, finished=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"round": -1, "acc')
    text = " ".join(structure(write_report([tmp_path, tmp_path / "nowhere"], tmp_path / "page.html")).text)
    for words in (
        "belong to 2 experiments",
        "in progress, or ended without a summary",
        "its last line is half-written",
        "nothing was recorded in it; left out",
        "there is no such folder",
    ):
        assert words in text
    assert "FedAvg" in text
    assert "DQN-Fed" in text


def test_a_report_comes_with_its_table_and_problems(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2, finished=False)
    found = make_report([folder], tmp_path / "page.html")
    assert found.path == tmp_path / "page.html"
    assert found.table.row_count == 1
    assert [problem.folder for problem in found.problems] == [folder]


def test_without_a_single_run_the_error_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run to report on: .*holds no run.*Give a run folder"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_gets_a_report_html(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1)
    assert write_report([folder], tmp_path) == tmp_path / "report.html"
    assert write_report([folder], tmp_path / "new") == tmp_path / "new" / "report.html"


def test_one_class_per_client_gets_a_column_each(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg",), seeds=(0,), rounds=1, n_clients=3, one_class_each=True)
    text = write_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    for name in ("shirt", "pullover", "T-shirt"):
        assert f'role="columnheader">{name}</th>' in text


def test_a_score_that_is_no_accuracy_is_called_by_its_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=1)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"score": "negative squared error"}))
    path = write_report([folder], tmp_path / "page.html")
    assert "Test negative squared error over clients" in " ".join(structure(path).text)
    assert embedded(path)[0]["score"] == "negative squared error"


@pytest.mark.slow
def test_five_methods_five_seeds_two_thousand_rounds_stay_below_three_megabytes(tmp_path: Path) -> None:
    write_comparison(tmp_path, rounds=2000, n_clients=100, eval_every=10, participation=0.1)
    assert write_report([tmp_path], tmp_path / "page.html").stat().st_size < 3_000_000


def test_a_thousand_clients_stay_below_three_megabytes(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg", "dqn-fed"), seeds=(0,), rounds=8, n_clients=1000)
    size = write_report([tmp_path], tmp_path / "page.html").stat().st_size
    assert size < 600_000  # five seeds and five methods would be twelve times the client data, about 40 kB each
