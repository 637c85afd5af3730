"""The package works without `dqnfed.accel`, and one module alone chooses from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dqnfed import FedAvg, run
from dqnfed.core.run_folder import RunFolder
from dqnfed.sim.accelerate import Plain, acceleration
from tests.helpers.bowls import network_bowl
from tests.helpers.repository import ROOT, SOURCE

PROGRAM = """
import json, sys, torch
from dqnfed import FedAvg, run, threads, vectorised, looped
from dqnfed.sim.accelerate import automatic, graphed, with_features
from tests.helpers.bowls import network_bowl

case, method = network_bowl(), FedAvg(lr=0.1, batch_size=3, epochs=2, momentum=0.5)
refusals = []
for choose in (threads, graphed):
    try:
        choose()
    except ValueError as refusal:
        refusals.append(str(refusal))
runner = automatic(method, case.problem, case.federation)
found = [run(method, case.problem, case.federation, rounds=5, cohort=c).theta.tolist() for c in (runner, looped())]
same = with_features(case.problem, case.federation) == (case.problem, case.federation)
loaded = sorted(name for name in sys.modules if name.startswith("dqnfed.accel"))
print(json.dumps({"thetas": found, "refusals": refusals, "same": same, "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package from which the faster forms were deleted."""
    place = tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE, place / "dqnfed", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(place / "dqnfed" / "accel")
    return place


def test_a_run_without_the_package_has_the_same_results(without: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(without), str(ROOT)])}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, cwd=without
    ).stdout
    found = json.loads(output.splitlines()[-1])
    case = network_bowl()
    method = FedAvg(lr=0.1, batch_size=3, epochs=2, momentum=0.5)
    expected = run(method, case.problem, case.federation, rounds=5).theta
    for theta in found["thetas"]:
        torch.testing.assert_close(torch.tensor(theta, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12)
    assert len(found["refusals"]) == 2
    assert all("dqnfed.accel, which is not installed" in refusal for refusal in found["refusals"])
    assert found["same"]
    assert found["loaded"] == []


@pytest.mark.slow
def test_the_command_line_without_the_package_writes_the_same_metrics(without: Path, tmp_path: Path) -> None:
    """`dqnfed run digits`, in double precision: every number of every round."""
    command = [sys.executable, "-m", "dqnfed", "run", "digits", "--rounds", "20", "--set", "run.dtype=float64"]
    for name, package in (("without", without), ("with", SOURCE.parent)):
        environment = {**os.environ, "PYTHONPATH": str(package)}
        subprocess.run(
            [*command, "--out", str(tmp_path / name)], capture_output=True, check=True, env=environment, cwd=tmp_path
        )
    found, expected = (RunFolder(tmp_path / name).metrics() for name in ("without", "with"))
    assert len(found) == len(expected) == 21
    for mine, other in zip(found, expected, strict=True):
        for key in ("clients", "status", "bytes_up", "passes"):
            assert mine.get(key) == other.get(key)
        for key in ("rho", "loss_before", "loss_after", "train_loss", "accuracy"):
            assert mine[key] == (None if other[key] is None else pytest.approx(other[key], rel=1e-9))


def test_one_module_alone_names_the_package() -> None:
    outside = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "accel"]
    named = [path.relative_to(SOURCE).as_posix() for path in outside if "dqnfed.accel" in path.read_text("utf-8")]
    assert named == ["sim/accelerate.py"]


def test_the_package_does_not_import_what_is_above_it() -> None:
    above = re.compile(r"dqnfed\.(sim|flower|experiments|cli|report|algorithms|data)\b")
    for path in sorted((SOURCE / "accel").glob("*.py")):
        imports = [line for line in path.read_text("utf-8").splitlines() if re.match(r"\s*(from|import)\s", line)]
        assert [line for line in imports if above.search(line)] == [], path.name


def test_acceleration_can_be_switched_off() -> None:
    assert isinstance(acceleration(enabled=False), Plain)
    assert not isinstance(acceleration(), Plain)
