"""The files of a run: exact when read back, and safe against a kill or a full disk at any moment."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dqnfed.core.run_folder import (
    CLIENT_COLUMNS,
    SAFETENSORS_TYPES,
    RunFolder,
    claimed,
    clear_disk_errors,
    json_text,
    load_tensors,
    save_tensors,
    toml_text,
    write_atomically,
)

BEGUN: list[RunFolder] = []


@pytest.fixture(autouse=True)
def _closed_again() -> Iterator[None]:
    yield
    while BEGUN:
        BEGUN.pop().close()


def begun(path: Path, n_rounds: int = 0) -> RunFolder:
    folder = RunFolder(path)
    BEGUN.append(folder)
    folder.begin({"name": "test", "run": {"seed": 3}}, [{"client": 0}], {"python": "3"}, CLIENT_COLUMNS)
    for round in range(n_rounds):
        rows = [(round, c, 10, 0.5, None, 0.1 + 0.2 * c) for c in range(3)]
        folder.append({"round": round, "loss": 1 / 3}, rows)
    return folder


CONFIGS: list[dict[str, Any]] = [
    {},
    {"name": "digits", "train": {"rounds": 10, "lr": 0.1, "batch_size": 32}, "run": {"seed": 0}},
    {"floats": {"a": 1e-7, "b": 1e22, "c": -0.0, "d": math.inf, "e": -math.inf, "f": 1 / 3, "g": 5.0}},
    {"text": {"quotes": 'a "b" \\ c', "lines": "x\ny\t", "far": "héllo ∇ 😀", "control": "\x00\x1f\x7f"}},
    {"keys": {"a.b": 1, "é": 2, "": 3, "with space": 4, "dash-ed_1": 5}, "top key": 1, "top.block": {"x": 1}},
    {"lists": {"empty": [], "numbers": [1, 2.5], "nested": [[1], [2, 3]], "tuple": (1, 2)}},
    {"deep": {"er": {"still": {"x": 1}, "y": True}, "empty": {}}, "flag": False},
]


def plain(value: Any) -> Any:
    """Return the value as a reader sees it: tuples are lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("config", CONFIGS)
def test_toml_reads_back(config: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(config)) == plain(config)


def test_toml_leaves_out_what_is_none_and_takes_numpy_floats() -> None:
    assert tomllib.loads(toml_text({"a": None, "b": {"c": None, "d": np.float64(0.1)}})) == {"b": {"d": 0.1}}


def test_toml_refuses_what_it_cannot_write() -> None:
    with pytest.raises(TypeError, match="a number, text, truth value or list"):
        toml_text({"data": {"path": object()}})


