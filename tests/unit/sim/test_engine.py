"""The loop: records that add up, clients that fail, rounds that hold, runs that are stopped."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Policy, RunResult, run
from dqnfed.algorithms.fedavg import FedAvgServer, FedAvgUpdate
from dqnfed.algorithms.scaffold import Scaffold, ScaffoldServer
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta
from dqnfed.core.federation import Examples
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.core.run_folder import load_tensors
from dqnfed.core.runners import CohortRunner, looped, vectorised
from dqnfed.maths.fairness import fairness_summary
from dqnfed.sim.clients import evaluate
from tests.helpers.bowls import (
    federation_of,
    labelled_clients,
    linear_model,
    network_bowl,
    quadratic_bowl,
    regression_clients,
)
from tests.helpers.folders import newest_tensors


def with_inputs(federation: Federation, client: int, value: float) -> Federation:
    """Return the federation in which all inputs of one client are the given number."""
    inputs = federation.train.inputs.clone()
    inputs[int(federation.train.starts[client]) : int(federation.train.starts[client + 1])] = value
    examples = federation.train._replace(inputs=inputs)
    return Federation(examples, examples, n_classes=federation.n_classes)


def without(federation: Federation, client: int) -> Federation:
    """Return the federation without one client."""
    train = federation.train
    kept = torch.tensor([c for c in range(federation.n_clients) if c != client])
    rows = train.rows(kept)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), train.sizes[kept].cumsum(0)])
    examples = Examples(train.inputs[rows], train.targets[rows], starts)
    return Federation(examples, examples, n_classes=federation.n_classes)


def weights_alone() -> tuple[Problem, Federation]:
    """Return softmax regression without bias and ridge: inputs of zero have no gradient, whatever was learnt."""
    return Problem.from_module(linear_model(4, 3)), federation_of(labelled_clients(6, 4))


def test_records_add_up() -> None:
    problem, federation, _ = network_bowl()
    result = run(FedAvg(epochs=2), problem, federation, rounds=5, participation=0.5)
    n_bytes = 8 * problem.n_parameters
    rounds = result.history[1:]
    for record in rounds:
        assert len(record["clients"]) == 3
        assert record["bytes_up"] == record["bytes_down"] == 3 * n_bytes
        assert record["passes"] == 2 * 3
    totals = result.summary["totals"]
    assert totals["bytes_up"] == totals["bytes_down"] == 5 * 3 * n_bytes
    assert totals["passes"] == 30
    assert totals["seconds"] == pytest.approx(sum(r["seconds"] for r in rounds))
    assert result.summary["rho_mean"] == pytest.approx(sum(r["rho"] for r in rounds) / 5)
    assert result.summary["rounds"] == 5
    assert result.summary["status"] == "finished"


def test_records_say_what_the_models_say() -> None:
    """Every number of the last round, computed again from the model before and the model after it."""
    problem, federation, _ = network_bowl()
    before = run(FedAvg(), problem, federation, rounds=2, participation=0.5).theta
    result = run(FedAvg(), problem, federation, rounds=3, participation=0.5)
    last, everyone = result.history[-1], torch.arange(6)
    losses_before = evaluate(problem, before, federation.train, everyone).loss
    after = evaluate(problem, result.theta, federation.train, everyone)
    assert after.score is not None
    who = torch.tensor(last["clients"])
    assert last["loss_before"] == pytest.approx(float(losses_before[who].mean()), rel=1e-12)
    assert last["loss_after"] == pytest.approx(float(after.loss[who].mean()), rel=1e-12)
    assert last["rho"] == float((after.loss[who] <= losses_before[who]).double().mean())
    assert last["train_loss"]["mean"] == pytest.approx(float(after.loss.mean()), rel=1e-12)
    assert last["train_loss"]["max"] == pytest.approx(float(after.loss.max()), rel=1e-12)
    assert last["accuracy"] == pytest.approx(fairness_summary(after.score, weights=federation.n_examples))
    rows = {row[1]: row for row in result.client_rows if row[0] == 2}
    assert sorted(rows) == list(range(6))
    for c, (_, _, n, was, now, accuracy) in rows.items():
        assert n == int(federation.n_examples[c])
        assert was == (pytest.approx(float(losses_before[c]), rel=1e-12) if c in last["clients"] else None)
        assert now == pytest.approx(float(after.loss[c]), rel=1e-12)
        assert accuracy == pytest.approx(float(after.score[c]))


def test_the_summary_names_changed_settings_without_effect() -> None:
    problem, federation, _ = network_bowl(n_clients=2)
    assert run(FedAvg(), problem, federation, rounds=1).summary["unused"] == []
    assert run(FedAvg(lr_decay_every=5), problem, federation, rounds=1).summary["unused"] == ["lr_decay_every"]
    assert run(FedAvg(lr_decay_every=5, lr_decay=0.5), problem, federation, rounds=1).summary["unused"] == []


def test_the_plain_form_gives_the_same_model() -> None:
    problem, federation, _ = network_bowl()
    algorithm = FedAvg(epochs=2, batch_size=4)
    plain = run(algorithm, problem, federation, rounds=3, accelerate=False)
    faster = run(algorithm, problem, federation, rounds=3)
    torch.testing.assert_close(faster.theta, plain.theta, rtol=1e-12, atol=1e-14)


def test_the_start_is_round_minus_one() -> None:
    problem, federation, _ = network_bowl()
    result = run(FedAvg(), problem, federation, rounds=1)
    assert [r["round"] for r in result.history] == [-1, 0]
    assert result.summary["start"]["train_loss"]["mean"] == pytest.approx(math.log(3))
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize("rounds", [0, -1, 2.5, math.inf, True, "3", None])
def test_rounds_is_a_whole_number(rounds: Any) -> None:
    problem, federation, _ = network_bowl()
    with pytest.raises(ValueError, match="`rounds` must be a whole number >= 1, but is"):
        run(FedAvg(), problem, federation, rounds=rounds)


def test_evaluations_are_as_rare_as_asked_and_change_nothing() -> None:
    problem, federation, _ = network_bowl()
    often = run(FedAvg(), problem, federation, rounds=5, participation=0.5)
    rare = run(FedAvg(), problem, federation, rounds=5, participation=0.5, evaluation=Evaluation(every=3))
    never = run(
        FedAvg(), problem, federation, rounds=5, evaluation=Evaluation(every=9, participants=False), participation=0.5
    )
    assert torch.equal(often.theta, rare.theta)
    assert torch.equal(often.theta, never.theta)
    assert [r["round"] for r in rare.history if r["accuracy"] is not None] == [-1, 2, 4]
    assert [r["rho"] for r in rare.history] == pytest.approx([r["rho"] for r in often.history])
    assert {row[0] for row in rare.client_rows} == {-1, 0, 1, 2, 3, 4}
    assert [r["rho"] for r in never.history] == [None] * 6
    assert never.summary["rho_mean"] is None
    assert {row[0] for row in never.client_rows} == {-1, 4}


def test_a_client_that_replies_nan_is_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    problem, federation, _ = network_bowl()
    with caplog.at_level(logging.WARNING, "dqnfed"):
        broken = run(FedAvg(), problem, with_inputs(federation, 2, math.nan), rounds=3)
    alone = run(FedAvg(), problem, without(federation, 2), rounds=3)
    assert torch.equal(broken.theta, alone.theta)
    assert all(r["dropped"] == [{"client": 2, "why": "update is not finite"}] for r in broken.history[1:])
    assert broken.summary["n_dropped"] == 3
    assert "round 1: client 2 dropped, its update is not finite" in caplog.text


def test_a_client_without_a_gradient_is_dropped_and_the_others_go_on() -> None:
    problem, federation = weights_alone()
    broken = run(FedAvg(), problem, with_inputs(federation, 2, 0.0), rounds=3)
    assert torch.equal(broken.theta, run(FedAvg(), problem, without(federation, 2), rounds=3).theta)
    assert all(r["dropped"] == [{"client": 2, "why": "update has zero norm"}] for r in broken.history[1:])


def test_an_update_that_is_too_long_is_clipped_and_logged() -> None:
    """On least squares the gradient at zero is X'y/n: targets that are 10^4 times larger make it as much longer."""
    clients = regression_clients(5, 4)
    clients[3] = (clients[3][0], 1e4 * clients[3][1])
    problem = quadratic_bowl(5, 4).problem
    result = run(FedAvg(), problem, federation_of(clients), rounds=1)
    (clipped,) = result.history[-1]["clipped"]
    assert clipped["client"] == 3
    assert clipped["factor"] < 1e-2
    assert result.summary["n_clipped"] == 1
    free = run(FedAvg(), problem, federation_of(clients), rounds=1, policy=Policy(max_update_norm=math.inf))
    assert free.history[-1]["clipped"] == []
    assert free.theta.norm() > 50 * result.theta.norm()


