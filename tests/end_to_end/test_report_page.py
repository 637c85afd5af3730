"""The report in a real browser: drawn, usable by pointer and keyboard, readable, and silent on the network."""

import csv
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dqnfed.report.page import asset, write_report
from dqnfed.report.watch import LiveServer
from tests.helpers.browser import (
    chromium,
    console_errors,
    network_requests,
    open_page,
    pixels,
    serious_violations,
    wait_until,
)
from tests.helpers.colours import css_palettes
from tests.helpers.runs import write_comparison, write_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHARTS = ("convergence", "improved", "histogram", "sorted", "scatter")
N_CLIENTS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_comparison(
        out, name="cifar10-setup1", seeds=(0, 1), rounds=30, n_clients=N_CLIENTS, groups=("rural", "urban")
    )
    return out


@pytest.fixture(scope="module")
def report(runs: Path) -> str:
    return write_report([runs], runs / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator["Chrome"]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: "Chrome", report: str) -> "Chrome":
    open_page(browser, report)
    return browser


def ask(browser: "Chrome", script: str, *arguments: Any) -> Any:
    return browser.execute_script(f"return {script}", *arguments)


def column(browser: "Chrome", name: str) -> list[str]:
    cells = "[...document.querySelectorAll(`tbody [data-column=${arguments[0]}]`)].map(e => e.innerText.trim())"
    return [str(text) for text in ask(browser, cells, name)]


def choose(browser: "Chrome", part: str, value: str) -> None:
    browser.execute_script(
        "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change', {bubbles: true}));",
        part,
        value,
    )


def press(browser: "Chrome", *keys: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    named = [getattr(Keys, key, key) for key in keys]
    ActionChains(browser).send_keys(*named).perform()


def test_it_loads_without_an_error_or_a_request(browser: "Chrome", report: str) -> None:
    network_requests(browser)
    console_errors(browser)
    open_page(browser, report)
    browser.execute_script("document.querySelector('button[data-row]').click()")
    assert console_errors(browser) == []
    assert network_requests(browser) == [report]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in this tab", "in another tab"])
def test_the_browsers_own_pages_are_not_counted(browser: "Chrome", report: str, elsewhere: bool) -> None:
    network_requests(browser)
    console_errors(browser)
    tab = browser.current_window_handle
    if elsewhere:
        browser.switch_to.new_window("tab")
    browser.get("chrome://version/")
    browser.execute_async_script(
        "const image = new Image(); image.onerror = () => arguments[0](); image.src = 'chrome://no-such-image/'"
    )
    if elsewhere:
        browser.close()
        browser.switch_to.window(tab)
    open_page(browser, report)
    assert console_errors(browser) == []
    assert network_requests(browser) == [report]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_are_drawn_in_the_colours_of_every_method(browser: "Chrome", report: str, dark: bool) -> None:
    open_page(browser, report, dark=dark)
    palette = css_palettes(asset("page.css"))[2 if dark else 0]
    for chart in CHARTS:
        found = pixels(browser, f'[data-chart="{chart}"] .plot').astype(int)
        for slot in range(5):
            wanted = [int(palette[f"s{slot}"][i : i + 2], 16) for i in (1, 3, 5)]
            near = (np.abs(found - wanted).max(axis=2) <= 8).sum()
            assert near >= 20, f"{chart}: {near} pixels of series {slot}"


def test_every_series_is_labelled_and_no_label_covers_another(browser: "Chrome", report: str) -> None:
    overlaps = """(() => {
      const found = [];
      for (const root of document.querySelectorAll(".plot svg")) {
        const boxes = [...root.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
          const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
          const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
          if (wide > 1 && tall > 3) found.push([root.closest("figure")?.dataset.chart, a, b]);
        }));
        for (const [a, p] of boxes) if (p.left < -1 || p.right > innerWidth + 1) found.push([a, "is cut"]);
      }
      return found;
    })()"""
    for width in (1280, 360):
        open_page(browser, report, width=width)
        for chart in CHARTS:
            names = ask(
                browser, f"[...document.querySelectorAll('[data-chart={chart}] .name')].map(e => e.textContent)"
            )
            assert sorted(names) == sorted(["FedAvg", "q-FFL", "TERM", "FedMGDA+", "DQN-Fed"]), (chart, width)
        assert ask(browser, overlaps) == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_cut_or_wider_than_the_window(browser: "Chrome", report: str, width: int) -> None:
    open_page(browser, report, width=width)
    browser.execute_script("document.querySelector('button[data-row]').click()")
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    too_wide = """[...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1)
      .map((e) => [e.getAttribute("aria-label"), e.scrollWidth, e.clientWidth])"""
    assert ask(browser, too_wide) == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)])
