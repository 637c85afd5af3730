"""Which model of a run is kept: the last one, or the best one on the clients' validation examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.maths.fairness import fairness_summary
from dqnfed.sim.choice import LAST, RULES, updated_choice, validation_value
from dqnfed.sim.clients import memories_of
from dqnfed.sim.early_stop import out_of_patience
from dqnfed.sim.guard import ends_worse, guarded_facts
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.state import Record, Setup, State
from dqnfed.sim.sums import validation_means

logger = logging.getLogger("dqnfed")


def check_select(setup: Setup) -> None:
    """Raise where the best model is asked for and there are no validation examples to find it with."""
    select = setup.evaluation.select
    if select != LAST and setup.federation.validation is None:
        raise ValueError(
            f'`eval.select` is "{select}" ({RULES[select]}), but not every client has validation examples; hold some '
            'out (`validation=0.1`, in a config `data.validation = 0.1`), or keep the last model (`select = "last"`).'
        )


def watch_validation(setup: Setup, state: State, *, is_last: bool) -> str:
    """Keep the present model if it is the best so far, and return why the run should stop now, or nothing.

    Clients are asked once for both; not at all where neither is wanted.
    """
    wanted = setup.evaluation
    watches = wanted.patience is not None and not is_last
    if wanted.select == LAST and not watches:
        return ""
    if setup.summing is not None:
        loss, score = validation_means(setup, state, setup.summing)
        value = loss if wanted.select == "loss" else score
    else:
        found = setup.clients.validate(setup, state)
        score = float(found.scores.mean())
        value = score if wanted.select == LAST else validation_value(wanted.select, found.losses, found.scores)
    if wanted.select != LAST:
        choice = updated_choice(state.choice, wanted.select, state.round, value)
        if choice.round == state.round:
            state.kept = snapshot(setup, state)
        state.choice = choice
    return out_of_patience(setup, state, score) if watches else ""


def snapshot(setup: Setup, state: State) -> dict[str, Tensor]:
    """Return copies of what the present evaluation was of: the model and, where clients have their own, the memories.

    The copies stay on the device. Memories that clients keep elsewhere are represented by what the server has of them.
    """
    named = {"theta": global_model(setup, state)}
    if setup.algorithm.info.personal:
        named.update(state.memory.named())
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def global_model(setup: Setup, state: State) -> Tensor:
    """Return the method's primary model or, where clients have their own, the server's."""
    if setup.algorithm.info.personal:
        theta: Tensor = state.server.theta
        return theta
    return next(iter(setup.algorithm.models(state.server, None).values()))


def kept_model(setup: Setup, state: State) -> Tensor:
    """Return the model that the run ends with."""
    if state.choice.round is not None:
        return state.kept["theta"]
    return state.guard["theta"] if ends_worse(state) else global_model(setup, state)


@torch.no_grad()
def kept_outputs(setup: Setup, state: State) -> Tensor:
    """Return the kept model's outputs for every test example, client after client; each client's own if it has one."""
    test, problem, algorithm = setup.federation.test, setup.problem, setup.algorithm
    if not algorithm.info.personal:
        theta = kept_model(setup, state)
        return problem.kernels.forward(problem, theta, test.inputs, test.targets, fixed=True)[1]
    if state.choice.round is not None:
        memory = MemoryStore(algorithm, problem, setup.federation.n_clients)
        memory.load(state.kept, problem.theta0.device)
        state = replace(state, memory=memory)
    found = []
    for clients in (test.sizes > 0).nonzero().flatten().split(16):
        models = vmap(lambda kept: algorithm.models(state.server, kept))(memories_of(setup, state, clients))
        rows = test.rows(clients).to(test.inputs.device)
        thetas, inputs, targets = next(iter(models.values())), test.inputs[rows], test.targets[rows]
        found.append(problem.kernels.forward_each(problem, thetas, inputs, targets, test.sizes[clients])[1])
    return torch.cat(found)


def kept_record(state: State, history: list[Record]) -> Record:
    """Return the evaluation of the kept model; of the last one, the last that was made."""
    evaluated = [record for record in history if record["accuracy"] is not None]
    if not evaluated:
        logger.warning("no evaluation of this run was made: nothing is known about its model")
        nothing = {"mean": math.nan, "max": math.nan}
        return {"accuracy": dict.fromkeys(fairness_summary(torch.ones(1)), math.nan), "train_loss": nothing}
    kept = int(state.guard["round"]) if state.choice.round is None and ends_worse(state) else state.choice.round
    return next((record for record in evaluated if record["round"] == kept), evaluated[-1])


def kept_facts(setup: Setup, state: State) -> Record:
    """Return what the summary says about the kept model."""
    select, choice = setup.evaluation.select, state.choice
    if choice.round is None and ends_worse(state):
        return {"select": select, **({} if select == LAST else {"kept_validation": None}), **guarded_facts(state)}
    if select == LAST:
        return {"select": select, "kept_round": state.round - 1}
    if choice.round is None:
        logger.warning("no evaluation had finite validation values (`eval.select`): the last model is kept")
        return {"select": select, "kept_round": state.round - 1, "kept_validation": None}
    found = {"value": choice.value, "evaluations": choice.n_evaluations}
    return {"select": select, "kept_round": choice.round, "kept_validation": found}


def kept_line(summary: Mapping[str, Any]) -> str:
    """Return the sentence about the kept model for a terminal or a log; nothing where it is the last one."""
    select = summary.get("select", LAST)
    if select == LAST:
        return ""
    if summary["kept_validation"] is None:
        return "kept the last model (no evaluation had finite validation values)"
    n = summary["kept_validation"]["evaluations"]
    return f"kept the model of round {summary['kept_round']} ({RULES[select]}, {n} evaluation{'s' if n > 1 else ''})"
