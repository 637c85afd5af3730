"""A run keeps the model that is best on validation examples: which one, with which numbers, and after a resume too."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed import AFL, Ditto, Evaluation, FedAvg, RunResult, looped, run
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.run_folder import load_tensors
from dqnfed.sim.choice import RULES
from tests.helpers.folders import contents, newest_tensors
from tests.helpers.play import play
from tests.helpers.selection import by_hand, chosen_round, linear_clients, linear_problem, worst_mean

ROUNDS = 12
FEDERATION = linear_clients()
NOISY = FedAvg(lr=0.1, batch_size=4, epochs=2)  # fits wrong labels after some rounds, and its models go up and down


@lru_cache
def models(rounds: int = ROUNDS) -> list[Tensor]:
    """The model after every round of FedAvg, without any evaluation."""
    return play(NOISY, linear_problem(), FEDERATION, rounds=rounds).thetas[1:]


def values(select: str, thetas: list[Tensor]) -> list[float]:
    """What the rule compares, by hand, for every model."""
    found = []
    for theta in thetas:
        assert FEDERATION.validation is not None
        pairs = [by_hand(theta, FEDERATION.validation, k) for k in range(4)]
        scores = [score for _, score in pairs]
        found.append(
            {
                "loss": sum(loss for loss, _ in pairs) / 4,
                "mean": sum(scores) / 4,
                "worst10": worst_mean(scores, 1),
                "worst5": worst_mean(scores, 1),
                "min": min(scores),
            }[select]
        )
    return found


def assert_is(result: RunResult, theta: Tensor, round_: int) -> None:
    """The result is this model, and its numbers are those of this model on test and training examples."""
    assert torch.allclose(result.theta, theta, rtol=1e-9, atol=1e-12)
    accuracies = [by_hand(theta, FEDERATION.test, k)[1] for k in range(4)]
    losses = [by_hand(theta, FEDERATION.train, k)[0] for k in range(4)]
    summary = result.summary
    assert summary["kept_round"] == round_
    assert summary["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 4)
    assert summary["accuracy"]["min"] == pytest.approx(min(accuracies))
    assert summary["accuracy"]["std"] == pytest.approx(torch.tensor(accuracies).double().std(unbiased=False).item())
    assert summary["train_loss"]["mean"] == pytest.approx(sum(losses) / 4)
    assert result.history[round_ + 1]["accuracy"] == summary["accuracy"]


@pytest.mark.parametrize("accelerate", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("select", RULES)
def test_the_kept_model_is_the_best_one(select: str, accelerate: bool) -> None:
    thetas = models()
    expected = chosen_round(values(select, thetas), lowest=select == "loss")
    assert expected is not None
    result = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, select=select, accelerate=accelerate)
    assert result.summary["select"] == select
    assert_is(result, thetas[expected], expected)
    n_evaluations = result.summary["kept_validation"]["evaluations"]
    assert n_evaluations == min(3, expected + 1)
    window = values(select, thetas)[expected + 1 - n_evaluations : expected + 1]
    assert result.summary["kept_validation"]["value"] == pytest.approx(sum(window) / n_evaluations)


def test_the_rules_disagree_here_and_none_of_them_keeps_the_last() -> None:
    """Otherwise the test above would show little."""
    kept = {select: chosen_round(values(select, models()), lowest=select == "loss") for select in RULES}
    assert ROUNDS - 1 not in kept.values()
    assert len(set(kept.values())) > 1


def test_the_last_model_is_kept_unless_asked_and_the_rounds_stay_what_they_were() -> None:
    usual = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS)
    assert (usual.summary["select"], usual.summary["kept_round"]) == ("last", ROUNDS - 1)
    assert_is(usual, models()[-1], ROUNDS - 1)
    chosen = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, evaluation=Evaluation(select="loss"))
    assert without_seconds(chosen.history) == without_seconds(usual.history)
    assert chosen.client_rows == usual.client_rows


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def test_only_evaluated_rounds_are_candidates() -> None:
    """Every fifth of twelve rounds and the last one: rounds 4, 9 and 11, averaged among themselves."""
    thetas, rounds = models(), [4, 9, 11]
    place = chosen_round(values("loss", [thetas[r] for r in rounds]), lowest=True)
    assert place is not None
    result = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, evaluation=Evaluation(every=5, select="loss"))
    assert_is_model(result, thetas[rounds[place]], rounds[place])


def assert_is_model(result: RunResult, theta: Tensor, round_: int) -> None:
    assert result.summary["kept_round"] == round_
    assert torch.allclose(result.theta, theta, rtol=1e-9, atol=1e-12)


def test_test_examples_have_no_say() -> None:
    wrong = Examples(FEDERATION.test.inputs, 1 - FEDERATION.test.targets, FEDERATION.test.starts)
    other = Federation(FEDERATION.train, wrong, FEDERATION.validation, FEDERATION.names, None, 2)
    first, second = (run(NOISY, linear_problem(), data, rounds=ROUNDS, select="mean") for data in (FEDERATION, other))
    assert torch.equal(first.theta, second.theta)
    assert first.summary["kept_round"] == second.summary["kept_round"]


def test_with_early_stopping_the_best_model_is_kept() -> None:
    watched = Evaluation(patience=3, select="loss")
    result = run(NOISY, linear_problem(), FEDERATION, rounds=60, evaluation=watched)
    alone = run(NOISY, linear_problem(), FEDERATION, rounds=60, evaluation=Evaluation(patience=3))
    done = result.summary["rounds"]
    assert (result.summary["status"], done) == ("stopped", alone.summary["rounds"])
    thetas = models(done)
    expected = chosen_round(values("loss", thetas), lowest=True)
    assert expected is not None
    assert expected < done - 1
    assert_is(result, thetas[expected], expected)
    assert torch.equal(alone.theta, play_last(done))


def play_last(rounds: int) -> Tensor:
    return run(NOISY, linear_problem(), FEDERATION, rounds=rounds).theta


def test_a_primary_model_of_the_methods_own_is_the_one_that_is_kept() -> None:
    """AFL evaluates the average of its models: that one is validated, kept and saved."""
    method = AFL(lr=0.5)
    averages = [server.average for server in play(method, linear_problem(), FEDERATION, rounds=6).servers[1:]]
    expected = chosen_round(values("loss", averages), lowest=True)
    assert expected is not None
    result = run(method, linear_problem(), FEDERATION, rounds=6, select="loss")
    assert_is_model(result, averages[expected], expected)


@pytest.mark.parametrize("is_looped", [False, True], ids=["vectorised", "looped"])
def test_personal_models_are_kept_with_the_global_one(is_looped: bool, tmp_path: Path) -> None:
    """Ditto, half of its clients a round: the numbers are those of every client's own model in the kept round."""
    method = Ditto(lr=0.1, batch_size=4, epochs=2, lam=0.1)
    expected = [personal_after(method, rounds) for rounds in range(1, 9)]
    validation = FEDERATION.validation
    assert validation is not None
    losses = [sum(by_hand(own[k], validation, k)[0] for k in range(4)) / 4 for own, _ in expected]
    round_ = chosen_round(losses, lowest=True)
    assert round_ is not None
    assert round_ < 7
    own, shared = expected[round_]
    result = run(
        method,
        linear_problem(),
        FEDERATION,
        rounds=8,
        participation=0.5,
        select="loss",
        out=tmp_path,
        cohort=looped() if is_looped else None,
    )
    assert_is_model(result, shared, round_)
    accuracies = [by_hand(own[k], FEDERATION.test, k)[1] for k in range(4)]
    assert result.summary["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 4)
    stored, _ = load_tensors(newest_tensors(tmp_path))
    rows = stored["kept.memory_row_of"].tolist()
    for k, row in enumerate(rows):
        if row >= 0:
            assert torch.allclose(stored["kept.memory.personal"][row], own[k], rtol=1e-9, atol=1e-12)
        else:
            assert torch.equal(own[k], linear_problem().theta0)  # this client has not taken part yet


def personal_after(method: AnyAlgorithm, rounds: int) -> tuple[list[Tensor], Tensor]:
    """Return all clients' own models after so many rounds, and the global one."""
    played = play(method, linear_problem(), FEDERATION, rounds=rounds, participation=0.5)
    took_part = (played.state.memory.row_of >= 0).tolist()
    start = linear_problem().theta0
    return [played.memory(k).personal if took_part[k] else start for k in range(4)], played.thetas[-1]


class Killed(Exception):
    pass


class At:
    """An observer that does something once a round is over."""

    def __init__(self, round_: int, does: Callable[[], None]) -> None:
        self._round, self._does = round_, does

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self._round:
            self._does()

    def end(self, summary: Mapping[str, Any]) -> None: ...


def kill() -> None:
    raise Killed


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


METHODS: dict[str, AnyAlgorithm] = {"fedavg": NOISY, "ditto": Ditto(lr=0.1, batch_size=4, epochs=2, lam=0.1)}


@pytest.mark.parametrize("killed_after", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_that_is_resumed_keeps_the_same_model(method: str, killed_after: int, tmp_path: Path) -> None:
    """The files are the same to the byte: the model, the summary, and the checkpoint with the best model in it."""
    arguments: dict[str, Any] = {"rounds": ROUNDS, "participation": 0.5, "select": "loss", "checkpoint_seconds": 0.0}
    algorithm = METHODS[method]
    run(algorithm, linear_problem(), FEDERATION, out=tmp_path / "whole", **arguments)
    stop = At(killed_after, kill)
    with pytest.raises(Killed):
        run(algorithm, linear_problem(), FEDERATION, out=tmp_path / "cut", observers=[stop], **arguments)
    run(algorithm, linear_problem(), FEDERATION, out=tmp_path / "cut", resume=True, **arguments)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    whole, cut = (newest_tensors(tmp_path / name) for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


@pytest.mark.usefixtures("as_in_a_terminal")
def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    thetas = models()
    stop = At(6, lambda: signal.raise_signal(signal.SIGINT))
    cut = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, select="loss", out=tmp_path, observers=[stop])
    so_far = chosen_round(values("loss", thetas[:7]), lowest=True)
    assert so_far is not None
    assert (cut.summary["status"], cut.summary["rounds"]) == ("interrupted", 7)
    assert_is(cut, thetas[so_far], so_far)
    whole = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, select="loss", out=tmp_path, resume=True)
    at_once = run(NOISY, linear_problem(), FEDERATION, rounds=ROUNDS, select="loss")
    assert torch.equal(whole.theta, at_once.theta)
    assert whole.summary["kept_validation"] == at_once.summary["kept_validation"]
    assert torch.equal(RunResult.load(tmp_path).theta, at_once.theta)


def test_a_run_does_not_go_on_by_another_rule(tmp_path: Path) -> None:
    run(NOISY, linear_problem(), FEDERATION, rounds=2, select="loss", out=tmp_path)
    with pytest.raises(ValueError, match=r"started with eval.select loss and cannot go on with min"):
        run(NOISY, linear_problem(), FEDERATION, rounds=4, select="min", out=tmp_path, resume=True)


def test_the_best_model_needs_validation_examples() -> None:
    without = linear_clients(validation=0.0)
    told = r'`eval.select` is "worst10".*not every client has validation examples.*data.validation = 0.1.*"last"'
    with pytest.raises(ValueError, match=told):
        run(NOISY, linear_problem(), without, rounds=2, select="worst10")
    with pytest.raises(ValueError, match="select"):
        Evaluation(select="best")


def test_where_no_validation_value_is_finite_the_last_model_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert FEDERATION.validation is not None
    inputs = torch.full_like(FEDERATION.validation.inputs, math.nan)
    broken = Examples(inputs, FEDERATION.validation.targets, FEDERATION.validation.starts)
    data = Federation(FEDERATION.train, FEDERATION.test, broken, FEDERATION.names, None, 2)
    result = run(NOISY, linear_problem(), data, rounds=3, select="loss")
    assert_is_model(result, models(3)[-1], 2)
    assert result.summary["kept_validation"] is None
    assert "the last model is kept" in caplog.text
