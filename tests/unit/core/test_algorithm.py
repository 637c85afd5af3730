"""What every method inherits: its schedule, its sizes, and errors that name the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dqnfed import FedAvg, Scaffold
from dqnfed.core.algorithm import (
    LOCAL_WORK,
    Theta,
    check_choice,
    check_range,
    check_used,
    default_of,
    hyperparameters,
    message_bits,
)
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


def test_by_default_a_reply_is_as_large_as_its_tensors() -> None:
    reply = Mixed(torch.zeros(10), torch.zeros(3, dtype=torch.long), Theta(torch.zeros(2)))
    assert FedAvg().uplink_bits(reply) == 8 * (10 * 4 + 3 * 8 + 2 * 4)  # type: ignore[arg-type]


def test_by_default_clients_see_theta_and_keep_nothing() -> None:
    problem, federation, _ = network_bowl()
    algorithm = FedAvg(epochs=3)
    server = algorithm.init_server(problem, federation.n_clients)
    sent = algorithm.send(server)
    assert type(sent) is Theta
    assert torch.equal(sent.theta, problem.theta0)
    assert server.theta.data_ptr() != problem.theta0.data_ptr()
    assert algorithm.passes(sent) == 3.0
    assert torch.equal(algorithm.select(server, 0, torch.tensor([1, 4]), 6), torch.tensor([1, 4]))
    assert algorithm.models(server, Theta(problem.theta0)).keys() == {"global"}  # type: ignore[arg-type]


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
    assert not set(hyperparameters(FedAvg())) & set(LOCAL_WORK)


@dataclass(frozen=True)
class Settings:
    mode: str = "a"
    decay: float = 0.9
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def test_a_setting_without_effect_is_refused_only_if_it_was_changed() -> None:
    check_used(Settings(decay=0.5), "decay", used=True, why="with mode='a'")
    check_used(Settings(), "decay", used=False, why="with mode='a'")
    check_used(Settings(), "sizes", used=False, why="here")
    with pytest.raises(ValueError, match=r"Settings: `decay` is 0\.5, but has no effect with mode='a'; leave it out"):
        check_used(Settings(decay=0.5), "decay", used=False, why="with mode='a'")


def test_defaults_are_found_on_classes_and_instances() -> None:
    assert default_of(Settings(mode="b"), "mode") == "a"
    assert default_of(Settings, "sizes") == [1, 2]
    assert default_of(FedAvg(lr=7.0), "lr") == 0.1


def test_what_a_server_asks_for_is_the_first_word_of_its_declared_needs() -> None:
    assert FedAvg.info.needs == ("sum",)
    assert FedAvg().needs == "sum"


def test_shared_settings_without_effect_are_named() -> None:
    """A rate that never decays has no period; one step has no momentum, and SCAFFOLD refuses any."""
    other = {"nesterov", "schedule_rounds"}  # of momentum, of a cosine
    assert FedAvg().unused() == other | {"lr_decay_every", "momentum"}
    assert FedAvg(lr_decay=0.9).unused() == other | {"momentum"}
    assert FedAvg(lr_decay=0.9, momentum=0.9).unused() == {"schedule_rounds", "momentum"}
    assert FedAvg(lr_decay=0.9, epochs=2).unused() == FedAvg(lr_decay=0.9, batch_size=4).unused() == other
    assert FedAvg(momentum=0.9, nesterov=True).unused() == {"lr_decay_every", "schedule_rounds"}
    cosine = FedAvg(epochs=2, schedule="cosine", schedule_rounds=9, optimizer="adam")
    assert cosine.unused() == {"lr_decay", "lr_decay_every", "momentum", "nesterov"}
    assert FedAvg(epochs=2, schedule="constant").unused() == other | {"lr_decay", "lr_decay_every", "schedule"}
    assert Scaffold(epochs=2).unused() == other | {"lr_decay_every", "momentum", "optimizer"}


@pytest.mark.parametrize("settings", [{"lr": math.inf}, {"weight_decay": math.inf}, {"clip_norm": math.inf}])
def test_infinity_is_no_setting(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be in .*, inf\), but is inf"):
        FedAvg(**settings)  # type: ignore[arg-type]
