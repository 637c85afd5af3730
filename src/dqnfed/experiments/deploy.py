"""From a config to the two sides of a deployment on Flower."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import RunFolder
from dqnfed.experiments.config import Config, ConfigError, read_config
from dqnfed.experiments.experiment import build_algorithm
from dqnfed.experiments.machine import chosen_device
from dqnfed.experiments.private import privacy_of
from dqnfed.flower.client import Client
from dqnfed.secure.keys import Identity

if TYPE_CHECKING:
    from dqnfed.flower.strategy import Strategy


def app_config(file: Path, run_config: Mapping[str, Any]) -> Config:
    """Return the experiment of an app's TOML file with the changes of Flower's run config."""
    named = {"algorithm": "algorithm.name", "rounds": "train.rounds", "seed": "run.seed", "clients": "data.clients"}
    changes = [f"{key}={_toml(run_config[name])}" for name, key in named.items() if name in run_config]
    changes += [change.strip() for change in str(run_config.get("set", "")).split(";") if change.strip()]
    return read_config(str(file), changes)


def deployed_client(
    config: Config, problem: Problem, data: Federation, node_config: Mapping[str, Any] | None = None
) -> Client:
    """Return what one client brings, on its device; with `privacy.secure` its node's config names its key file."""
    _use_threads(config)
    device = chosen_device(config.run.device)
    privacy = privacy_of(config)
    identity = pad_identity(config, node_config or {}) if config.privacy.secure else None
    sums_only = config.privacy.secure and config.eval.metrics == "aggregate-only"
    return Client(build_algorithm(config), problem.to(device), data.to(device), privacy, identity, sums_only)


def deployed_strategy(
    config: Config, problem: Problem, run_config: Mapping[str, Any], files: Mapping[str, str] | None = None
) -> Strategy:
    """Return the server's strategy; `clients`, `out`, `resume` and `wait` come from Flower's run config.

    `files` are further texts for the run folder.
    """
    from dqnfed.core.screening import Policy
    from dqnfed.experiments.participants import refuse_simulated, sampling_of
    from dqnfed.flower.strategy import Strategy  # here: a client's process does not need the server's side
    from dqnfed.sim.state import Evaluation

    _use_threads(config)
    refuse_simulated(config)
    if config.privacy.secure and len(config.privacy.roster) != int(run_config["clients"]):
        raise ConfigError(
            f"`privacy.secure` needs the public key of every client in `privacy.roster`, but it has "
            f"{len(config.privacy.roster)} for {run_config['clients']} clients; `dqnfed deploy pad-key` makes keys."
        )
    out, resume = str(run_config.get("out", "")), bool(run_config.get("resume", False))
    return Strategy(
        build_algorithm(config),
        problem.to(chosen_device(config.run.device)),
        n_clients=int(run_config["clients"]),
        participation=config.train.participation,
        sampling=sampling_of(config),
        seed=config.run.seed,
        files=files,
        evaluation=Evaluation(**config.eval.model_dump(exclude={"score"})),
        policy=Policy(**config.policy.model_dump()),
        out=free_folder(Path(out), resume=resume) if out else None,
        resume=resume,
        wait=float(run_config.get("wait", 600.0)),
        config=config.as_dict(),
        secure=config.privacy.secure,
        privacy=privacy_of(config),
    )


def free_folder(out: Path, *, resume: bool) -> Path:
    """Return `out`, or out-2, out-3, ...: the first without a run, or with one that may go on; none is overwritten."""
    for number in count(1):
        folder = out if number == 1 else out.with_name(f"{out.name}-{number}")
        if not (folder / "config.toml").is_file() or (resume and not RunFolder(folder).is_over()):
            return folder
    raise AssertionError


def pad_identity(config: Config, node_config: Mapping[str, Any]) -> Identity:
    """Return the client's key for secure aggregation and the roster of all keys."""
    file = node_config.get("pad-key")
    if not file:
        raise ConfigError(
            "`privacy.secure` needs this node's key: start it with --node-config 'pad-key=\"FILE\"', a file that "
            "`dqnfed deploy pad-key FILE` wrote, and give `deployed_client` the context's node config."
        )
    return Identity.read(Path(str(file)), config.privacy.roster)


def _use_threads(config: Config) -> None:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
