"""The rule that chooses a model: windows of up to three evaluations, ties to the earlier round, never NaN."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from dqnfed.sim.choice import RULES, SELECTS, WINDOW, Choice, updated_choice, validation_value
from tests.helpers.selection import chosen_round


def after(select: str, values: Sequence[float]) -> Choice:
    choice = Choice()
    for round_, value in enumerate(values):
        choice = updated_choice(choice, select, round_, value)
    return choice


@pytest.mark.parametrize(
    ("values", "round_", "n_evaluations"),
    [
        ([3.0], 0, 1),
        ([3.0, 2.0], 1, 2),  # 3, 2.5
        ([3.0, 2.0, 1.0, 1.0, 1.0, 5.0], 4, 3),  # 3, 2.5, 2, 1.33, 1, 2.33
        ([5.0, 1.0, 5.0, 5.0, 3.0, 3.0, 3.0, 4.0], 1, 2),  # one low value does not make its round the best for long ...
        ([5.0, 5.0, 5.0, 1.0, 4.0, 2.5, 2.6, 2.7], 5, 3),  # 5, 5, 5, 3.67, 3.33, 2.5, 3.03, 2.6: the window counts
        ([2.0, 2.0, 2.0, 2.0], 0, 1),  # equal means: the earlier round
        ([0.1, 0.1, 0.1, 0.1], 0, 1),  # and so where the sum of three is rounded
        ([4.0, 1.0, 4.0, 1.0, 4.0, 1.0], 3, 3),  # 4, 2.5, 3, 2, 3, 2
        ([math.nan, 2.0, math.nan, 1.0], 3, 2),  # what is no number is in no window
        ([2.0, math.inf, 3.0], 0, 1),
    ],
)
def test_hand_made_losses(values: list[float], round_: int, n_evaluations: int) -> None:
    found = after("loss", values)
    assert (found.round, found.n_evaluations) == (round_, n_evaluations)
    mirrored = after("mean", [-value for value in values])  # a score is better when higher
    assert (mirrored.round, mirrored.n_evaluations) == (round_, n_evaluations)


@pytest.mark.parametrize("select", RULES)
def test_random_sequences_agree_with_exact_arithmetic(select: str) -> None:
    """Few different values, so that many means are equal; all are sums of powers of two, which floats hold exactly."""
    draw = random.Random(0)
    for _ in range(200):
        values = [draw.choice([0.25, 0.5, draw.randint(1, 64) / 64, math.nan]) for _ in range(draw.randint(1, 12))]
        assert after(select, values).round == chosen_round(values, lowest=select == "loss"), values


def test_nothing_finite_chooses_nothing() -> None:
    assert after("loss", [math.nan, math.inf, -math.inf]) == Choice()


def test_only_the_last_values_are_kept() -> None:
    assert after("mean", [1.0, 2.0, 3.0, 4.0, 5.0]).recent == (3.0, 4.0, 5.0)
    assert WINDOW == 3


def test_what_each_rule_measures() -> None:
    scores = torch.tensor([float(k) for k in range(40, 0, -1)], dtype=torch.float64)  # 40 clients, 40 % down to 1 %
    losses = 100.0 - scores / 2
    expected = {"loss": 89.75, "mean": 20.5, "worst10": 2.5, "worst5": 1.5, "min": 1.0}
    assert {select: validation_value(select, losses, scores) for select in RULES} == expected
    assert ("last", *expected) == SELECTS


@pytest.mark.parametrize("select", RULES)
def test_one_client_without_a_number_leaves_no_value(select: str) -> None:
    bad = torch.tensor([1.0, math.nan])
    assert math.isnan(validation_value(select, bad, bad))
    assert math.isnan(validation_value(select, torch.empty(0), torch.empty(0)))  # nobody replied
