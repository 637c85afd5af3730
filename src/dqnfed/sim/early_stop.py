"""Early stopping: a run ends when the clients' mean validation score has not risen for some evaluations."""

from __future__ import annotations

import math

from dqnfed.sim.state import Setup, State


def check_patience(setup: Setup) -> None:
    """Raise where patience has no validation examples to look at."""
    if setup.evaluation.patience is not None and setup.federation.validation is None:
        raise ValueError(
            "`patience` watches validation scores, but this federation has no validation examples; hold some out "
            "(`validation=0.1`, in a config `data.validation = 0.1`)."
        )


def out_of_patience(setup: Setup, state: State, score: float) -> str:
    """Return why the run should stop now, or nothing; remembers the best mean of the clients' validation scores.

    The model stays as it is; which one the run ends with is `eval.select`.
    """
    patience = setup.evaluation.patience
    if patience is None:
        return ""
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