def test_if_nobody_is_left_the_model_stays() -> None:
    problem, federation, _ = network_bowl(n_clients=2)
    for c in range(2):
        federation = with_inputs(federation, c, math.nan)
    result = run(FedAvg(), problem, federation, rounds=3)
    assert torch.equal(result.theta, problem.theta0)
    assert [r["status"] for r in result.history[1:]] == ["hold"] * 3
    assert (result.summary["status"], result.summary["rounds"]) == ("diverged", 3)  # its loss is no number


def test_too_few_replies_hold_the_model() -> None:
    problem, federation, _ = network_bowl(n_clients=3)
    broken = with_inputs(federation, 0, math.nan)
    assert run(FedAvg(), problem, broken, rounds=1, policy=Policy(min_replies=3)).history[-1]["status"] == "hold"
    assert run(FedAvg(), problem, broken, rounds=1, policy=Policy(min_replies=2)).history[-1]["status"] == "next"


def test_a_policy_that_no_round_can_meet_is_refused() -> None:
    problem, federation, _ = network_bowl(n_clients=4)
    with pytest.raises(ValueError, match="min_replies` is 3, but only 2 clients are asked"):
        run(FedAvg(), problem, federation, rounds=1, participation=0.5, policy=Policy(min_replies=3))


def test_a_failing_policy_names_client_round_and_way_out() -> None:
    problem, federation, _ = network_bowl()
    with pytest.raises(ValueError, match=r'client 2 sent an update that is not finite in round 0.*"drop" goes on'):
        run(FedAvg(), problem, with_inputs(federation, 2, math.nan), rounds=1, policy=Policy(on_nonfinite="fail"))


