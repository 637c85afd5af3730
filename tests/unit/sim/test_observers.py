"""A round is told once, in order, and not lost when the next one fails."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.core.run_folder import RunFolder
from dqnfed.sim import engine
from dqnfed.sim.cohort import CohortRunner, vectorised
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation
from tests.helpers.quadratic_clients import consistent_quadratics
from tests.unit.sim.test_graphs import DigestsOnTheHost


class Listener:
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.ends: list[str] = []

    def start(self, *_: Any) -> None: ...

    def round(self, record: Any) -> None:
        self.rounds.append(record["round"])

    def end(self, summary: Any) -> None:
        self.ends.append(summary["status"])


@pytest.mark.parametrize("fails", [None, 3])
def test_rounds_that_are_told_late_are_all_told(
    fails: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a runner that makes digests, as on a GPU, a round is told when the next one's clients are at work."""
    case, listener, play_round = consistent_quadratics(6, 8), Listener(), engine.play_round
    told_before: list[int] = []

    def watched(setup: Any, state: Any, *, meanwhile: Any) -> Any:
        told_before.append(len(listener.rounds))
        if state.round == fails:
            raise RuntimeError("the GPU has gone")
        return play_round(setup, state, meanwhile=meanwhile)

    monkeypatch.setattr(engine, "play_round", watched)

    def go() -> None:
        run(
            DQNFed(),
            case.problem,
            case.federation,
            rounds=6,
            cohort=DigestsOnTheHost(),
            evaluation=Evaluation(every=2),
            observers=[listener],
            out=tmp_path,
        )

    if fails is None:
        go()
    else:
        with pytest.raises(RuntimeError, match="the GPU has gone"):
            go()
    expected = list(range(6 if fails is None else fails))
    assert listener.rounds == expected
    assert [record["round"] for record in RunFolder(tmp_path).metrics()] == [-1, *expected]
    assert told_before == [max(0, n - 1) for n in range(len(told_before))]
    assert listener.ends == ["finished" if fails is None else "failed"]


@pytest.mark.parametrize("cohort", [vectorised(), DigestsOnTheHost()], ids=["at once", "late"])
@pytest.mark.parametrize("times", [1, 9])
def test_an_observer_may_stop_the_run(cohort: CohortRunner, times: int, tmp_path: Path) -> None:
    """It is saved, however often that is asked for, and goes on from there."""
    case = consistent_quadratics(6, 8)

    class Stops(Listener):
        def round(self, record: Any) -> None:
            super().round(record)
            if 2 <= record["round"] < 2 + times:
                signal.raise_signal(signal.SIGINT)

    listener = Stops()
    settings: dict[str, Any] = {"rounds": 12, "participation": 0.5, "cohort": cohort, "out": tmp_path}
    try:
        found = run(DQNFed(), case.problem, case.federation, observers=[listener], **settings)
        assert found.summary["status"] == "interrupted"
    except KeyboardInterrupt:
        assert times > 1
    assert listener.rounds == list(range(len(listener.rounds)))
    assert len(listener.rounds) in (3, 4)
    assert (tmp_path / "checkpoint" / "checkpoint.json").is_file()
    resumed = run(DQNFed(), case.problem, case.federation, resume=True, **settings)
    whole = run(DQNFed(), case.problem, case.federation, **{**settings, "out": None})
    assert torch.equal(resumed.theta, whole.theta)
    assert [record["round"] for record in RunFolder(tmp_path).metrics()] == list(range(-1, 12))
