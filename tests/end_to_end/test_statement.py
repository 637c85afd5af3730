"""Groups inside clients and the sites' statements: counted anew from the model, read as an ethics board would."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.core.checksums import sha256_of
from dqnfed.experiments.breakdown import BREAKDOWN_FILE
from dqnfed.report.comparison import group
from dqnfed.report.page import write_report
from dqnfed.report.reader import read_runs
from dqnfed.report.statements import write_statements
from tests.helpers.browser import chromium, console_errors, open_page, serious_violations
from tests.helpers.score_tables import experiment_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va-long-beach")


def dqnfed(*words: object) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hearts") / "runs"
    dqnfed(
        "compare",
        "heart",
        "--algorithms",
        "dqn-fed,local-only,pooled",
        "--rounds",
        3,
        "--seeds",
        "0:2",
        "--jobs",
        1,
        "--breakdown",
        "sex,age:50:65",
        "--out",
        out,
    )
    return out


@pytest.fixture(scope="module")
def statements(runs: Path) -> Path:
    dqnfed("statement", runs)
    return runs / "statements"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("method", ["dqn-fed", "local-only", "pooled"])
def test_groups_add_up_to_the_kept_models_scores(runs: Path, method: str) -> None:
    """A client's right rows, summed over groups, are its accuracy in clients.csv, whoever's the model."""
    folder = runs / method / "1"
    content = json.loads((folder / BREAKDOWN_FILE).read_text())
    kept = json.loads((folder / "summary.json").read_text())["kept_round"]
    with (folder / "clients.csv").open() as file:
        scores = {int(r["client"]): float(r["accuracy"]) for r in csv.DictReader(file) if int(r["round"]) == kept}
    assert len(scores) == 4
    for column in content["columns"]:
        for client, score in scores.items():
            mine = [e for e in content["rows"] if e["client"] == client and e["column"] == column["name"]]
            assert 100 * sum(sum(e["right"]) for e in mine) / sum(e["n"] for e in mine) == pytest.approx(
                score, abs=1e-3
            )
        everybody = [e for e in content["rows"] if e["client"] is None and e["column"] == column["name"]]
        parts = [e for e in content["rows"] if e["client"] is not None and e["column"] == column["name"]]
        assert sum(e["n"] for e in everybody) == sum(e["n"] for e in parts)
        assert sum(e["held"] for e in everybody) == 920
        assert np.array_equal(
            np.sum([e["of_class"] for e in everybody], axis=0), np.sum([e["of_class"] for e in parts], axis=0)
        )


def test_groups_are_those_of_the_patients(runs: Path) -> None:
    content = json.loads((runs / "dqn-fed" / "0" / BREAKDOWN_FILE).read_text())
    by_sex = {e["group"]: e["held"] for e in content["rows"] if e["client"] is None and e["column"] == "sex"}
    assert by_sex == {"female": 194, "male": 726}  # of UCI's 920 patients
    assert [c["groups"] for c in content["columns"]] == [["female", "male"], ["under 50", "50 to 64", "65 and over"]]


def test_the_report_shows_sizes_and_intervals_of_groups(runs: Path) -> None:
    page = (runs / "report.html").read_text()
    assert "Groups inside clients, DQN-Fed" in page
    assert "recognised disease" in page
    for name in ("female", "male", "under 50", "50 to 64", "65 and over"):
        assert f'<th scope="row" role="rowheader">{name}</th>' in page


def test_a_group_of_few_rows_is_never_certain(runs: Path) -> None:
    """All right in every seed is 100 %, but not with an interval from 100 to 100."""
    page = (runs / "report.html").read_text()
    assert "[100.0,\N{NO-BREAK SPACE}100.0]" not in page
    assert "[0.0,\N{NO-BREAK SPACE}0.0]" not in page


def test_every_site_has_a_statement_with_its_own_numbers(runs: Path, statements: Path) -> None:
    assert sorted(p.name for p in statements.iterdir()) == sorted(
        f"statement-{name}.{ending}" for name in HOSPITALS for ending in ("html", "pdf")
    )
    clients = json.loads((runs / "dqn-fed" / "0" / "clients.json").read_text())
    for client in clients:
        page = (statements / f"statement-{client['name']}.html").read_text()
        assert (
            f"{client['n_train']:,} training, {client['n_validation']:,} validation, {client['n_test']:,} test" in page
        )
        assert f"{client['name']}: joining changes your accuracy" in page
        assert "nothing was sent" in page
        assert sha256_of(runs / "dqn-fed" / "0" / "model.safetensors") in page
        for title in ("Summary", "Data of this site", "Method", "What left this site", "Results at this site"):
            assert f"<h2>{title}</h2>" in page
        assert page.count('<p class="line">Signature</p>') == 2
        assert "<script" not in page


def test_the_pdf_says_what_the_page_says(statements: Path) -> None:
    reader = shutil.which("pdftotext")
    file = statements / "statement-hungarian.pdf"
    assert file.read_bytes().startswith(b"%PDF")
    if reader is None:
        pytest.skip("pdftotext is not installed; it comes with poppler-utils")
    told = subprocess.run([reader, "-layout", str(file), "-"], capture_output=True, text=True, check=True).stdout
    page = (statements / "statement-hungarian.html").read_text()

    def words(text: str) -> set[str]:
        return set(re.findall(r"[\w.%]+", text.replace("\N{NO-BREAK SPACE}", " ")))

    body = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))
    sums = {word for word in words(body) if len(word) == 64}
    missing = words(body) - words(told) - sums
    assert missing <= {word for word in words(body) if len(word) > 40}
    flat = re.sub(r"\s", "", told)
    assert all(sum_[:32] in flat and sum_[32:] in flat for sum_ in sums)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (360, True), pytest.param(1280, True, marks=SLOW), pytest.param(360, False, marks=SLOW)],
)
def test_nothing_overlaps_is_cut_or_scrolls_sideways(
    browser: Chrome, statements: Path, runs: Path, width: int, dark: bool
) -> None:
    report = write_report([runs], runs / "again.html")
    for file in (statements / "statement-cleveland.html", report):
        open_page(browser, file.as_uri(), width=width, dark=dark)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(TOO_WIDE) == []
        assert browser.execute_script(OVERLAPS) == []
    assert console_errors(browser) == []


# elements whose content is wider than they are
TOO_WIDE = """
  return [...document.querySelectorAll("section:not([hidden]) *")].filter((e) => e.clientWidth && !e.closest("svg")
    && e.scrollWidth > e.clientWidth + 1 && !e.closest(".unseen, pre, [data-live^=problems], .plot, .track"))
    .map((e) => [e.tagName, e.className, e.textContent.slice(0, 40), e.scrollWidth, e.clientWidth]);
