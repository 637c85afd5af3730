"""Every method by name; `REGISTRY` is the one list that the CLI, the docs and the contract tests read."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from dqnfed.algorithms.aaggff import AAggFF
from dqnfed.algorithms.adafed import AdaFed
from dqnfed.algorithms.afl import AFL
from dqnfed.algorithms.agnostic_fair import AgnosticFair
from dqnfed.algorithms.disco import DiSCO
from dqnfed.algorithms.distributed_newton import DistributedNewton
from dqnfed.algorithms.ditto import Ditto
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral
from dqnfed.algorithms.drfl import DRFL
from dqnfed.algorithms.eagle import Eagle
from dqnfed.algorithms.fairmoo import FairMOO
from dqnfed.algorithms.fcfl import FCFL
from dqnfed.algorithms.fedadam import FedAdam
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedavgm import FedAvgM
from dqnfed.algorithms.fedbn import FedBN
from dqnfed.algorithms.fedce import FedCE
from dqnfed.algorithms.fedcorr import FedCorr, fedcorr_with
from dqnfed.algorithms.feddg_ga import FedDGGA
from dqnfed.algorithms.feddyn import FedDyn
from dqnfed.algorithms.fedeba_plus import FedEBAPlus
from dqnfed.algorithms.fedexp import FedExP
from dqnfed.algorithms.fedfa import FedFa
from dqnfed.algorithms.fedfv import FedFV
from dqnfed.algorithms.fedgini import FedGini
from dqnfed.algorithms.fedheal import FedHEAL
from dqnfed.algorithms.fedism import FedISM
from dqnfed.algorithms.fedlf import FedLF
from dqnfed.algorithms.fedmdfg import FedMDFG
from dqnfed.algorithms.fedmgda_plus import FedMGDAPlus
from dqnfed.algorithms.fednew import FedNew
from dqnfed.algorithms.fednew_cg import FedNewCG
from dqnfed.algorithms.fednl import FedNL
from dqnfed.algorithms.fednl_cr import FedNLCR
from dqnfed.algorithms.fednl_diag import FedNLDiag
from dqnfed.algorithms.fednl_head import FedNLHead
from dqnfed.algorithms.fednl_ls import FedNLLS
from dqnfed.algorithms.fednl_pp import FedNLPP
from dqnfed.algorithms.fedns import FedNS
from dqnfed.algorithms.fedns_ggn import FedNSGGN
from dqnfed.algorithms.fedprox import FedProx
from dqnfed.algorithms.fedpw import FedPW
from dqnfed.algorithms.fedrep import FedRep
from dqnfed.algorithms.fedvarp import FedVARP
from dqnfed.algorithms.fedyogi import FedYogi
from dqnfed.algorithms.giant import GIANT
from dqnfed.algorithms.gifair import GIFAIR
from dqnfed.algorithms.jacobian_descent import JD_METHODS
from dqnfed.algorithms.local_newton import LocalNewton
from dqnfed.algorithms.local_only import LocalOnly
from dqnfed.algorithms.mgda import MGDA
from dqnfed.algorithms.mifa import MIFA
from dqnfed.algorithms.newton import Newton
from dqnfed.algorithms.pooled import Pooled
from dqnfed.algorithms.propfair import PropFair
from dqnfed.algorithms.q_fednew import QFedNew
from dqnfed.algorithms.qffl import QFFL
from dqnfed.algorithms.scaffold import Scaffold
from dqnfed.algorithms.server_lbfgs import ServerLBFGS
from dqnfed.algorithms.shed import SHED
from dqnfed.algorithms.term import TERM
from dqnfed.algorithms.vred import SemiVRed, VRed
from dqnfed.core.local_work import AnyMethod, LocalWork

logger = logging.getLogger("dqnfed")

REGISTRY: dict[str, type[AnyMethod]] = {
    "dqn-fed": DQNFed,
    "dqn-fed-literal": DQNFedLiteral,
    "server-lbfgs": ServerLBFGS,
    "fedavg": FedAvg,
    "ditto": Ditto,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedadam": FedAdam,
    "fedavgm": FedAvgM,
    "fedvarp": FedVARP,
    "fedexp": FedExP,
    "qffl": QFFL,
    "term": TERM,
    "mgda": MGDA,
    "fedmgda-plus": FedMGDAPlus,
    "afl": AFL,
    "fedfv": FedFV,
    "fedfa": FedFa,
    "fedheal": FedHEAL,
    "fedlf": FedLF,
    "newton": Newton,
    "fednl": FedNL,
    "fednl-pp": FedNLPP,
    "fednl-ls": FedNLLS,
    "fednl-cr": FedNLCR,
    "fednew": FedNew,
    "q-fednew": QFedNew,
    "distributed-newton": DistributedNewton,
    "giant": GIANT,
    "local-newton": LocalNewton,
    "shed": SHED,
    "fedns": FedNS,
    "disco": DiSCO,
    "fedns-ggn": FedNSGGN,
    "fednl-head": FedNLHead,
    "fednl-diag": FedNLDiag,
    "fednew-cg": FedNewCG,
    "agnostic-fair": AgnosticFair,
    "fcfl": FCFL,
    "adafed": AdaFed,
    "fedcorr": FedCorr,
    "propfair": PropFair,
    "vred": VRed,
    "semi-vred": SemiVRed,
    "eagle": Eagle,
    "gifair": GIFAIR,
    "feddg-ga": FedDGGA,
    "fedgini": FedGini,
    "drfl": DRFL,
    "fedism": FedISM,
    "aaggff": AAggFF,
    "fedeba-plus": FedEBAPlus,
    "fedyogi": FedYogi,
    "feddyn": FedDyn,
    "mifa": MIFA,
    "fedmdfg": FedMDFG,
    "fairmoo": FairMOO,
    "fedce": FedCE,
    "fedpw": FedPW,
    "fedrep": FedRep,
    "fedbn": FedBN,
}

# what federated methods are compared with: named like methods, run by the simulator alone, no part of the contract
REFERENCES: dict[str, type[AnyMethod]] = {"local-only": LocalOnly, "pooled": Pooled}

OPTIONAL = dict.fromkeys(JD_METHODS, "torchjd")  # methods that are registered only where this extra is installed
if find_spec("torchjd") is not None:
    REGISTRY.update(JD_METHODS)


def register(entry: EntryPoint, registry: dict[str, type[AnyMethod]]) -> None:
    """Add a third party's method to the registry, or say why not; the others are there all the same."""
    try:
        found = entry.load()
    except Exception as error:  # whatever its module raises
        why = f"its module cannot be imported ({type(error).__name__}: {error})"
    else:
        is_method = isinstance(found, type) and issubclass(found, LocalWork)
        why = "" if is_method else f"{entry.value} is no class of methods (dqnfed.core.local_work.LocalWork)"
    if entry.name in registry:
        why = why or "there is a method of this name"
    if why:
        logger.warning("the method '%s' of the entry point %s is left out: %s", entry.name, entry.value, why)
        return
    registry[entry.name] = found


for _entry in entry_points(group="dqnfed.algorithms"):  # third parties register theirs here
    register(_entry, REGISTRY)


def method_called(name: str) -> type[AnyMethod] | None:
    """Return the class of a method: a registered name, a reference's, or `fedcorr+NAME`; None if there is none such."""
    before, plus, inner = name.partition("+")
    if plus and before == "fedcorr" and inner in REGISTRY:
        return fedcorr_with(inner, REGISTRY[inner])
    return REGISTRY.get(name) or REFERENCES.get(name)
