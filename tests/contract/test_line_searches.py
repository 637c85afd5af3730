"""A trial that ends outside the numbers is a step too long, not a client at fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed import run
from dqnfed.algorithms import REGISTRY
from dqnfed.core.problem import Problem, squared_errors
from tests.helpers.bowls import federation_of, linear_model, regression_clients

LINE_SEARCHES: dict[str, dict[str, Any]] = {
    "dqn-fed": {"step": "line-search"},
    "adafed": {"step": "line-search"},
    "fednew-cg": {},
    "fednl-diag": {},
    "fednl-ls": {},
    "fedns": {},
    "fedns-ggn": {},
    "giant": {},
    "shed": {},
}
WALL = 0.3  # no client's loss is finite where one of its outputs is larger than this


def walled_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared_errors(outputs, targets) + torch.where(outputs.abs().amax(1) > WALL, torch.inf, 0.0)


@pytest.mark.parametrize("name", LINE_SEARCHES)
def test_no_accepted_step_crosses_the_wall(name: str) -> None:
    """The optima lie far behind the wall, so the whole step always crosses it, for some clients or for all."""
    problem = dataclasses.replace(Problem.from_module(linear_model(4, 1), loss="squared-error"), losses=walled_losses)
    federation = federation_of(regression_clients(5, 4))
    result = run(REGISTRY[name](**LINE_SEARCHES[name]), problem, federation, rounds=3)
    losses = [record["train_loss"] for record in result.history]
    assert all(torch.isfinite(torch.tensor([loss["mean"], loss["max"]])).all() for loss in losses)
    assert losses[-1]["mean"] < losses[0]["mean"]
    assert all(record["dropped"] == [] for record in result.history[1:])