"""
# texts that cover each other, in tables, bars, lists and facts
OVERLAPS = """
  document.querySelectorAll(".unseen").forEach((e) => e.remove());
  const found = [], kinds = "td, th, dt, dd, li, h1, h2, h3, p, .label, .value, .who, .amount";
  const leaves = [...document.querySelectorAll(kinds)]
    .filter((e) => e.offsetWidth && !e.closest(".unseen, [hidden], .plot") && e.textContent.trim());
  const boxes = leaves.map((e) => { const r = document.createRange(); r.selectNodeContents(e);
    return [e, r.getBoundingClientRect()]; });
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    if (a.contains(b) || b.contains(a)) return;
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && tall > 4) found.push([a.textContent.slice(0, 30), b.textContent.slice(0, 30), wide, tall]);
  }));
  return found;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious_in_a_statement(browser: Chrome, statements: Path, dark: bool) -> None:
    open_page(browser, (statements / "statement-cleveland.html").as_uri(), dark=dark)
    assert serious_violations(browser) == []


def test_one_site_can_be_asked_for_and_an_unknown_one_is_named(runs: Path, tmp_path: Path) -> None:
    dqnfed("statement", runs, "--client", "hungarian", "--out", tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".pdf"]
    found = CliRunner().invoke(app, ["statement", str(runs), "--client", "Budapest"])
    assert found.exit_code != 0
    assert "no client 'Budapest'" in str(found.exception) + found.output