def test_axe_finds_nothing_serious(browser: "Chrome", report: str, width: int, dark: bool) -> None:
    open_page(browser, report, width=width, dark=dark)
    browser.execute_script("document.querySelector('button[data-row]').click()")
    assert serious_violations(browser) == []


def test_the_table_says_what_clients_csv_says(page: "Chrome", runs: Path) -> None:
    with (runs / "dqn-fed" / "0" / "clients.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["round"] == "29"]
    expected = sorted(float(row["accuracy"]) for row in last)[:25]
    assert [float(text) for text in column(page, "accuracy")] == pytest.approx(expected, abs=0.051)


def test_columns_sort_both_ways_and_by_keyboard(page: "Chrome") -> None:
    page.execute_script("document.querySelector('button[data-sort=train]').focus()")
    press(page, "ENTER")
    sizes = [int(text) for text in column(page, "train")]
    assert sizes == sorted(sizes, reverse=True)
    assert ask(page, "document.querySelector('th[data-column=train]').getAttribute('aria-sort')") == "descending"
    press(page, "ENTER")  # the focus stays on the column title
    sizes = [int(text) for text in column(page, "train")]
    assert sizes == sorted(sizes)


def test_filters_keep_exactly_the_clients_that_match(page: "Chrome") -> None:
    choose(page, "[data-part=group]", "1")
    assert set(column(page, "group")) == {"urban"}
    count = "document.querySelector('[data-part=count]').textContent"
    assert ask(page, count) == f"1–25 of {N_CLIENTS // 2} clients"  # noqa: RUF001
    choose(page, "[data-part=group]", "")
    page.execute_script("document.querySelector('[data-part=worst]').click()")
    assert len(column(page, "name")) == N_CLIENTS // 10
    page.execute_script("document.querySelector('[data-part=worst]').click()")
    page.execute_script("document.querySelector('[data-part=search]').focus()")
    press(page, *"client 17")
    assert column(page, "name") == ["client 17"]
    press(page, *"nobody")
    assert "No client matches" in ask(page, count)


def test_pages_of_the_client_table_turn(page: "Chrome") -> None:
    first = column(page, "name")
    page.execute_script("document.querySelector('[data-part=after]').click()")
    second = column(page, "name")
    assert len(first) == len(second) == 25
    assert set(first).isdisjoint(second)


def test_two_clicks_show_who_is_failed_and_why(page: "Chrome", runs: Path) -> None:
    page.execute_script("document.querySelector('button[data-row]').click()")
    detail = ask(page, "document.querySelector('[data-part=detail]').innerText")
    for words in ("below the mean client", "training examples", "Labels:", "Label skew", "number 1 of 60 from below"):
        assert words in detail
    assert ask(page, "document.querySelectorAll('[data-part=detail] path.line').length") == 5
    assert ask(page, "document.activeElement.dataset.row !== undefined")


def test_arrow_keys_read_values_from_a_chart(page: "Chrome") -> None:
    page.execute_script("document.querySelector('[data-chart=convergence] .reader').focus()")
    value = "document.querySelector('[data-chart=convergence] .reader').getAttribute('aria-valuetext')"
    at_end = ask(page, value)
    assert re.match(r"rounds 30: DQN-Fed [\d.]+, ", at_end)
    press(page, "HOME")
    assert ask(page, value).startswith("rounds 0: ")
    press(page, "ARROW_RIGHT", "ARROW_RIGHT")
    assert ask(page, value).startswith("rounds 2: ")
    assert ask(page, "document.querySelector('[data-chart=convergence] .readout').hidden") is False
    press(page, "ESCAPE")
    assert ask(page, "document.querySelector('[data-chart=convergence] .readout').hidden") is True


def test_the_tab_key_reaches_every_control_in_order(page: "Chrome") -> None:
    press(page, "TAB")
    assert ask(page, "document.activeElement.textContent") == "Skip to the results"
    wanted = [
        "#theme",
        "nav a",
        "[data-weighted]",
        ".scroll",
        ".chips button",
        "select",
        ".reader",
        "select",
        "th button",
    ]
    for selector in wanted:  # in this order, with others between them
        for _ in range(30):
            press(page, "TAB")
            if ask(page, "document.activeElement.matches(arguments[0])", selector):
                break
        else:
            pytest.fail(f"the Tab key does not get to {selector}")


def test_the_theme_switch_changes_and_is_remembered(page: "Chrome", report: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    button = "document.getElementById('theme')"
    light = ask(page, ground)
    page.execute_script(f"{button}.click()")
    assert (ask(page, f"{button}.textContent"), ask(page, ground)) == ("Theme: light", light)
    page.execute_script(f"{button}.click()")
    assert ask(page, f"{button}.textContent") == "Theme: dark"
    assert ask(page, ground) != light
    open_page(page, report)
    assert ask(page, f"{button}.textContent") == "Theme: dark"
    page.execute_script(f"{button}.click()")
    assert ask(page, f"{button}.textContent") == "Theme: auto"


def test_methods_axes_and_weights_can_be_chosen(page: "Chrome") -> None:
    lines = "document.querySelectorAll('[data-chart=convergence] path.line').length"
    page.execute_script("document.querySelector('.chips button').click()")
    assert ask(page, lines) == 4
    assert ask(page, "document.querySelector('.chips button').getAttribute('aria-pressed')") == "false"
    choose(page, "[data-control=x]", "bytes")
    choose(page, "[data-control=y]", "worst10")
    label = ask(page, "document.querySelector('[data-chart=convergence] svg').getAttribute('aria-label')")
    assert label.startswith("accuracy of the worst tenth, % against bytes sent and received.")
    tables = "[...document.querySelectorAll('[data-table]')].map(e => e.hidden)"
    assert ask(page, tables) == [False, True]
    page.execute_script("document.querySelector('[data-weighted=size]').click()")
    assert ask(page, tables) == [True, False]


def test_experiments_are_shown_one_at_a_time(browser: "Chrome", runs: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", name="elsewhere", rounds=3)
    open_page(browser, write_report([runs, other], tmp_path / "page.html").as_uri())
    hidden = "[...document.querySelectorAll('.experiment')].map(e => e.hidden)"
    assert ask(browser, hidden) == [False, True]
    choose(browser, "#experiment", "1")
    assert ask(browser, hidden) == [True, False]
    assert ask(browser, "document.querySelectorAll('.experiment')[1].querySelectorAll('path.line').length") >= 2
    assert console_errors(browser) == []


def test_a_run_without_client_files_still_has_its_curves(browser: "Chrome", tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    for name in ("clients.csv", "clients.json"):
        (folder / name).unlink()
    open_page(browser, write_report([folder], tmp_path / "page.html").as_uri())
    assert ask(browser, "document.querySelectorAll('[data-chart=convergence] path.line').length") == 1
    assert ask(browser, "document.querySelector('[data-chart=histogram]').innerText").endswith(
        "These runs hold no scores of clients."
    )
    assert ask(browser, "document.querySelector('[data-part=clients]').hidden")
    assert console_errors(browser) == []


def test_paper_and_ink_when_printed(page: "Chrome") -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        visible = "[...document.querySelectorAll('nav, .controls, .chips, .pager')].filter(e => e.offsetParent).length"
        assert ask(page, visible) == 0
        assert ask(page, "getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.execute_cdp_cmd("Page.printToPDF", {})["data"].startswith("JVBER")  # %PDF in base64
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_many_methods_stay_legible(browser: "Chrome", tmp_path: Path) -> None:
    names = [f"method-{i}" for i in range(14)]
    write_comparison(tmp_path, algorithms=names, seeds=(0,), rounds=5)
    open_page(browser, write_report([tmp_path], tmp_path / "page.html").as_uri())
    assert ask(browser, "document.querySelectorAll('.chips button').length") == 14
    assert ask(browser, "document.querySelectorAll('.chips [aria-pressed=true]').length") == 8
    browser.execute_script("document.querySelectorAll('.chips [aria-pressed=false]').forEach(e => e.click())")
    tops = ask(
        browser,
        "[...document.querySelectorAll('[data-chart=convergence] .name')].map(e => e.getBoundingClientRect().top)",
    )
    assert len(tops) == 14
    assert np.diff(sorted(tops)).min() >= 12


def test_the_live_page_shows_new_rounds_without_a_reload(browser: "Chrome", tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=12, finished=False)
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = (folder / "clients.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(whole[:4]))
    (folder / "clients.csv").write_text("".join(r for r in rows if r[0] == "r" or int(r.split(",")[0]) < 3))
    live = LiveServer([folder])
    status = "document.getElementById('live').textContent"
    try:
        console_errors(browser)
        open_page(browser, live.url)
        wait_until(lambda: "round 3 of 12" in ask(browser, status))
        browser.execute_script("window.sameDocument = true")
        with (folder / "clients.csv").open("a") as file:
            file.writelines(r for r in rows if r.startswith("3,"))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(whole[4])
        wait_until(lambda: "round 4 of 12" in ask(browser, status))
        assert ask(browser, "window.sameDocument")
        end = "document.querySelector('[data-chart=convergence] .reader').getAttribute('aria-valuetext')"
        assert ask(browser, end).startswith("rounds 4: ")
        assert console_errors(browser) == []
    finally:
        live.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, False), (360, True)])
def test_a_reader_sees_first_what_joining_brings_each_hospital(
    browser: "Chrome", tmp_path: Path, width: int, dark: bool
) -> None:
    """Four long names, all methods: the sentence stands above the bars, and nothing is cut or covered."""
    write_comparison(
        tmp_path, algorithms=("local-only", "pooled", "fedavg", "dqn-fed"), seeds=(0, 1, 2), rounds=5, n_clients=4
    )
    open_page(browser, write_report([tmp_path], tmp_path / "report.html").as_uri(), width=width, dark=dark)
    lead = ask(browser, "document.querySelector('.lead').innerText")
    assert "of 4 clients gain" in lead
    boxes = ask(
        browser,
        "[...document.querySelectorAll('.lead, .found p, .bar-row, .told li')].map((e) => e.getBoundingClientRect())"
        ".map((b) => [b.left, b.top, b.right, b.bottom])",
    )
    assert len(boxes) == 1 + 1 + 4 + 4
    for (_, _, right, bottom), (left, top, _, _) in pairwise(boxes):
        assert right <= width
        assert bottom <= top + 1
        assert left >= 0
    cut = ask(
        browser,
        "[...document.querySelectorAll('#first-0 *')].filter((e) => e.scrollWidth > e.clientWidth + 1 && "
        "getComputedStyle(e).display !== 'inline').map((e) => e.className)",
    )
    assert cut == []
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    assert serious_violations(browser) == []
