"""Secure aggregation from a config: what the server and the nodes must be given, and the command that makes keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.experiments.config import Config, ConfigError, read_config
from dqnfed.experiments.deploy import deployed_client, deployed_strategy
from dqnfed.experiments.experiment import build_problem
from dqnfed.secure.keys import write_private_key


def config_with(roster: list[str]) -> Config:
    return read_config("bowls", ["data.clients=4", "privacy.secure=true", f"privacy.roster={roster}"])


def test_the_server_needs_the_key_of_every_client() -> None:
    config = config_with(["00", "11"])
    with pytest.raises(ConfigError, match=r"it has 2 for 4 clients"):
        deployed_strategy(config, build_problem(config).problem, {"clients": 4})


def test_a_node_needs_its_own_key_file(tmp_path: Path) -> None:
    keys = [tmp_path / f"client{k}.pad" for k in range(4)]
    config = config_with([write_private_key(file) for file in keys])
    built = build_problem(config)
    with pytest.raises(ConfigError, match="pad-key"):
        deployed_client(config, built.problem, built.federation.only(2))
    client = deployed_client(config, built.problem, built.federation.only(2), {"pad-key": str(keys[2])})
    assert client.secure is not None
    client.secure.check(2)
    with pytest.raises(ValueError, match="does not name the key of client 1"):
        client.secure.check(1)


def test_the_command_prints_the_public_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "client0.pad"
    done = CliRunner().invoke(app, ["deploy", "pad-key", str(file)])
    assert done.exit_code == 0
    public = done.stdout.strip()
    assert len(bytes.fromhex(public)) == 32
    assert public != file.read_text(encoding="utf-8").strip()
    assert file.read_text(encoding="utf-8").strip() not in done.stdout
