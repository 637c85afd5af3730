"""Fair and fast federated learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dqnfed.algorithms.dqn_fed import DQNFed as DQNFed
    from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral as DQNFedLiteral
    from dqnfed.algorithms.fedavg import FedAvg as FedAvg
    from dqnfed.algorithms.server_lbfgs import ServerLBFGS as ServerLBFGS
    from dqnfed.core.federation import Federation as Federation
    from dqnfed.core.problem import Problem as Problem
    from dqnfed.core.result import RunResult as RunResult
    from dqnfed.core.screening import Policy as Policy
    from dqnfed.sim.cohort import looped as looped
    from dqnfed.sim.cohort import vectorised as vectorised
    from dqnfed.sim.engine import run as run
    from dqnfed.sim.state import Evaluation as Evaluation

# Importing torch takes a second or more; `dqnfed --help` must not wait for it, so names are looked up when used.
_HOMES = {
    "DQNFed": "dqnfed.algorithms.dqn_fed",
    "DQNFedLiteral": "dqnfed.algorithms.dqn_fed_literal",
    "Evaluation": "dqnfed.sim.state",
    "FedAvg": "dqnfed.algorithms.fedavg",
    "Federation": "dqnfed.core.federation",
    "Policy": "dqnfed.core.screening",
    "Problem": "dqnfed.core.problem",
    "RunResult": "dqnfed.core.result",
    "ServerLBFGS": "dqnfed.algorithms.server_lbfgs",
    "looped": "dqnfed.sim.cohort",
    "run": "dqnfed.sim.engine",
    "vectorised": "dqnfed.sim.cohort",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dqnfed' has no attribute '{name}'")
    if name == "RunResult":
        importlib.import_module("dqnfed.models")  # so that a loaded run can build its module
    return getattr(importlib.import_module(_HOMES[name]), name)
