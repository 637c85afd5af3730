"""Which methods can be run with `privacy.secure`, and how they are changed for it."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TypeVar

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem
from dqnfed.core.screening import Policy
from dqnfed.secure.forms import MOST_VECTORS
from dqnfed.secure.pads import check_installed
from dqnfed.secure.release import FEWEST

logger = logging.getLogger("dqnfed")
A = TypeVar("A", bound=AnyAlgorithm)
NO_CACHE = (
    "privacy.secure: rows of absent clients are not kept (cached_clients = 0), since products with them would need the "
    "absent clients"
)


def secure_method(algorithm: A, policy: Policy, problem: Problem, n_clients: int, cohort_size: int) -> A:
    """Return the method as it can be run securely, or refuse it by name and say why."""
    check_installed()
    name = type(algorithm).__name__
    if cohort_size < FEWEST:
        raise ValueError(
            f"`privacy.secure` needs at least {FEWEST} clients a round, but there are {cohort_size}: of two, each "
            "learns the other's update from the sum. Raise `train.participation`, or switch it off."
        )
    if policy.drop_share:
        raise ValueError(
            f"`privacy.secure` hides the replies that `policy.drop_share` = {policy.drop_share:g} compares with each "
            "other; set it to 0."
        )
    if algorithm.info.training != "federated":
        raise ValueError(
            f"{name} cannot be run with `privacy.secure`: it is no federated method but a reference to compare with; "
            "run it without."
        )
    if algorithm.info.asks_alone:
        raise ValueError(
            f"{name} cannot be run with `privacy.secure`: it asks clients one after the other, and the sum over one "
            "client is its reply."
        )
    prepared = algorithm.prepare(problem, n_clients, cohort_size)
    if prepared.needs == "rows" and _caches_by_default(algorithm):
        algorithm = replace(algorithm, cached_clients=0)  # type: ignore[call-arg]
        prepared = algorithm.prepare(problem, n_clients, cohort_size)
        logger.warning("%s", NO_CACHE)
    if prepared.needs == "rows":
        raise ValueError(
            f"{name} cannot be run with `privacy.secure`: its server needs every client's reply itself "
            f"({'; '.join(algorithm.info.needs)}), and under pads it sees sums and products only. "
            "`dqnfed list algorithms` shows which methods need no more (needs: sum or gram)."
        )
    if getattr(prepared, "metric", "") == "lbfgs":  # a pair is two vectors
        _check_memory(name, getattr(prepared, "metric_memory", 0))
    return algorithm


def _check_memory(name: str, n_pairs: int) -> None:
    if 2 * n_pairs > MOST_VECTORS:
        raise ValueError(
            f"{name} cannot be run with `privacy.secure` and metric_memory = {n_pairs}: the ring has room for products "
            f"with {MOST_VECTORS} vectors, two for each pair; set it to {MOST_VECTORS // 2} at most."
        )


def _caches_by_default(algorithm: AnyAlgorithm) -> bool:
    has = {f.name for f in fields(algorithm)}
    return "cached_clients" in has and getattr(algorithm, "cached_clients") is None  # noqa: B009
