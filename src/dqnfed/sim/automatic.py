"""Which runner suits a model: a rule, so that the same run has the same bits on every machine."""

from __future__ import annotations

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.sim.cohort import CohortRunner
from dqnfed.sim.graphs import graphed
from dqnfed.sim.threads import threads

# Parameters times examples of one gradient, from which on a client on one core of a CPU is done sooner alone than
# under vmap: products of dense layers vectorise well, convolutions and recurrences do not.
DENSE_WORK = 3e6
OTHER_WORK = 1e5


def automatic(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> CohortRunner:
    """Return the runner for this model: CUDA graphs on a GPU; on a CPU threads, or vmap where there is little to do."""
    model = problem.predict
    if problem.theta0.device.type != "cpu" or not isinstance(model, ModuleModel):
        return graphed()  # which is vmap without a GPU
    n_examples = algorithm.batch_size or float(federation.n_examples.double().mean())
    enough = OTHER_WORK if model.chain is None else DENSE_WORK
    return threads() if problem.n_parameters * n_examples >= enough else graphed()
