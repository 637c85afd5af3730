"""Which runner suits a model: a rule, so that the same run has the same bits on every machine."""

from __future__ import annotations

from dqnfed.accel.fast_model import FastModel
from dqnfed.accel.graph_runner import graphed
from dqnfed.accel.threads import threads
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.core.runners import CohortRunner, vectorised

# Parameters times examples of one gradient, from which on a client on one core of a CPU takes less time alone than
# under vmap: products of dense layers vectorise well, convolutions and recurrences do not.
DENSE_WORK = 3e6
OTHER_WORK = 1e5


def automatic(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> CohortRunner:
    """Return the runner for this model: CUDA graphs on a GPU; on a CPU threads, or vmap where there is little work."""
    model = problem.predict
    if problem.theta0.device.type != "cpu":
        return graphed()
    if not isinstance(model, ModuleModel):
        return vectorised()
    batch_size: int | None = getattr(algorithm, "batch_size", None)
    n_examples = batch_size or float(federation.n_examples.double().mean())
    enough = OTHER_WORK if FastModel(model).chain is None else DENSE_WORK
    return threads() if problem.n_parameters * n_examples >= enough else vectorised()
