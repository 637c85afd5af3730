"""Every method by name; `REGISTRY` is the one list that the CLI, the docs and the contract tests read."""

from __future__ import annotations

from importlib.metadata import entry_points

from dqnfed.algorithms.ditto import Ditto
from dqnfed.algorithms.fedadam import FedAdam
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedprox import FedProx
from dqnfed.algorithms.scaffold import Scaffold
from dqnfed.core.algorithm import AnyAlgorithm

REGISTRY: dict[str, type[AnyAlgorithm]] = {
    "fedavg": FedAvg,
    "ditto": Ditto,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedadam": FedAdam,
}

for _entry in entry_points(group="dqnfed.algorithms"):  # third parties register theirs here
    REGISTRY.setdefault(_entry.name, _entry.load())
