"""A run that went wrong on Flower: called so in the log and in its folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dqnfed import FedAvg
from tests.helpers.bowls import quadratic_bowl
from tests.helpers.flower import deployed


def test_a_diverged_run_is_called_so_on_flower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = quadratic_bowl(3, 4)
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = deployed(FedAvg(lr=30.0, epochs=3), case, rounds=4, out=tmp_path)
    assert result.summary["status"] == "diverged"
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "diverged"
    said = [record for record in caplog.records if "dqnfed: diverged after 4 rounds" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