def test_regression_with_a_broken_client_goes_on(tmp_path: Path) -> None:
    """Its score is no number, so neither is any mean that counts it; the run, the model and the files are fine."""
    problem, federation, _ = quadratic_bowl(5, 4)
    result = run(FedAvg(), problem, with_inputs(federation, 1, math.nan), rounds=2, out=tmp_path)
    assert torch.isfinite(result.theta).all()
    assert math.isnan(result.accuracy["mean"])
    loaded = RunResult.load(tmp_path)
    assert loaded.summary["accuracy"]["mean"] is None
    scores = [row[5] for row in loaded.client_rows if row[0] == 1]
    assert [math.isfinite(score) for score in scores] == [True, False, True, True, True]


def test_a_model_that_leaves_the_numbers_stops_the_run() -> None:
    problem, federation, _ = quadratic_bowl(3, 4)
    result = run(FedAvg(lr=10.0, server_lr=1e308), problem, federation, rounds=10)
    assert result.summary["status"] == "diverged"
    assert "not finite after round" in result.summary["reason"]
    assert result.summary["rounds"] == len(result.history) - 1 < 10


def test_a_run_says_once_that_it_diverges_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    problem, federation, _ = quadratic_bowl(3, 4)
    run(FedAvg(lr=3.0, epochs=3), problem, federation, rounds=6, evaluation=Evaluation(every=2))
    said = [record for record in caplog.records if "the run is diverging" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert "the mean training loss rose from" in said[0].getMessage()


def test_a_run_whose_clients_send_no_number_any_more_is_not_finished() -> None:
    """The model and its loss are fine, but what the server sends breaks every client's work: nothing is learnt."""
    problem, federation, _ = network_bowl(n_clients=4)

    class Broken(Scaffold):
        def init_server(self, problem: Problem, n_clients: int) -> ScaffoldServer:
            return super().init_server(problem, n_clients)._replace(control=torch.full_like(problem.theta0, math.inf))

    assert run(Scaffold(lr=0.1, epochs=2), problem, federation, rounds=4).summary["status"] == "finished"
    found = run(Broken(lr=0.1, epochs=2), problem, federation, rounds=4)
    assert (found.summary["status"], found.summary["rounds"]) == ("diverged", 4)
    assert found.summary["reason"] == "no client has sent a finite update in the last 4 rounds"


class TwoPhases(NamedTuple):
    theta: Tensor  # [n]
    phase: Tensor  # []


class First(NamedTuple):
    theta: Tensor  # [n]


class Second(NamedTuple):
    theta: Tensor  # [n]


class SecondReply(NamedTuple):
    value: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class AsksTwice(FedAvg):
    """FedAvg with a second phase before its step; some clients have no number to send in that one."""

    info: ClassVar[Info] = replace(
        FedAvg.info, server=TwoPhases, messages=(First, Second), replies=(FedAvgUpdate, SecondReply)
    )
    silent: float = 0.0  # clients with a mean input below this send NaN in the second phase

    def init_server(self, problem: Problem, n_clients: int) -> TwoPhases:  # type: ignore[override]
        return TwoPhases(problem.theta0.clone(), torch.tensor(0))

    def send(self, server: TwoPhases) -> First | Second:  # type: ignore[override]
        return First(server.theta) if int(server.phase) == 0 else Second(server.theta)

    def client_step(  # type: ignore[override]
        self, problem: Problem, task: Task, sent: First | Second, memory: Empty
    ) -> tuple[FedAvgUpdate | SecondReply, Empty]:
        if isinstance(sent, First):
            return super().client_step(problem, task, Theta(sent.theta), memory)
        mean = (task.inputs.mean(1) * task.mask).sum() / task.mask.sum()
        return SecondReply(torch.where(mean < self.silent, torch.nan, mean)), memory

    def server_step(  # type: ignore[override]
        self, server: TwoPhases, replies: Replies[Any], cohort: Cohort
    ) -> ServerStep[TwoPhases]:
        if replies.kind is FedAvgUpdate:
            stepped = super().server_step(FedAvgServer(server.theta), replies, cohort).server
            return ServerStep(TwoPhases(stepped.theta, torch.tensor(1)), Status.AGAIN, {"first": 1.0})
        return ServerStep(
            TwoPhases(server.theta, torch.tensor(0)), Status.NEXT, {"second": float(len(replies.scalars("value")))}
        )

    def passes(self, sent: Any) -> float:
        return 1.0 if isinstance(sent, First) else 0.5


def test_phases_are_added_up() -> None:
    problem, federation, _ = network_bowl()
    result = run(AsksTwice(silent=-math.inf), problem, federation, rounds=2)
    record, n_bytes = result.history[-1], 8 * problem.n_parameters
    assert record["bytes_up"] == 6 * (n_bytes + 8)
    assert record["bytes_down"] == 6 * 2 * n_bytes
    assert record["passes"] == 6 * 1.5
    assert record["diagnostics"] == {"first": 1.0, "second": 6.0}
    assert torch.equal(result.theta, run(FedAvg(), problem, federation, rounds=2).theta)


def test_a_round_that_loses_everybody_halfway_goes_back_to_its_start() -> None:
    problem, federation, _ = network_bowl()
    result = run(AsksTwice(silent=math.inf), problem, federation, rounds=2)
    assert torch.equal(result.theta, problem.theta0)
    for record in result.history[1:]:
        assert record["status"] == "hold"
        assert record["diagnostics"] == {"first": 1.0}  # the next round starts with the first phase again
        assert record["loss_after"] == record["loss_before"]


class Counted(NamedTuple):
    n_phases: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class AsksTwiceAndCounts(AsksTwice):
    """Its clients count the phases of rounds that were not lost."""

    info: ClassVar[Info] = replace(AsksTwice.info, memory=Counted)

    def init_memory(self, problem: Problem, task: Task) -> Counted:  # type: ignore[override]
        return Counted(problem.theta0.new_zeros(()))

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: Any) -> Any:
        update, _ = super().client_step(problem, task, sent, Empty(problem.theta0.new_zeros(0)))
        return update, Counted(memory.n_phases + 1)


