"""Early stopping: a run ends when the clients' mean validation score has not risen for some evaluations."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dqnfed.sim.clients import LocalClients, evaluate
from dqnfed.sim.state import Setup, State


def check_patience(setup: Setup) -> None:
    """Raise where patience has no validation examples to look at."""
    if setup.evaluation.patience is not None and setup.federation.validation is None:
        raise ValueError(
            "`patience` watches validation scores, but this federation has no validation examples; hold some out "
            "(`validation=0.1`, in a config `data.validation = 0.1`)."
        )


def out_of_patience(setup: Setup, state: State) -> str:
    """Return why the run should stop now, or nothing; remembers the best validation score in the state.

    The model stays as it is: the last one, not the best one.
    """
    patience = setup.evaluation.patience
    if patience is None:
        return ""
    score = validation_score(setup, state)
    if math.isnan(score):  # nobody answered, or some score is no number: nothing was learnt about the model
        return ""
    if not state.best or score > state.best["score"]:
        state.best = {"score": score, "round": state.round, "waited": 0}
        return ""
    state.best["waited"] += 1
    if state.best["waited"] < patience:
        return ""
    return (
        f"the mean validation score has not risen above {state.best['score']:.4g} (round {state.best['round']}) "
        f"for {patience} evaluations"
    )


def validation_score(setup: Setup, state: State) -> float:
    """Return the mean over clients of the primary model's score on validation examples."""
    everybody = torch.arange(setup.federation.n_clients)
    if isinstance(setup.clients, LocalClients) and not setup.algorithm.info.personal:
        theta = next(iter(setup.algorithm.models(state.server, None).values()))
        found = evaluate(setup.problem, theta, setup.federation.examples("validation"), everybody)
        return float(found.scores.cpu().mean())
    watching = replace(setup, evaluation=replace(setup.evaluation, part="validation"))
    scores = setup.clients.evaluate(watching, state, everybody, with_scores=True).scores
    return float(next(iter(scores.values())).mean())
