"""What every method inherits: its schedule, its sizes, and errors that name the rule."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dqnfed import FedAvg
from dqnfed.core.algorithm import Algorithm, Theta, check_choice, check_range, hyperparameters, message_bits
from tests.helpers.bowls import network_bowl


class Mixed(NamedTuple):
    vector: Tensor  # [10] float32
    places: Tensor  # [3] int64
    inner: Theta  # [2] float64


def test_the_learning_rate_decays_in_steps() -> None:
    algorithm = FedAvg(lr=0.8, lr_decay=0.5, lr_decay_every=3)
    assert [algorithm.lr_at(round) for round in range(7)] == [0.8] * 3 + [0.4] * 3 + [0.2]
    assert FedAvg(lr=0.3).lr_at(1000) == 0.3


def test_messages_are_as_large_as_their_tensors() -> None:
    message = Mixed(torch.zeros(10), torch.zeros(3, dtype=torch.long), Theta(torch.zeros(2, dtype=torch.float64)))
    assert message_bits(message) == 8 * (10 * 4 + 3 * 8 + 2 * 8)


def test_one_client_sends_its_share_of_the_stacked_answers() -> None:
    stacked = Mixed(torch.zeros(4, 10), torch.zeros(4, 3, dtype=torch.long), Theta(torch.zeros(4, 2)))
    assert FedAvg().uplink_bits(stacked) == 8 * (10 * 4 + 3 * 8 + 2 * 4)  # type: ignore[arg-type]


def test_by_default_clients_see_theta_and_keep_nothing() -> None:
    problem, federation, _ = network_bowl()
    algorithm = FedAvg(epochs=3)
    server = algorithm.init_server(problem, federation.n_clients)
    sent = algorithm.send(server)
    assert type(sent) is Theta
    assert torch.equal(sent.theta, problem.theta0)
    assert server.theta.data_ptr() != problem.theta0.data_ptr()
    assert algorithm.passes(sent) == 3.0
    assert torch.equal(algorithm.cohort(server, 0, torch.tensor([1, 4]), 6), torch.tensor([1, 4]))
    assert algorithm.evaluated(server, Theta(problem.theta0)).keys() == {"global"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"FedAvg: `lr` must be in \(0, inf\), but is 0\.0"),
        ({"epochs": 0}, r"`epochs` must be in \[1, inf\), but is 0"),
        ({"epochs": 1.5}, r"FedAvg: `epochs` must be a whole number, but is 1\.5"),
        ({"epochs": True}, r"FedAvg: `epochs` must be a whole number, but is True"),
        ({"batch_size": "64"}, r"FedAvg: `batch_size` must be a whole number, but is '64'"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\), but is 1\.0"),
        ({"lr_decay": 1.5}, r"`lr_decay` must be in \(0, 1\], but is 1\.5"),
        ({"lr": float("nan")}, "`lr` must be in .* but is nan"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform, but is 'size'"),
    ],
)
def test_bad_values_are_refused_with_the_accepted_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvg(**settings)  # type: ignore[arg-type]


class Loose:
    share = 0.5
    mode = "a"


def test_values_inside_their_range_pass() -> None:
    check_range(Loose(), "share", low=0.5, high=0.5)
    check_range(Loose(), "share", high=1.0)
    check_choice(Loose(), "mode", ("a", "b"))
    with pytest.raises(ValueError, match=r"`share` must be in \(-inf, 0\.5\), but is 0\.5"):
        check_range(Loose(), "share", high=0.5, open_high=True)


def test_a_methods_own_hyperparameters_leave_out_the_shared_ones() -> None:
    assert hyperparameters(FedAvg) == ["server_lr", "weighting"]
    assert not set(hyperparameters(FedAvg())) & set(Algorithm.__dataclass_fields__)
