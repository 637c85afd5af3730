"""CIFAR-10 with a hundred clients fits in 1.5 GB: images stay bytes, and only who has taken part has a memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.data import real_data

LIMIT = 1.5e9  # bytes
ROUNDS = 60  # 10 of 100 clients each: on average 99.8 of them have taken part, and nothing grows from then on

# From a process between: the system counts the memory of who starts a process as that process's own.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.name=fedavg"],
        ["algorithm.name=dqn-fed", "algorithm.memory=1", "algorithm.batch_size=full"],
    ],
    ids=["fedavg", "dqn-fed"],
)
def test_a_run_stays_below_the_limit(settings: list[str], tmp_path: Path) -> None:
    folder = real_data("cifar10")
    changes = [*settings, f"train.rounds={ROUNDS}", "run.threads=2", "run.device=cpu"]
    words = ["run", "cifar10-setup1", "--data-dir", str(folder.parent), "--out", str(tmp_path / "run"), "-q"]
    words += [word for change in changes for word in ("--set", change)]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURED, sys.executable, "-m", "dqnfed.cli", *words], capture_output=True, text=True
    )
    code, most = map(int, measured.stdout.split())
    assert code == 0, measured.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({client for record in records for client in record["clients"]}) >= 98
    unit = 1 if sys.platform == "darwin" else 1024
    assert most * unit < LIMIT
