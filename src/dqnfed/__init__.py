"""Fair and fast federated learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dqnfed.algorithms.adafed import AdaFed as AdaFed
    from dqnfed.algorithms.afl import AFL as AFL
    from dqnfed.algorithms.agnostic_fair import AgnosticFair as AgnosticFair
    from dqnfed.algorithms.ditto import Ditto as Ditto
    from dqnfed.algorithms.dqn_fed import DQNFed as DQNFed
    from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral as DQNFedLiteral
    from dqnfed.algorithms.fcfl import FCFL as FCFL
    from dqnfed.algorithms.fedadam import FedAdam as FedAdam
    from dqnfed.algorithms.fedavg import FedAvg as FedAvg
    from dqnfed.algorithms.fedavgm import FedAvgM as FedAvgM
    from dqnfed.algorithms.fedexp import FedExP as FedExP
    from dqnfed.algorithms.fedfa import FedFa as FedFa
    from dqnfed.algorithms.fedfv import FedFV as FedFV
    from dqnfed.algorithms.fedheal import FedHEAL as FedHEAL
    from dqnfed.algorithms.fedlf import FedLF as FedLF
    from dqnfed.algorithms.fedmgda_plus import FedMGDAPlus as FedMGDAPlus
    from dqnfed.algorithms.fedprox import FedProx as FedProx
    from dqnfed.algorithms.fedvarp import FedVARP as FedVARP
    from dqnfed.algorithms.mgda import MGDA as MGDA
    from dqnfed.algorithms.qffl import QFFL as QFFL
    from dqnfed.algorithms.scaffold import Scaffold as Scaffold
    from dqnfed.algorithms.server_lbfgs import ServerLBFGS as ServerLBFGS
    from dqnfed.algorithms.term import TERM as TERM
    from dqnfed.core.federation import Federation as Federation
    from dqnfed.core.problem import Problem as Problem
    from dqnfed.core.result import RunResult as RunResult
    from dqnfed.core.runners import looped as looped
    from dqnfed.core.runners import vectorised as vectorised
    from dqnfed.core.screening import Policy as Policy
    from dqnfed.sim.accelerate import threads as threads
    from dqnfed.sim.engine import run as run
    from dqnfed.sim.sampling import Sampling as Sampling
    from dqnfed.sim.state import Evaluation as Evaluation

# Importing torch takes a second or more; `dqnfed --help` must not wait for it, so names are looked up when used.
_HOMES = {
    "AFL": "dqnfed.algorithms.afl",
    "AdaFed": "dqnfed.algorithms.adafed",
    "AgnosticFair": "dqnfed.algorithms.agnostic_fair",
    "DQNFed": "dqnfed.algorithms.dqn_fed",
    "DQNFedLiteral": "dqnfed.algorithms.dqn_fed_literal",
    "Ditto": "dqnfed.algorithms.ditto",
    "Evaluation": "dqnfed.sim.state",
    "FCFL": "dqnfed.algorithms.fcfl",
    "FedAdam": "dqnfed.algorithms.fedadam",
    "FedAvg": "dqnfed.algorithms.fedavg",
    "FedAvgM": "dqnfed.algorithms.fedavgm",
    "FedExP": "dqnfed.algorithms.fedexp",
    "FedFV": "dqnfed.algorithms.fedfv",
    "FedFa": "dqnfed.algorithms.fedfa",
    "FedHEAL": "dqnfed.algorithms.fedheal",
    "FedLF": "dqnfed.algorithms.fedlf",
    "FedMGDAPlus": "dqnfed.algorithms.fedmgda_plus",
    "FedProx": "dqnfed.algorithms.fedprox",
    "FedVARP": "dqnfed.algorithms.fedvarp",
    "Federation": "dqnfed.core.federation",
    "MGDA": "dqnfed.algorithms.mgda",
    "Policy": "dqnfed.core.screening",
    "Problem": "dqnfed.core.problem",
    "QFFL": "dqnfed.algorithms.qffl",
    "RunResult": "dqnfed.core.result",
    "Sampling": "dqnfed.sim.sampling",
    "Scaffold": "dqnfed.algorithms.scaffold",
    "ServerLBFGS": "dqnfed.algorithms.server_lbfgs",
    "TERM": "dqnfed.algorithms.term",
    "looped": "dqnfed.core.runners",
    "run": "dqnfed.sim.engine",
    "threads": "dqnfed.sim.accelerate",
    "vectorised": "dqnfed.core.runners",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dqnfed' has no attribute '{name}'")
    if name == "RunResult":
        importlib.import_module("dqnfed.models")  # so that a loaded run can build its module
    return getattr(importlib.import_module(_HOMES[name]), name)