@pytest.mark.parametrize("cohort", [vectorised(), looped()])
@pytest.mark.parametrize(("silent", "n_phases"), [(-math.inf, 6.0), (math.inf, None)])
def test_clients_forget_a_round_that_is_lost_halfway(
    cohort: CohortRunner, silent: float, n_phases: float | None, tmp_path: Path
) -> None:
    problem, federation, _ = network_bowl()
    run(AsksTwiceAndCounts(silent=silent), problem, federation, rounds=3, cohort=cohort, out=tmp_path)
    kept, _ = load_tensors(newest_tensors(tmp_path))
    if n_phases is None:
        assert bool((kept["memory_row_of"] == -1).all())
    else:
        assert kept["memory.n_phases"].tolist() == [n_phases] * 6


@pytest.mark.parametrize("fault", [math.nan, 0.0])
def test_a_client_dropped_in_one_phase_is_not_asked_in_the_next(fault: float) -> None:
    problem, federation = weights_alone()
    broken = with_inputs(federation, 4, fault)
    result = run(AsksTwice(silent=-math.inf), problem, broken, rounds=2)
    n_bytes = 8 * problem.n_parameters
    for record in result.history[1:]:
        assert [drop["client"] for drop in record["dropped"]] == [4]
        assert record["diagnostics"]["second"] == 5.0
        assert record["bytes_down"] == (6 + 5) * n_bytes
        assert record["passes"] == 6 * 1.0 + 5 * 0.5
        assert record["clients"] == [0, 1, 2, 3, 4, 5]