def test_json_is_strict() -> None:
    text = json_text({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_lines_and_rows_read_back_exactly(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", n_rounds=2)
    assert folder.metrics() == [{"round": 0, "loss": 1 / 3}, {"round": 1, "loss": 1 / 3}]
    columns, rows = folder.client_table()
    assert columns == CLIENT_COLUMNS
    assert rows == [(r, c, 10, 0.5, None, 0.1 + 0.2 * c) for r in range(2) for c in range(3)]
    assert folder.config() == {"name": "test", "run": {"seed": 3}}


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.append({"round": 0, "train_loss": {"mean": math.nan, "max": math.inf}}, [])
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"round": 0, "train_loss": {"mean": None, "max": None}}


@pytest.mark.parametrize("half", ['{"round": 2, "lo', '{"round": 2, "diagnostics": {}', '{"round": 2}'])
def test_a_half_written_line_is_not_there(tmp_path: Path, half: str) -> None:
    """The last one lacks only its newline: kept, it would run into the next line."""
    folder = begun(tmp_path, n_rounds=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert [record["round"] for record in folder.metrics()] == [0, 1]
    folder.cut_back(3)
    folder.append({"round": 2}, [])
    assert [json.loads(line)["round"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("half", ["2,0,10,0.5,,0.", "2,0,10,0.5,,0.1", "2", "1"])
def test_a_half_written_row_is_not_there(tmp_path: Path, half: str) -> None:
    folder = begun(tmp_path, n_rounds=2)
    before = (tmp_path / "clients.csv").read_text()
    with (tmp_path / "clients.csv").open("a") as file:
        file.write(half)
    assert len(folder.client_table()[1]) == 6
    folder.cut_back(2)
    assert (tmp_path / "clients.csv").read_text() == before


def test_cutting_back_forgets_later_rounds_and_the_summary(tmp_path: Path) -> None:
    folder = begun(tmp_path, n_rounds=5)
    folder.finish({"status": "interrupted"})
    folder.cut_back(3)
    assert [record["round"] for record in folder.metrics()] == [0, 1, 2]
    assert {row[0] for row in folder.client_table()[1]} == {0, 1, 2}
    assert folder.summary() is None


def test_a_new_run_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """An old checkpoint would otherwise be taken for the new run's when that is killed early and resumed."""
    folder = begun(tmp_path, n_rounds=3)
    folder.write_model({"weight": torch.ones(2)}, {})
    folder.finish({"status": "finished"})
    for name in ("checkpoint-3.json", "state-3.safetensors", "state-2.safetensors.new"):
        (tmp_path / "checkpoint" / name).write_text("old")
    begun(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"config.toml", "clients.json", "env.json", "metrics.jsonl", "clients.csv", "checksums.json"}
    assert folder.metrics() == []


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no config\.toml"):
        RunFolder(tmp_path).config()


def test_tensor_files_are_safetensors_of_every_type(tmp_path: Path) -> None:
    """Read back by the library that defines the format."""
    named = {str(dtype): torch.arange(-3, 4).to(dtype) for dtype in SAFETENSORS_TYPES}
    named |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(3, 0), "matrix": torch.rand(3, 5).T}
    named |= {"view": torch.arange(10.0)[2:5], "expanded": torch.tensor([1.0, 2.0]).expand(3, 2)}
    path = tmp_path / "all.safetensors"
    save_tensors(path, named, {"note": "é", "n": 3})
    found, metadata = load_tensors(path)
    assert metadata == {"note": "é", "n": 3}
    for read in (found, load_file(path)):
        assert read.keys() == named.keys()
        assert all(torch.equal(read[name], named[name]) and read[name].dtype == named[name].dtype for name in named)


def test_tensor_files_are_a_function_of_their_contents(tmp_path: Path) -> None:
    named = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int8)}
    save_tensors(tmp_path / "one", named, {})
    save_tensors(tmp_path / "two", dict(reversed(named.items())), {})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_tensor_files_have_the_permissions_of_other_files(tmp_path: Path) -> None:
    save_tensors(tmp_path / "tensors", {"a": torch.ones(3)}, {})
    (tmp_path / "plain").write_text("x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("tensors", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("kind", ["text", "tensors"])
def test_a_failed_write_leaves_the_old_file_and_no_scratch(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"

    def write(value: int) -> None:
        if kind == "text":
            write_atomically(path, str(value))
        else:
            save_tensors(path, {"a": torch.tensor(value)}, {})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(1)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_says_what_is_safe_and_what_to_do(tmp_path: Path) -> None:
    """/dev/full is the kernel's own full disk."""
    folder = begun(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*checkpoint in it is intact.*`dqnfed resume") as caught:
        folder.append({"round": 0}, [])
    assert caught.value.errno == errno.ENOSPC


def test_a_line_that_the_disk_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Grudging(FileIO):
        def write(self, text: Any) -> int:
            return super().write(text[:5])

    folder = begun(tmp_path)
    monkeypatch.setattr("dqnfed.core.run_folder.FileIO", Grudging)
    folder.append({"round": 0, "loss": 1 / 3}, [(0, 0, 10, 0.5, None, 0.1)])
    assert folder.metrics() == [{"round": 0, "loss": 1 / 3}]
    assert folder.client_table()[1] == [(0, 0, 10, 0.5, None, 0.1)]


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), clear_disk_errors(tmp_path):
        (tmp_path).write_text("x")


def test_no_room_for_the_next_checkpoint_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    """A process that may not write files above 20 kB plays on until it must save; its folder can then be resumed."""
    program = textwrap.dedent(
        """
        import resource, sys
        import torch
        from dqnfed import FedAvg, run
        from dqnfed.sim import checkpoint
        from tests.helpers.bowls import network_bowl

        case = network_bowl()
        go = lambda rounds, **more: run(FedAvg(), case.problem, case.federation, rounds=rounds, out=sys.argv[1], **more)
        go(3)
        whole = checkpoint.named_tensors
        checkpoint.named_tensors = lambda *a: whole(*a) | {"ballast": torch.zeros(10_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        try:
            go(5, resume=True)
        except OSError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoint.named_tensors = whole
        print(sorted(p.name for p in (__import__("pathlib").Path(sys.argv[1]) / "checkpoint").iterdir()))
        print(go(5, resume=True).summary["rounds"])
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    error, files, rounds = done.stdout.splitlines()
    assert "The last checkpoint in it is intact" in error
    assert files == "['checkpoint-3.json', 'state-3.safetensors']"
    assert rounds == "5"


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """A run that was thought dead and is resumed while it lives would write every round twice."""
    folder = tmp_path / "run"
    program = "import sys\nfrom pathlib import Path\nfrom dqnfed.core.run_folder import claimed\n"
    program += "with claimed(Path(sys.argv[1])):\n    print('mine', flush=True)\n    sys.stdin.read()\n"
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(RuntimeError, match=f"process {other.pid} is still running in"), claimed(folder):
            pytest.fail("the folder was claimed twice")
        other.kill()
        other.wait()
        with claimed(folder):
            assert (folder / ".lock").read_text() == f"{os.getpid()}\n"


def test_what_is_read_lies_as_what_is_computed(tmp_path: Path) -> None:
    """On some processors a sum's last bits depend on where its numbers lie; a resumed run is to have the same."""
    odd = {"a": torch.arange(3), "b": torch.randn(5, dtype=torch.float64), "c": torch.randn(7)}
    save_tensors(tmp_path / "odd.safetensors", odd, {})
    read, _ = load_tensors(tmp_path / "odd.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in odd.items())
    assert {tensor.data_ptr() % 64 for tensor in read.values()} == {0}