def test_of_a_run_over_a_network_it_says_what_left(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "dqn-fed" / "0", tmp_path / "run")
    (tmp_path / "run" / "flower.json").write_text("{}")
    [page, _] = write_statements([tmp_path / "run"], tmp_path / "out", {}, clients=["cleveland"])
    text = page.read_text()
    assert "The training ran over a network" in text
    assert "nothing was sent" not in text
    assert "<dt>Table</dt><dd>the site&#x27;s own, which stayed there</dd>" in text
    assert "for so many test rows" in text  # one seed has the interval of its rows


@pytest.mark.parametrize(("unit", "whose"), [("client", "a whole site"), ("record", "a single training row")])
@pytest.mark.parametrize("metrics", ["per-client", "aggregate-only"])
def test_it_says_whom_the_noise_hides_and_what_is_padded(
    unit: str, whose: str, metrics: str, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "dqn-fed" / "0", folder := tmp_path / "run")
    (folder / "checksums.json").unlink()  # the files are changed by hand here
    summary = json.loads((folder / "summary.json").read_text())
    spent = {"epsilon": 2.5, "delta": 1e-5, "unit": unit}
    (folder / "summary.json").write_text(json.dumps({**summary, "privacy": spent}))
    config = folder / "config.toml"
    settings = config.read_text().replace("secure = false", "secure = true")
    config.write_text(settings.replace('metrics = "per-client"', f'metrics = "{metrics}"'))
    [page, _] = write_statements([folder], tmp_path / "out", {}, clients=["cleveland"])
    text = html.unescape(page.read_text())
    assert f"Differential privacy of {whose}: epsilon 2.5, delta 1e-05." in text
    assert "the method's reply under one-time pads" in text
    assert ("losses and scores under one-time pads" in text) == (metrics == "aggregate-only")


def test_hostile_and_foreign_names_stay_text_inside_the_folder(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    names = ["<script>alert(1)</script>", "../../etc/x", "北京医院", "Łódź & Ćwik $x_1$"]
    rng = np.random.default_rng(0)
    rows = [f'"{name}",{rng.normal():.3f},{rng.choice(["a", "b"])},{rng.choice(["<i>", "m"])}' for name in names * 30]
    table.write_text("site,x,y,sex\n" + "\n".join(rows) + "\n", encoding="utf-8")
    data = ("--data", table, "--client", "site", "--label", "y")
    dqnfed("run", *data, "--rounds", 2, "--breakdown", "sex", "--out", tmp_path / "run", "-q")
    written = write_statements([tmp_path / "run"], tmp_path / "out", {})
    assert {path.parent for path in written} == {tmp_path / "out"}
    assert len(set(written)) == 8
    page = next(p for p in written if "script" in p.name and p.suffix == ".html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "there is one seed" in page.lower()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_a_statement_can_be_made_of_any_scores(seed: int, tmp_path: Path) -> None:
    """Missing scores, one seed, one client, regressions: content without a number that is none."""
    from dqnfed.report.statement import statement_of
    from dqnfed.report.statement_html import statement_page
    from dqnfed.report.statement_pdf import write_pdf

    rng = np.random.default_rng(seed)
    n_seeds, n_clients = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    shape, is_regression = (n_seeds, n_clients), seed % 2 == 1
    scores: dict[str, Any] = {
        name: -rng.random(shape) if is_regression else 100 * rng.random(shape)
        for name in ("local-only", "dqn-fed", "fedavg", "pooled")[seed % 3 :]
    }
    scores["dqn-fed"] = np.where(rng.random(shape) < 0.3, np.nan, next(iter(scores.values())))
    extra: dict[str, Any] = {"score": "loss", "folder": tmp_path, "spread": 20.0} if is_regression else {}
    found = statement_of(experiment_of(scores, **extra), 0, {}, version="0")
    text = statement_page(found, "")
    assert "nan" not in re.sub(r"<[^>]*>", " ", text).lower().split()
    write_pdf(found, tmp_path / "found.pdf")
    assert (tmp_path / "found.pdf").stat().st_size > 5000


def test_statements_are_of_one_experiment(runs: Path) -> None:
    experiments = group(read_runs([runs]).runs).experiments
    assert len(experiments) == 1  # what is reported makes no other experiment
