"""The literal method's secant pairs on quadratics, where y = H s whatever the moves are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral
from tests.helpers.play import play
from tests.helpers.quadratic_clients import consistent_quadratics


@pytest.mark.parametrize("epochs", [2, 3])
def test_every_pair_is_one_move_and_the_change_of_the_gradient_along_it(epochs: int) -> None:
    case = consistent_quadratics(2, 5)
    played = play(DQNFedLiteral(epochs=epochs, lr=0.1, memory=8), case.problem, case.federation, rounds=1)
    for client in range(2):
        pairs: Any = played.memory(client).pairs
        n_pairs = int(pairs.n_pairs)
        assert n_pairs == epochs - 1  # the first, from theta^{-1}, is zero and skipped
        hessian = case.federation.train.targets[client].view(5, 5)
        torch.testing.assert_close(pairs.y[-n_pairs:], pairs.s[-n_pairs:] @ hessian)


@pytest.mark.parametrize(("persists", "n_pairs"), [(True, 5), (False, 2)])
def test_pairs_outlive_the_round_only_where_they_are_to(persists: bool, n_pairs: int) -> None:
    """With two epochs a round has two pairs, but for the first round's, which lacks theta^{-1}."""
    case = consistent_quadratics(2, 5)
    method = DQNFedLiteral(epochs=2, lr=0.01, persists=persists, form="inverse")
    played = play(method, case.problem, case.federation, rounds=3)
    assert [int(played.memory(client).pairs.n_pairs) for client in range(2)] == [n_pairs] * 2
