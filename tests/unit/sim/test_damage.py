"""Damaged, cut and missing files of a run: each is named, and the run ends with the same bits or not at all."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed import FedAvg, run
from dqnfed.algorithms.scaffold import Scaffold
from dqnfed.core.checksums import damaged_files
from dqnfed.core.numerics import NUMERICS
from dqnfed.core.result import RunResult
from dqnfed.core.run_folder import command_line
from tests.helpers.bowls import federation_of, labelled_clients, network_bowl
from tests.helpers.folders import contents, newest_checkpoint

ROUNDS = 6
PROBLEM, FEDERATION, _ = network_bowl(n_clients=4)


class PowerCutError(RuntimeError):
    pass


class PowerCut:
    """An observer that ends the run after a round, before that round is in a checkpoint."""

    def __init__(self, after: int) -> None:
        self._after = after

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        """Nothing."""

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self._after:
            raise PowerCutError

    def end(self, summary: Mapping[str, Any]) -> None:
        """Nothing."""


def played(out: Path, **more: Any) -> Any:
    return run(Scaffold(lr=0.3), PROBLEM, FEDERATION, rounds=ROUNDS, out=out, checkpoint_seconds=0.0, **more)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    played(out)
    return out


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in round 4: checkpoints after 3 and 4 rounds, lines of 5."""
    out = tmp_path_factory.mktemp("cut") / "run"
    with pytest.raises(PowerCutError):
        played(out, observers=[PowerCut(4)])
    assert sorted(path.name for path in (out / "checkpoint").iterdir()) == [
        "checkpoint-3.json", "checkpoint-4.json", "state-3.safetensors", "state-4.safetensors"
    ]  # fmt: skip
    return out


def files_of(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("*") if path.is_file() and path.name != ".lock")


def is_forgotten(out: Path, path: Path, place: int) -> bool:
    """Return whether a byte is of a line after the last checkpoint, which is not used."""
    lines = newest_checkpoint(out)["lines"]
    return path.name in lines and place >= lines[path.name][0]


