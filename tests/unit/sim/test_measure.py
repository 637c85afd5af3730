"""What is measured in a round, and how often."""

from __future__ import annotations

from dqnfed.algorithms import REGISTRY
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation
from tests.helpers.bowls import network_bowl


def test_participants_are_measured_as_often_as_asked() -> None:
    """Rarer measurements change nothing but their number: what is measured is the same."""
    case = network_bowl()

    def history(every: int) -> list[dict[str, object]]:
        evaluation = Evaluation(every=100, participants_every=every)
        found = run(
            REGISTRY["fedavg"](lr=0.1),
            case.problem,
            case.federation,
            rounds=7,
            participation=0.5,
            evaluation=evaluation,
        )
        return found.history

    always, seldom = history(1), history(3)
    measured = [record["round"] for record in seldom if record["rho"] is not None]
    assert measured == [2, 5]
    for one, other in zip(always, seldom, strict=True):
        if other["round"] in measured:
            assert [other[key] for key in ("rho", "loss_before", "loss_after")] == [
                one[key] for key in ("rho", "loss_before", "loss_after")
            ]
