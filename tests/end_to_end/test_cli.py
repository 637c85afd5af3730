"""The command line as a user meets it: every command runs, and every mistake gets one clear message."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dqnfed import FedAvg, __version__, cli
from tests.helpers.folders import newest_checkpoint


class Ended:
    """What a command printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def dqnfed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["dqnfed", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ending:
            code = int(ending.code or 0)
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


@pytest.fixture
def digits_run(dqnfed, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    assert dqnfed("run", "digits", "--rounds", "3", "--out", "run", "--quiet").code == 0
    return tmp_path / "run"


def test_run_writes_the_whole_folder(digits_run: Path) -> None:
    names = {path.name for path in digits_run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "clients.csv", "clients.json", "summary.json", "env.json"} <= names
    assert {"checkpoint", "model.safetensors"} <= names
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [-1, 0, 1, 2]
    header = (digits_run / "clients.csv").read_text().splitlines()[0]
    assert header.startswith("round,client,n,loss_before,loss_after,accuracy")
    config = tomllib.loads((digits_run / "config.toml").read_text())
    assert config["train"]["rounds"] == 3
    summary = json.loads((digits_run / "summary.json").read_text())
    assert {"mean", "std", "worst10", "best10", "worst5", "best5", "angle", "kl"} <= set(summary["accuracy"])


def test_settings_reach_the_run(dqnfed) -> None:  # type: ignore[no-untyped-def]
    ended = dqnfed(
        "run", "digits", "-a", "fedavg", "--rounds", "2", "--seed", "7", "--set", "train.lr=0.25", "--out", "r"
    )
    assert ended.code == 0
    config = tomllib.loads(Path("r/config.toml").read_text())
    assert (config["algorithm"]["name"], config["run"]["seed"], config["train"]["lr"]) == ("fedavg", 7, 0.25)


def test_a_method_keeps_its_own_defaults(dqnfed) -> None:  # type: ignore[no-untyped-def]
    """FedFa's momentum is 0.9 in the run, in a run that goes on, and in one of the stored config."""
    words = ("--rounds", "2", "--quiet", "--out")
    assert dqnfed("run", "digits", "--algorithm", "fedfa", *words, "r").code == 0
    Path("r/summary.json").unlink()  # as if it had been killed
    assert dqnfed("resume", "r", "--quiet").code == 0  # which refuses a method with other settings
    assert dqnfed("run", "r/config.toml", *words, "again").code == 0
    begun = [newest_checkpoint(Path(run))["identity"] for run in ("r", "again")]
    assert begun[0] == begun[1]
    assert "momentum=0.9" in begun[0]["algorithm"]
    assert (
        load_file("r/model.safetensors")["1.weight"].tobytes()
        == load_file("again/model.safetensors")["1.weight"].tobytes()
    )


def test_what_the_user_sets_counts_before_the_preset(dqnfed) -> None:  # type: ignore[no-untyped-def]
    """The preset has lr = 0.3 for FCFL alone."""
    words = ("run", "digits", "-a", "fcfl", "--rounds", "1", "--quiet", "--out")
    assert dqnfed(*words, "a").code == 0
    assert dqnfed(*words, "b", "--set", "train.lr=0.25").code == 0
    assert dqnfed(*words, "c", "--set", "train.lr=0.25", "--set", "algorithm.lr=0.2").code == 0
    begun = [newest_checkpoint(Path(run))["identity"] for run in "abc"]
    for identity, lr in zip(begun, ("0.3", "0.25", "0.2"), strict=True):
        assert f"(lr={lr}," in identity["algorithm"]


def test_settings_without_effect_are_told_once_a_method(dqnfed, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(FedAvg, "unused", lambda self: frozenset({"lr", "momentum"}), raising=False)
    line, few = "fedavg does not use lr (train.lr)", ("--rounds", "1", "--out")
    assert dqnfed("run", "digits", "-a", "fedavg", *few, "r").err.count(line) == 1
    assert json.loads(Path("r/summary.json").read_text())["unused"] == ["lr"]
    words = ("compare", "digits", "--algorithms", "fedavg,qffl", "--seeds", "0:2", "--jobs", "1", *few)
    ended = dqnfed(*words, "c")
    assert (ended.code, ended.err.count("does not use"), ended.err.count(line)) == (0, 1, 1)
    assert dqnfed(*words, "c").err.count(line) == 1  # of runs that are finished, too
    assert "does not use" not in dqnfed(*words, "q", "--quiet").err


def test_a_toml_file_of_ones_own(dqnfed) -> None:  # type: ignore[no-untyped-def]
    Path("mine.toml").write_text('name = "mine"\n[data]\nname = "digits"\nclients = 5\n[train]\nrounds = 2\nlr = 0.5\n')
    assert dqnfed("run", "mine.toml", "--out", "r").code == 0
    assert json.loads(Path("r/summary.json").read_text())["name"] == "mine"


def test_a_finished_run_is_not_overwritten(dqnfed, digits_run: Path) -> None:  # type: ignore[no-untyped-def]
    again = dqnfed("run", "digits", "--rounds", "3", "--out", "run")
    assert again.code == 1
    assert "already holds a run" in again.err
    finished = dqnfed("resume", "run")
    assert finished.code == 0
    assert "3 rounds" in finished.out


def test_compare_reports_and_goes_on(dqnfed) -> None:  # type: ignore[no-untyped-def]
    words = ("compare", "digits", "--algorithms", "dqn-fed,fedavg", "--seeds", "0:2", "--rounds", "2", "--out", "c")
    first = dqnfed(*words)
    assert first.code == 0
    assert "DQN-Fed" in first.out
    for name in ("dqn-fed", "fedavg"):
        for seed in ("0", "1"):
            assert Path(f"c/{name}/{seed}/summary.json").is_file()
    assert "<html" in Path("c/report.html").read_text()[:500].lower()
    before = Path("c/fedavg/0/summary.json").stat().st_mtime_ns
    assert dqnfed(*words).code == 0
    assert Path("c/fedavg/0/summary.json").stat().st_mtime_ns == before
    other = dqnfed(*words, "--set", "train.lr=0.5")
    assert other.code == 1
    assert "other settings" in other.err


def test_report_and_tables(dqnfed, digits_run: Path) -> None:  # type: ignore[no-untyped-def]
    assert dqnfed("report", "run", "--out", "page.html").code == 0
    assert Path("page.html").stat().st_size > 10_000
    assert "\\begin{tabular}" in dqnfed("report", "run", "--table", "latex").out
    assert dqnfed("report", "run", "--figures", "figures", "--quiet").code == 0
    assert list(Path("figures").glob("*.svg"))


def test_predict_and_export(dqnfed, digits_run: Path) -> None:  # type: ignore[no-untyped-def]
    np.save("new.npy", np.zeros((4, 64), dtype=np.float32))
    ended = dqnfed("predict", "run", "new.npy")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 5
    assert ended.out.startswith("id,class,probability_0,")
    assert dqnfed("export", "run", "model.safetensors").code == 0
    assert sum(array.size for array in load_file("model.safetensors").values()) == 64 * 32 + 32 + 32 * 10 + 10
    np.save("wrong.npy", np.zeros((4, 63), dtype=np.float32))
    assert "63 numbers an example" in dqnfed("predict", "run", "wrong.npy").err


@pytest.mark.parametrize("what", ["algorithms", "presets", "datasets"])
def test_lists_are_for_people_and_machines(dqnfed, what: str) -> None:  # type: ignore[no-untyped-def]
    assert dqnfed("list", what).code == 0
    rows = json.loads(dqnfed("list", what, "--json").out)
    assert len(rows) >= 3


def test_methods_are_listed_one_line_each_in_80_columns(dqnfed, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "80")
    n_methods = len(json.loads(dqnfed("list", "algorithms", "--json").out))
    command = [sys.executable, "-m", "dqnfed", "list", "algorithms"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == n_methods
    assert max(map(len, lines)) <= 80
    ended = dqnfed("list", "algorithms", "dqn-fed", "fedavg")
    assert [line.split()[0] for line in ended.out.splitlines()] == ["dqn-fed", "sends", "fedavg", "sends"]
    assert "did you mean 'fedavg'?" in dqnfed("list", "algorithms", "fedagv").err


def test_the_version_is_printed(dqnfed) -> None:  # type: ignore[no-untyped-def]
    assert dqnfed("--version").out == f"dqnfed {__version__}\n"


def test_dry_run_writes_nothing(dqnfed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = dqnfed("run", "digits", "--dry-run")
    assert ended.code == 0
    assert "ms a round" in ended.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_under_pads_is_secure(dqnfed) -> None:  # type: ignore[no-untyped-def]
    """Padded numbers have 64 bits, twice those of the model, and methods that need rows are refused as in the run."""
    secure = ("--set", "privacy.secure=true", "--dry-run")
    texts = [" ".join(dqnfed("run", "heart", *extra).out.split()) for extra in (("--dry-run",), secure)]
    sent = [float(text.partition(" KiB up")[0].rpartition(" ")[2]) for text in texts]
    assert sent[1] > 2 * sent[0] - 0.1
    refused = dqnfed("run", "heart", "--algorithm", "fedfv", *secure)
    assert refused.code == 1
    assert "its server needs every client's reply itself" in refused.err


def test_verbose_tells_of_checkpoints(tmp_path: Path) -> None:
    """In a process of its own: logging is set up once in a process, and other tests have been there before."""
    options = ["--rounds", "2", "--set", "run.checkpoint_seconds=0", "-v", "--out", str(tmp_path / "told")]
    command = [sys.executable, "-m", "dqnfed", "run", "digits", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [round for round in (0, 1) if f"checkpoint after round {round}" in ended.stderr] == [0, 1]


def test_doctor_finds_nothing_wrong(dqnfed) -> None:  # type: ignore[no-untyped-def]
    ended = dqnfed("doctor")
    assert ended.code == 0
    assert "torch" in ended.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "digitz"), "did you mean 'digits'"),
        (("run", "nowhere.toml"), "there is no file nowhere.toml"),
        (("run", "digits", "-a", "dqnfed"), "did you mean 'dqn-fed'"),
        (("run", "digits", "--set", "train.lrr=1"), "did you mean 'lr'"),
        (("run", "digits", "--set", "train.lr=-1"), "greater than 0"),
        (("run", "digits", "--set", "train"), "a change reads key=value"),
        (("run", "digits", "--set", "algorithm.metrik=1"), "did you mean 'metric'"),
        (("run", "digits", "-a", "qffl", "--set", "algorithms.qffl.q=-1"), "`q` must be in [0"),
        (
            ("compare", "digits", "--algorithms", "qffl,term", "--set", "algorithm.lr=0.2"),
            "algorithm.lr is a setting of the experiment's own method, dqn-fed, which is not among qffl, term",
        ),
        (("run", "digits", "--set", "data.name=digitz"), "digits"),
        (("run", "digits", "--set", "model.name=mpl"), "mlp"),
        pytest.param(
            ("run", "digits", "--set", "run.device=cuda"),
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here is one"),
        ),
        (("compare", "digits", "--seeds", "a:b"), "seeds read 3"),
        (("compare", "digits", "--algorithms", "fedavgg"), "did you mean 'fedavg'"),
        (("resume", "nothing"), "is no run folder"),
        (("report", "nothing"), "there is no run to report on"),
        (("list", "things"), "there are algorithms, presets, datasets"),
        (("predict", "nothing", "x.npy"), "is no run folder"),
        (("export", "nothing", "m.safetensors"), "no trained model"),
        (("convex", "a1aa"), "a1a"),
    ],
)
def test_mistakes_get_one_clear_message(dqnfed, words: Sequence[str], told: str) -> None:  # type: ignore[no-untyped-def]
    ended = dqnfed(*words)
    assert ended.code != 0
    assert told in ended.err.replace("\n", " "), ended.err
    assert "Traceback" not in ended.err