def outcome(out: Path, straight: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return what was said when the run went on; if it did, it ended as the undisturbed one."""
    caplog.clear()
    try:
        played(out, resume=True)
    except ValueError as refusal:
        return str(refusal)
    assert contents(out) == contents(straight)
    assert damaged_files(out) == []
    return caplog.text


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(s, marks=pytest.mark.slow) for s in range(25, 100))])
def test_a_flipped_bit_is_named_or_harmless(
    seed: int, cut: Path, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred bits, in every file of the folder in turn."""
    out = tmp_path / "run"
    shutil.copytree(cut, out)
    chance, files = random.Random(seed), files_of(out)
    path = files[seed % len(files)]
    raw = bytearray(path.read_bytes())
    place = chance.randrange(len(raw))
    harmless = is_forgotten(out, path, place)
    raw[place] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    said = outcome(out, straight, caplog)
    assert harmless or f"damaged: {path.relative_to(out)}, checksum differs" in said


@pytest.mark.parametrize("left", [0.0, 0.5, None])
def test_a_cut_or_missing_file_is_named(
    left: float | None, cut: Path, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, path in enumerate(files_of(cut)):
        out = tmp_path / str(i)
        shutil.copytree(cut, out)
        mine = out / path.relative_to(cut)
        if left is None:
            mine.unlink()
        else:
            mine.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
        said = outcome(out, straight, caplog)
        # without its JSON file a checkpoint is not known to have been there, and without a list nothing is listed
        is_known = left is not None or path.name not in ("checkpoint-3.json", "checkpoint-4.json", "checksums.json")
        assert not is_known or f"damaged: {path.relative_to(cut)}, checksum differs" in said, path.name


def test_the_newest_intact_checkpoint_is_used(
    cut: Path, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(cut, out)
    (out / "checkpoint" / "state-4.safetensors").write_bytes(b"")
    said = outcome(out, straight, caplog)
    assert "damaged: checkpoint/state-4.safetensors, checksum differs" in said
    assert "going on from the newest intact checkpoint, after 3 rounds" in said


def test_without_an_intact_checkpoint_every_damaged_file_is_named(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(cut, out)
    before = {path: path.read_bytes() for path in files_of(out)}
    for number in (3, 4):
        (out / "checkpoint" / f"state-{number}.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no intact checkpoint: .*state-4\.safetensors, .*state-3\.safetensors"):
        played(out, resume=True)
    kept = {path: path.read_bytes() for path in files_of(out)}
    assert {path for path in before if before[path] != kept[path]} == {
        out / "checkpoint" / f"state-{number}.safetensors" for number in (3, 4)
    }


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "metrics.jsonl", "config.toml"])
def test_a_finished_run_that_is_damaged_is_not_read(name: str, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / name).write_bytes(raw)
    with pytest.raises(ValueError, match=f"cannot be used: damaged: {name}, checksum differs"):
        RunResult.load(out)


def test_other_data_are_refused_and_what_differs_is_said(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(cut, out)
    before = {path: path.read_bytes() for path in files_of(out)}
    other = federation_of([(x * 1.001, y) for x, y in labelled_clients(4, 4)])
    with pytest.raises(ValueError, match="other data and cannot go on with these, which differ in: training inputs"):
        run(Scaffold(lr=0.3), PROBLEM, other, rounds=ROUNDS, out=out, resume=True)
    assert before == {path: path.read_bytes() for path in files_of(out)}


def test_other_numerics_are_refused(cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    shutil.copytree(cut, out)
    monkeypatch.setattr("dqnfed.sim.setup.NUMERICS", NUMERICS + 1)
    with pytest.raises(ValueError, match=f"with NUMERICS {NUMERICS} and cannot go on with {NUMERICS + 1}"):
        played(out, resume=True)


def test_a_fingerprint_is_of_every_part_and_every_name() -> None:
    first = federation_of(labelled_clients(4, 4))
    assert first.fingerprint == federation_of(labelled_clients(4, 4)).fingerprint
    moved = torch.roll(first.train.targets, 1)
    changed = type(first)(first.train._replace(targets=moved), first.test, n_classes=first.n_classes)
    differs = {part for part in first.fingerprint if first.fingerprint[part] != changed.fingerprint[part]}
    assert differs == {"training targets"}


@pytest.mark.parametrize("resumes", [False, True])
def test_a_finished_run_is_never_overwritten(resumes: bool, tmp_path: Path) -> None:
    run(FedAvg(), PROBLEM, FEDERATION, rounds=2, out=tmp_path)
    before = contents(tmp_path)
    if resumes:
        run(FedAvg(), PROBLEM, FEDERATION, rounds=2, out=tmp_path, resume=True)
    else:
        with pytest.raises(FileExistsError, match="already holds a run, which is not overwritten"):
            run(FedAvg(lr=0.9), PROBLEM, FEDERATION, rounds=1, out=tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["/usr/bin/dqnfed", "sweep", "digits", "--storage", "mysql://me:se@cret@host/db"], "--storage mysql://***@host/db"),
        (["dqnfed", "--storage=postgresql+psycopg://u:secret@h/d?x=1"], "--storage=postgresql+psycopg://***@h/d?x=1"),
        (["dqnfed", "--password", "secret", "run"], "dqnfed --password *** run"),
        (["dqnfed", "--api-key=secret", "run"], "dqnfed --api-key=*** run"),
        (["dqnfed", "--set", "track.token=secret"], "dqnfed --set track.token=***"),
        (["dqnfed", "x", "https://h/p?a=1&password=secret&b=2"], "dqnfed x https://h/p?a=1&password=***&b=2"),
        (["dqnfed", "run", "digits", "--seed", "3"], "dqnfed run digits --seed 3"),
    ],
)  # fmt: skip
def test_no_password_is_kept(words: list[str], kept: str) -> None:
    found = command_line(words)
    assert kept in found
    assert "secret" not in found
    assert "cret" not in found
