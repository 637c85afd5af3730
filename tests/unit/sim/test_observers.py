"""Observers get every round once, in order, and none is lost when the next one fails."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed import DQNFed
from dqnfed.core.run_folder import RunFolder
from dqnfed.sim import engine
from dqnfed.sim.engine import run
from dqnfed.sim.rounds import run_round
from dqnfed.sim.state import Evaluation
from tests.helpers.folders import newest_checkpoint
from tests.helpers.quadratic_clients import consistent_quadratics


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
def test_rounds_that_are_logged_late_are_all_logged(
    fails: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a round is logged while the next one's clients compute."""
    case, listener = consistent_quadratics(6, 8), Listener()
    logged_before: list[int] = []

    def watched(setup: Any, state: Any, *, meanwhile: Any) -> Any:
        logged_before.append(len(listener.rounds))
        if state.round == fails:
            raise RuntimeError("the GPU has gone")
        return run_round(setup, state, meanwhile=meanwhile)

    monkeypatch.setattr(engine, "run_round", watched)
    monkeypatch.setattr(engine, "_defers_log", lambda _: True)

    def go() -> None:
        run(
            DQNFed(),
            case.problem,
            case.federation,
            rounds=6,
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
    assert logged_before == [max(0, n - 1) for n in range(len(logged_before))]
    assert listener.ends == ["finished" if fails is None else "failed"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("times", [1, 9])
def test_an_observer_may_stop_the_run(late: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved, however often that is asked for, and goes on from there."""
    case = consistent_quadratics(6, 8)
    monkeypatch.setattr(engine, "_defers_log", lambda _: late)

    class Stops(Listener):
        def round(self, record: Any) -> None:
            super().round(record)
            if 2 <= record["round"] < 2 + times:
                signal.raise_signal(signal.SIGINT)

    listener = Stops()
    settings: dict[str, Any] = {"rounds": 12, "participation": 0.5, "out": tmp_path}
    try:
        found = run(DQNFed(), case.problem, case.federation, observers=[listener], **settings)
        assert found.summary["status"] == "interrupted"
    except KeyboardInterrupt:
        assert times > 1
    assert listener.rounds == list(range(len(listener.rounds)))
    assert len(listener.rounds) in (3, 4)
    assert newest_checkpoint(tmp_path)
    resumed = run(DQNFed(), case.problem, case.federation, resume=True, **settings)
    whole = run(DQNFed(), case.problem, case.federation, **{**settings, "out": None})
    assert torch.equal(resumed.theta, whole.theta)
    assert [record["round"] for record in RunFolder(tmp_path).metrics()] == list(range(-1, 12))