def test_a_line_search_does_without_those_who_have_no_gradient() -> None:
    """They have no loss to compare with, so asking them would make every step look too long."""
    problem, federation = weights_alone()
    result = run(DQNFed(step="line-search"), problem, with_inputs(federation, 2, 0.0), rounds=3)
    assert [record["status"] for record in result.history[1:]] == ["next"] * 3
    assert result.summary["train_loss"]["mean"] < 0.8 * result.summary["start"]["train_loss"]["mean"]


@dataclass(frozen=True, kw_only=True)
class NeverDone(FedAvg):
    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        return ServerStep(server, Status.AGAIN)


@dataclass(frozen=True, kw_only=True)
class DoneAtOnce(FedAvg):
    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        return super().server_step(server, replies, cohort)._replace(status=Status.STOP, reason="that was it")


def test_endless_phases_are_refused() -> None:
    problem, federation, _ = network_bowl(n_clients=1)
    with pytest.raises(RuntimeError, match="NeverDone asked for more than 200 phases in round 0"):
        run(NeverDone(), problem, federation, rounds=1)


def test_a_method_may_end_the_run_and_stays_stopped(tmp_path: Path) -> None:
    problem, federation, _ = network_bowl(n_clients=2)
    result = run(DoneAtOnce(), problem, federation, rounds=5, out=tmp_path)
    assert (result.summary["status"], result.summary["reason"], result.summary["rounds"]) == (
        "stopped",
        "that was it",
        1,
    )
    resumed = run(DoneAtOnce(), problem, federation, rounds=5, out=tmp_path, resume=True)
    assert (resumed.summary["status"], resumed.summary["rounds"]) == ("stopped", 1)


