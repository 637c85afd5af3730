"""CUDA graphs change the speed and nothing else; without a GPU the runner is plain vmap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.adafed import AdaFed
from dqnfed.algorithms.common_descent_messages import Models
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.screening import Policy
from dqnfed.maths.gramian import DEVICE_BLOCK
from dqnfed.sim.cohort import Answers, Begun, Digested, Lookup, vectorised
from dqnfed.sim.engine import run
from dqnfed.sim.graphs import (
    LARGE,
    GraphedBeginning,
    GraphedFunction,
    GraphedStep,
    alike,
    as_they_are,
    bundled,
    graphed,
)
from dqnfed.sim.state import Evaluation
from tests.helpers.quadratic_clients import consistent_quadratics

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = [FedAvg(lr=0.1), FedAvg(lr=0.1, epochs=2), DQNFed(), DQNFed(step="line-search")]


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: f"{type(a).__name__}-{a.epochs}")
def test_without_a_gpu_it_is_plain_vmap(algorithm: AnyAlgorithm) -> None:
    case = consistent_quadratics(4, 6)
    plain = run(algorithm, case.problem, case.federation, rounds=5, cohort=vectorised())
    other = run(algorithm, case.problem, case.federation, rounds=5, cohort=graphed())
    assert torch.equal(plain.theta, other.theta)


class Doubled:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.n_calls += 1
        return [2 * x]


def test_a_function_on_the_host_is_called_as_it_is() -> None:
    function = GraphedFunction(doubled := Doubled())
    for n_calls in (1, 2, 3):
        assert torch.equal(function(torch.ones(3))[0], torch.full((3,), 2.0))
        assert doubled.n_calls == n_calls


class DigestsOnTheHost:
    """Attaches digests as the runner for GPUs does, and counts them."""

    def __init__(self) -> None:
        self.n_digests = self.n_begun = self.n_used = self.n_compared = 0

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        updates, kept, _ = self.digested(algorithm, problem, tasks, sent, memory, as_they_are)
        return updates, kept

    def digests(self, device: torch.device) -> bool:
        return True

    def digested(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        tasks: Task,
        sent: Any,
        memory: Any,
        looked_up: Lookup,
        rows: Tensor | None = None,
        begun: Begun | None = None,
    ) -> Digested:
        found = GraphedStep(algorithm, problem, tasks, sent, memory, looked_up)(tasks, sent, memory, rows, begun)
        self.n_digests += 1
        self.n_compared += rows is not None and len(rows) > 0
        self.n_used += isinstance(sent, Models) and memory.gradient.numel() > 0
        return found

    def begun(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> Begun:
        self.n_begun += 1
        return GraphedBeginning(algorithm, problem, tasks, sent, looked_up)(tasks, sent)


def _serves_the_absent(algorithm: AnyAlgorithm) -> bool:
    return isinstance(algorithm, DQNFed) and algorithm.constraint == "at-least" and algorithm.drop_share == 0.0


DIGESTED = [*METHODS, DQNFed(metric="identity"), DQNFed(constraint="exactly"), DQNFed(drop_share=0.3), AdaFed(), MGDA()]


@pytest.mark.parametrize("algorithm", DIGESTED, ids=lambda a: f"{type(a).__name__}-{a.epochs}")
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_run_with_digests_is_one_without(algorithm: AnyAlgorithm, participation: float) -> None:
    case = consistent_quadratics(6, 8)
    runner = DigestsOnTheHost()
    plain, digested = (
        run(algorithm, case.problem, case.federation, rounds=8, participation=participation, cohort=cohort)
        for cohort in (vectorised(), runner)
    )
    assert runner.n_digests >= plain.summary["rounds"]
    assert (runner.n_compared > 0) == (_serves_the_absent(algorithm) and participation < 1.0)
    torch.testing.assert_close(digested.theta, plain.theta, rtol=1e-9, atol=1e-11)
    assert [r["status"] for r in plain.history] == [r["status"] for r in digested.history]


@pytest.mark.parametrize("algorithm", [DQNFed(), DQNFed(metric="lbfgs"), AdaFed()], ids=lambda a: type(a).__name__)
def test_clients_that_begin_early_end_where_the_others_do(algorithm: AnyAlgorithm) -> None:
    """Whether a round's step was made, or held because a client asked for what nobody can give, and the next cohort had
    begun in vain.
    """
    case = consistent_quadratics(6, 8)
    bad = case.federation.train.targets.clone()
    bad[2] = torch.nan
    federation = replace(case.federation, train=case.federation.train._replace(targets=bad))
    runner = DigestsOnTheHost()
    plain, early = (
        run(
            algorithm,
            case.problem,
            federation,
            rounds=12,
            participation=0.34,
            cohort=cohort,
            policy=Policy(min_replies=2),
            evaluation=Evaluation(participants=False),
        )
        for cohort in (vectorised(), runner)
    )
    assert {"next", "hold"} <= {r["status"] for r in plain.history}
    assert 0 < runner.n_used < runner.n_begun
    assert [r["status"] for r in plain.history] == [r["status"] for r in early.history]
    torch.testing.assert_close(early.theta, plain.theta, rtol=1e-9, atol=1e-11)
    assert early.summary["totals"]["passes"] == plain.summary["totals"]["passes"]


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.01), DQNFed(), MGDA(lr=0.01)], ids=lambda a: type(a).__name__)
def test_digests_follow_clipping_and_dropping(algorithm: AnyAlgorithm) -> None:
    case = consistent_quadratics(6, 8)
    factors = torch.tensor([100.0, 1.0, 0.0, 1.0, torch.nan, 1.0], dtype=torch.float64)  # clipped, zero, not finite
    hessians = case.federation.train.targets * factors[:, None]
    federation = replace(case.federation, train=case.federation.train._replace(targets=hessians))
    plain, digested = (
        run(algorithm, case.problem, federation, rounds=5, cohort=cohort, evaluation=Evaluation(participants=False))
        for cohort in (vectorised(), DigestsOnTheHost())
    )
    assert plain.summary["n_clipped"] > 0
    assert plain.summary["n_dropped"] >= 2 * plain.summary["rounds"]
    for name in ("rounds", "n_clipped", "n_dropped"):
        assert digested.summary[name] == plain.summary[name]
    torch.testing.assert_close(digested.theta, plain.theta, rtol=1e-9, atol=1e-12)


@needs_gpu
@pytest.mark.parametrize(
    "algorithm", [*METHODS, DQNFed(metric="identity")], ids=lambda a: f"{type(a).__name__}-{a.epochs}"
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_on_a_gpu_the_bits_are_those_of_vmap(algorithm: AnyAlgorithm, participation: float) -> None:
    case = consistent_quadratics(4, 6)
    problem, federation = case.problem.to("cuda"), case.federation.to("cuda")
    runs = [
        run(algorithm, problem, federation, rounds=8, participation=participation, cohort=cohort)
        for cohort in (vectorised(), graphed())
    ]
    assert torch.equal(runs[0].theta, runs[1].theta)


def large_case(dtype: torch.dtype) -> tuple[Problem, Federation]:
    """Return a network whose gradients are longer than a block of products, and clients for it."""
    g = torch.Generator().manual_seed(0)
    clients = []
    for c in range(12):
        labels = torch.randint(0, 2, (40,), generator=g) + c % 9
        inputs = torch.randn(40, 20, generator=g) + 2 * torch.nn.functional.one_hot(labels, 20)
        clients.append((inputs.to(dtype), labels))
    torch.manual_seed(1)
    layers = [torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)]
    return Problem.from_module(torch.nn.Sequential(*layers).to(dtype)), Federation.from_clients(clients)


@needs_gpu
@pytest.mark.parametrize(
    "algorithm",
    [
        DQNFed(metric="identity"),
        DQNFed(metric="lbfgs"),
        DQNFed(step="line-search"),
        DQNFed(metric="identity", absentees=0),
        FedAvg(lr=0.1, batch_size=8),
    ],
    ids=lambda a: f"{type(a).__name__}-{getattr(a, 'metric', '')}-{getattr(a, 'step', '')}",
)
def test_on_a_gpu_phases_that_come_again_are_captured(
    algorithm: AnyAlgorithm, caplog: pytest.LogCaptureFixture
) -> None:
    """And the run is that of plain vmap, with its evaluations; a fallback would be slow and silent."""
    problem, federation = large_case(torch.float64)
    assert problem.n_parameters > DEVICE_BLOCK
    problem, federation = problem.to("cuda"), federation.to("cuda")
    runner = graphed()
    with caplog.at_level("INFO", logger="dqnfed"):
        plain, other = (
            run(
                algorithm,
                problem,
                federation,
                rounds=30,
                participation=0.34,
                cohort=cohort,
                evaluation=Evaluation(every=3),
            )
            for cohort in (vectorised(), runner)
        )
    assert not [record for record in caplog.messages if "no CUDA graph" in record]
    functions = [step._function for step in runner._steps.values()]
    functions += [step._function for step in runner._beginnings.values()]
    assert not any(function._gave_up for function in functions)
    assert any(function._graphs for function in functions)
    torch.testing.assert_close(other.theta, plain.theta, rtol=1e-6, atol=1e-9)
    for mine, its in zip(other.history, plain.history, strict=True):
        for part in ("accuracy", "train_loss"):
            assert (mine[part] is None) == (its[part] is None)
            if its[part] is not None:
                assert mine[part] == pytest.approx(its[part], rel=1e-6)


@needs_gpu
@pytest.mark.parametrize("algorithm", [DQNFed(metric="lbfgs"), DQNFed(metric="identity"), DQNFed(step="line-search")])
def test_on_a_gpu_every_phase_can_be_captured(
    algorithm: AnyAlgorithm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come once in a run too, here called twice, and those that compare nothing with the absent."""
    problem, federation = large_case(torch.float64)
    problem, federation = problem.to("cuda"), federation.to("cuda")
    once = GraphedFunction.__call__

    def twice(function: GraphedFunction, *given: Tensor, lying: Sequence[int] = ()) -> Sequence[Tensor]:
        once(function, *given, lying=lying)
        return once(function, *given, lying=lying)

    plain = run(algorithm, problem, federation, rounds=8, participation=0.5, cohort=vectorised())
    monkeypatch.setattr(GraphedFunction, "__call__", twice)
    runner = graphed()
    with caplog.at_level("INFO", logger="dqnfed"):
        other = run(algorithm, problem, federation, rounds=8, participation=0.5, cohort=runner)
    assert not [record for record in caplog.messages if "no CUDA graph" in record]
    assert all(step._function._graphs for step in runner._steps.values())
    torch.testing.assert_close(other.theta, plain.theta, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("algorithm", [DQNFed(metric="identity"), MGDA(lr=0.01)], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_an_answer_too_long_to_be_squared_is_cut_all_the_same(
    algorithm: AnyAlgorithm, dtype: torch.dtype, longest: float
) -> None:
    case = consistent_quadratics(6, 8)
    factors = torch.tensor([longest, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=dtype)
    parts = [getattr(case.federation, part) for part in ("train", "test")]
    train, test = (part._replace(inputs=part.inputs.to(dtype), targets=part.targets.to(dtype)) for part in parts)
    train = train._replace(targets=train.targets * factors[:, None])
    federation, problem = (
        replace(case.federation, train=train, test=test),
        replace(case.problem, theta0=case.problem.theta0.to(dtype)),
    )
    plain, digested = (
        run(algorithm, problem, federation, rounds=5, cohort=cohort, evaluation=Evaluation(participants=False))
        for cohort in (vectorised(), DigestsOnTheHost())
    )
    for name in ("rounds", "n_clipped", "n_dropped", "status"):
        assert digested.summary[name] == plain.summary[name]
    torch.testing.assert_close(digested.theta, plain.theta, rtol=1e-3, atol=1e-6)


def test_tensors_are_grouped_for_few_launches() -> None:
    given = [torch.ones(3), torch.ones(0), torch.ones(3), torch.arange(3), torch.ones(2), torch.ones(LARGE + 1)]
    assert alike(given, key=lambda t: t.dtype) == [[0, 2, 4], [3], [5]]
    assert alike(given, key=lambda t: (t.shape, t.dtype)) == [[0, 2], [3], [4], [5]]
    assert torch.equal(bundled([given[0], 2 * given[2]]), torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert bundled([given[5]]).data_ptr() == given[5].data_ptr()


TIMES = 3  # as it is, captured, replayed


@needs_gpu
def test_answers_of_all_shapes_come_back_in_order() -> None:
    function = GraphedFunction(lambda x, y, n: [x + 1, x[:0], n + 1, y * 2, x + 3, n])
    for value in range(TIMES):
        x, y, n = torch.full((4,), float(value)), torch.full((2, 3), float(value)), torch.arange(4)
        found = function(*(t.cuda() for t in (x, y, n)))
        expected = [x + 1, x[:0], n + 1, y * 2, x + 3, n]
        assert all(torch.equal(mine.cpu(), other) for mine, other in zip(found, expected, strict=True))


@needs_gpu
def test_what_is_done_once_is_not_captured() -> None:
    function = GraphedFunction(doubled := Doubled())
    for n, n_calls in ((3, 1), (4, 2), (3, 3), (3, 3), (4, 4), (4, 4)):  # a capture is a call, a replay is none
        assert torch.equal(function(torch.ones(n, device="cuda"))[0].cpu(), torch.full((n,), 2.0))
        assert doubled.n_calls == n_calls


@needs_gpu
def test_answers_outlive_the_next_replay() -> None:
    function = GraphedFunction(lambda x: [x + 1])
    answers = [function(torch.full((4,), float(value), device="cuda"))[0] for value in range(TIMES + 1)]
    assert [answer.tolist() for answer in answers] == [[value + 1.0] * 4 for value in range(TIMES + 1)]


@needs_gpu
def test_a_fleeting_answer_holds_until_the_next_call() -> None:
    told: list[float] = []
    function = GraphedFunction(lambda x: [x + 1, x + 2], n_fleeting=1, awaited=lambda t: told.append(float(t[0])))
    for value in range(TIMES + 1):
        lasting, fleeting = function(torch.full((4,), float(value), device="cuda"))
        assert torch.equal(lasting.cpu() + 1, fleeting.cpu())
        assert torch.equal(fleeting.cpu(), torch.full((4,), value + 2.0))
    assert told == [value + 2.0 for value in range(TIMES + 1)]


@needs_gpu
@pytest.mark.parametrize("place", [0, 1])
def test_what_lies_still_is_read_where_it_lies(place: int) -> None:
    function = GraphedFunction(lambda a, b: [a.sum(0) + b.sum(0)])
    rows, elsewhere = torch.ones(3, 4, device="cuda"), torch.full((3, 4), 7.0, device="cuda")
    for there, total in ((rows, 3.0), (rows, 6.0), (elsewhere, 21.0), (rows, 9.0), (rows, 12.0), (elsewhere, 21.0)):
        x = torch.rand(1, 4, device="cuda")
        given = (there, x) if place == 0 else (x, there)
        assert torch.equal(function(*given, lying=[place])[0], x[0] + total)
        rows += 1.0 if there is rows else 0.0
