"""Clipping and noise on replies: how long they may be, how the noise is spread, and that seeds do not give it away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from dqnfed import FedAvg, run
from dqnfed.flower import Privacy, run_in_process
from dqnfed.flower.privacy import count_releases, noised
from dqnfed.secure.accounting import BudgetSpent, epsilon_spent
from tests.helpers.bowls import network_bowl
from tests.helpers.turns import relative_distance


class Reply(NamedTuple):
    vector: Tensor
    number: Tensor


class Counted(NamedTuple):
    vector: Tensor
    n: Tensor


def norm_of(reply: Reply) -> float:
    return math.hypot(float(reply.vector.norm()), float(reply.number.nan_to_num()))


def test_a_reply_is_clipped_as_a_whole_and_keeps_its_direction() -> None:
    reply = Reply(torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64))
    clipped = noised(reply, Privacy(clip=1.0))
    assert norm_of(clipped) == pytest.approx(1.0, rel=1e-12)
    assert float(clipped.number) == pytest.approx(0.8, rel=1e-12)
    short = noised(reply, Privacy(clip=10.0))
    assert torch.equal(short.vector, reply.vector)


def test_the_noise_has_the_stated_spread_on_every_number() -> None:
    """N = 40000 draws: the standard deviation of their spread is sigma / sqrt(2N), 0.35 %; four of them are allowed."""
    n, privacy = 40_000, Privacy(clip=2.0, noise_multiplier=1.5)
    silent = Reply(torch.zeros(n, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    found = noised(silent, privacy, torch.Generator().manual_seed(0))
    assert float(found.vector.std()) == pytest.approx(3.0, rel=4 / math.sqrt(2 * n))
    assert float(found.number) != 0.0


def test_not_known_stays_not_known() -> None:
    reply = Reply(torch.ones(2), torch.tensor(torch.nan))
    found = noised(reply, Privacy(clip=1.0, noise_multiplier=0.1))
    assert bool(found.number.isnan())
    assert bool(found.vector.isfinite().all())


def test_whole_numbers_cannot_be_noised() -> None:
    with pytest.raises(ValueError, match=r"Counted sends whole numbers \(n\)"):
        noised(Counted(torch.ones(2), torch.tensor(3)), Privacy(clip=1.0))


def test_the_noise_is_not_a_function_of_the_runs_seed() -> None:
    case = network_bowl()
    runs = [
        run_in_process(FedAvg(), *case[:2], rounds=1, privacy=Privacy(clip=1.0, noise_multiplier=0.1)) for _ in range(2)
    ]
    assert not torch.equal(runs[0].theta, runs[1].theta)


def test_clipping_alone_is_the_clipped_methods_run() -> None:
    case = network_bowl()
    wide = run_in_process(FedAvg(), *case[:2], rounds=2, privacy=Privacy(clip=1e6))
    assert relative_distance(wide.theta, run(FedAvg(), *case[:2], rounds=2).theta) <= 1e-10


def node(**config: str) -> Context:
    """A node as it is after a start."""
    return Context(run_id=1, node_id=1, node_config={"partition-id": 3, **config}, state=RecordDict(), run_config={})


def test_a_client_does_not_forget_a_run_for_another_one() -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=2.0, epsilon=epsilon_spent(2.0, 5, 1e-5) * 1.001)
    context = node()
    count_releases(context, "first", privacy, 3)
    count_releases(context, "second", privacy, 4)
    with pytest.raises(BudgetSpent, match="after 3 releases, and 3 more"):
        count_releases(context, "first", privacy, 3)
    count_releases(context, "first", privacy, 2)


def test_a_client_with_a_folder_goes_on_counting_when_its_node_is_restarted(tmp_path: Path) -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=2.0, epsilon=epsilon_spent(2.0, 5, 1e-5) * 1.001)
    folder = {"memory-dir": str(tmp_path)}
    count_releases(node(**folder), "run", privacy, 3)
    count_releases(node(**folder), "run", privacy, 2)
    with pytest.raises(BudgetSpent):
        count_releases(node(**folder), "run", privacy, 1)
    with pytest.raises(ValueError, match="the name of a run is that of a folder"):
        count_releases(node(**folder), "../run", privacy, 1)


@pytest.mark.parametrize("settings", [{"clip": 0.0}, {"clip": 1.0, "noise_multiplier": -1.0}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Privacy"):
        Privacy(**settings)