class Listener:
    """An observer that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        self.calls.append("start")

    def round(self, record: Mapping[str, Any]) -> None:
        self.calls.append(f"round {record['round']}")

    def end(self, summary: Mapping[str, Any]) -> None:
        self.calls.append(summary["status"])


def test_observers_get_every_round_once() -> None:
    problem, federation, _ = network_bowl(n_clients=2)
    listener = Listener()
    run(FedAvg(), problem, federation, rounds=2, observers=[listener])
    assert listener.calls == ["start", "round 0", "round 1", "finished"]


def test_another_run_cannot_go_on_in_a_folder(tmp_path: Path) -> None:
    problem, federation, _ = network_bowl(n_clients=4)
    run(FedAvg(), problem, federation, rounds=1, out=tmp_path)
    with pytest.raises(ValueError, match="was started with seed 0 and cannot go on with 1"):
        run(FedAvg(), problem, federation, rounds=2, out=tmp_path, resume=True, seed=1)
    with pytest.raises(ValueError, match=r"was started with algorithm FedAvg\(.* and cannot go on with AsksTwice\("):
        run(AsksTwice(), problem, federation, rounds=2, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="was started with clients a round 4 and cannot go on with 2"):
        run(FedAvg(), problem, federation, rounds=2, out=tmp_path, resume=True, participation=0.5)
    other = federation_of(labelled_clients(5, 4))
    with pytest.raises(ValueError, match="was started with clients 4 and cannot go on with 5"):
        run(FedAvg(), problem, other, rounds=2, out=tmp_path, resume=True)


def test_resuming_needs_a_folder_and_starts_where_there_is_none(tmp_path: Path) -> None:
    problem, federation, _ = network_bowl(n_clients=2)
    with pytest.raises(ValueError, match="`resume=True` needs `out`"):
        run(FedAvg(), problem, federation, rounds=1, resume=True)
    result = run(FedAvg(), problem, federation, rounds=1, out=tmp_path / "new", resume=True)
    assert result.summary["rounds"] == 1


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path) -> None:
    problem, federation, _ = network_bowl(n_clients=3)
    run(FedAvg(), problem, federation, rounds=2, out=tmp_path)
    longer = run(FedAvg(), problem, federation, rounds=4, out=tmp_path, resume=True)
    assert torch.equal(longer.theta, run(FedAvg(), problem, federation, rounds=4).theta)
    assert [r["round"] for r in longer.history] == [-1, 0, 1, 2, 3]


def test_an_old_checkpoint_in_the_folder_is_not_the_new_runs(tmp_path: Path) -> None:
    """A run that fails before its first checkpoint starts again from its own start."""
    problem, federation, _ = network_bowl(n_clients=3)
    run(FedAvg(lr=0.5), problem, federation, rounds=4, out=tmp_path)
    with pytest.raises(FileExistsError, match="already holds a run, which is not overwritten"):
        run(FedAvg(lr=0.1), problem, federation, rounds=4, out=tmp_path)
    shutil.rmtree(tmp_path)

    class Crash(Listener):
        def round(self, record: Mapping[str, Any]) -> None:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(FedAvg(lr=0.1), problem, federation, rounds=4, out=tmp_path, observers=[Crash()])
    resumed = run(FedAvg(lr=0.1), problem, federation, rounds=4, out=tmp_path, resume=True)
    assert torch.equal(resumed.theta, run(FedAvg(lr=0.1), problem, federation, rounds=4).theta)


def test_validation_examples_are_scored_when_asked() -> None:
    inputs, targets = torch.randn(60, 4, dtype=torch.float64), torch.arange(60) % 3
    federation = Federation.from_arrays(inputs, targets, [k % 3 for k in range(60)], validation=0.3)
    problem = network_bowl().problem
    result = run(FedAvg(), problem, federation, rounds=1, evaluation=Evaluation(part="validation"))
    assert federation.validation is not None
    found = evaluate(problem, result.theta, federation.validation, torch.arange(3)).score
    assert found is not None
    assert result.accuracy["mean"] == pytest.approx(float(found.mean()))


def test_observers_learn_that_a_run_failed() -> None:
    """A progress bar or tracker can close what it opened, and the error still reaches the caller."""

    class Listener:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def start(self, out: object, config: object) -> None:
            self.calls.append("start")

        def round(self, record: object) -> None:
            raise RuntimeError("the disk is on fire")

        def end(self, summary: dict[str, str]) -> None:
            self.calls.append(summary["status"])

    listener = Listener()
    case = quadratic_bowl()
    with pytest.raises(RuntimeError, match="on fire"):
        run(FedAvg(), case.problem, case.federation, rounds=2, observers=[listener])  # type: ignore[list-item]
    assert listener.calls == ["start", "failed"]
