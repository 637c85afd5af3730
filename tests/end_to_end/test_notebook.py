"""The notebook runs from top to bottom, as a reader would run it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first-steps.ipynb"


def test_every_cell_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), namespace)
    said = capsys.readouterr().out
    for hospital in ("cleveland", "hungarian", "switzerland", "va-long-beach"):
        assert hospital in said
    assert (tmp_path / "runs/notebook/report.html").is_file()


def test_the_notebook_is_stored_without_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    assert all(not cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_first_command_about_wrong_labels_finds_and_corrects_them(tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "wrong-labels.md"
    command = next(block.code for block in blocks_of(page) if block.is_executed_command).split()
    run = tmp_path / "run"
    words = [str(run) if before == "--out" else word for before, word in pairwise(command)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((run / "summary.json").read_text())["noise"]
    assert found["wrong_before"] > 100
    assert found["wrong_after"] < 0.25 * found["wrong_before"]
