"""CUDA graphs change the speed and nothing else; a CPU emulates them, so that stale tensors are seen without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.accel.graph_runner import NOT_CAPTURED, Graphed, cuda_graph_safe, graphed
from dqnfed.accel.graphs import LARGE, MAX_GRAPHS, GraphedFunction, grouped, rows_of
from dqnfed.accel.products import BLOCK
from dqnfed.accel.replies import GraphReplies
from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.adafed import AdaFed
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.algorithms.scaffold import Scaffold
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.runners import vectorised
from dqnfed.core.screening import Policy
from dqnfed.sim import engine
from dqnfed.sim.state import Evaluation
from tests.helpers.quadratic_clients import consistent_quadratics
from tests.helpers.quick import every

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]  # a CPU emulates
run = partial(engine.run, accelerate=True)
METHODS = [DQNFed(), FedAvg(lr=0.1), Scaffold(lr=0.1), FedAvg(lr=0.1, epochs=2), DQNFed(step="line-search")]


def named(algorithm: AnyAlgorithm) -> str:
    return f"{type(algorithm).__name__}-{getattr(algorithm, 'step', '')}-{getattr(algorithm, 'metric', '')}"


def share_of(algorithm: AnyAlgorithm, share: float) -> float:
    """Return the share of the clients, or all where the method compares the same clients' gradients."""
    needs_all = getattr(algorithm, "step", "") == "line-search" or getattr(algorithm, "metric", "") == "lbfgs"
    return 1.0 if needs_all else share


def some_slow(algorithms: Sequence[AnyAlgorithm], n_quick: int = 3) -> list[Any]:
    """Return the methods as parameters, all but the first of them slow."""
    return [a if k < n_quick else pytest.param(a, marks=pytest.mark.slow) for k, a in enumerate(algorithms)]


@pytest.mark.parametrize("algorithm", some_slow(METHODS), ids=named)
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


def test_a_function_on_the_host_is_called_eagerly() -> None:
    function = GraphedFunction(doubled := Doubled())
    for n_calls in (1, 2, 3):
        assert torch.equal(function(torch.ones(3))[0], torch.full((3,), 2.0))
        assert doubled.n_calls == n_calls
    assert function.n_graphs == 0


COMPARED = [
    *METHODS,
    DQNFed(metric="identity"),
    DQNFed(epochs=2),
    DQNFed(constraint="exactly"),
    DQNFed(drop_share=0.3),
    AdaFed(),
    MGDA(),
]


def captured_steps(runner: Graphed) -> int:
    return sum(function.n_graphs for step in runner.steps.values() for function in step.functions.values())


@pytest.mark.parametrize("algorithm", some_slow(COMPARED), ids=named)
@pytest.mark.parametrize("participation", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_an_emulated_run_is_one_under_vmap(algorithm: AnyAlgorithm, participation: float) -> None:
    """Also where the server's products come with the replies, and where phases of a round alternate."""
    case = consistent_quadratics(6, 8)
    runner, share = graphed(emulate=True), share_of(algorithm, participation)
    plain, emulated = (
        run(algorithm, case.problem, case.federation, rounds=8, participation=share, cohort=cohort)
        for cohort in (vectorised(), runner)
    )
    assert captured_steps(runner) > 0
    torch.testing.assert_close(emulated.theta, plain.theta, rtol=1e-9, atol=1e-11)
    assert [r["status"] for r in plain.history] == [r["status"] for r in emulated.history]


@pytest.mark.parametrize("algorithm", some_slow([DQNFed(), FedAvg(lr=0.1), DQNFed(epochs=2), AdaFed()], 2), ids=named)
def test_rounds_that_are_held_change_nothing(algorithm: AnyAlgorithm) -> None:
    """Cohorts of two of which one client replies with NaN: the round is held, and the next one goes on."""
    case = consistent_quadratics(6, 8)
    bad = case.federation.train.targets.clone()
    bad[2] = torch.nan
    federation = replace(case.federation, train=case.federation.train._replace(targets=bad))
    plain, emulated = (
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
        for cohort in (vectorised(), graphed(emulate=True))
    )
    assert {"next", "hold"} <= {r["status"] for r in plain.history}
    assert [r["status"] for r in plain.history] == [r["status"] for r in emulated.history]
    torch.testing.assert_close(emulated.theta, plain.theta, rtol=1e-9, atol=1e-11)
    assert emulated.summary["totals"]["passes"] == plain.summary["totals"]["passes"]


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.01), DQNFed(), MGDA(lr=0.01)], ids=named)
def test_statistics_follow_clipping_and_dropping(algorithm: AnyAlgorithm) -> None:
    case = consistent_quadratics(6, 8)
    factors = torch.tensor([100.0, 1.0, 0.0, 1.0, torch.nan, 1.0], dtype=torch.float64)  # clipped, zero, not finite
    hessians = case.federation.train.targets * factors[:, None]
    federation = replace(case.federation, train=case.federation.train._replace(targets=hessians))
    plain, emulated = (
        run(algorithm, case.problem, federation, rounds=5, cohort=cohort, evaluation=Evaluation(participants=False))
        for cohort in (vectorised(), graphed(emulate=True))
    )
    assert plain.summary["n_clipped"] > 0
    assert plain.summary["n_dropped"] >= 2 * plain.summary["rounds"]
    for name in ("rounds", "n_clipped", "n_dropped"):
        assert emulated.summary[name] == plain.summary[name]
    torch.testing.assert_close(emulated.theta, plain.theta, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", [DQNFed(metric="identity"), MGDA(lr=0.01)], ids=named)
@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_a_reply_too_long_to_be_squared_is_clipped_all_the_same(
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
    plain, emulated = (
        run(algorithm, problem, federation, rounds=5, cohort=cohort, evaluation=Evaluation(participants=False))
        for cohort in (vectorised(), graphed(emulate=True))
    )
    for name in ("rounds", "n_clipped", "n_dropped", "status"):
        assert emulated.summary[name] == plain.summary[name]
    torch.testing.assert_close(emulated.theta, plain.theta, rtol=1e-3, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Recorded(MGDA):
    """MGDA that records which products came with the replies."""

    def server_step(self, server: Any, replies: Any, cohort: Any) -> Any:
        assert isinstance(replies, GraphReplies)
        KNOWN.append(tuple(replies.stats.grams))
        return super().server_step(server, replies, cohort)


KNOWN: list[tuple[str, ...]] = []


def test_products_that_the_server_asked_for_come_with_the_next_replies() -> None:
    KNOWN.clear()
    case = consistent_quadratics(4, 6)
    run(Recorded(lr=0.01), case.problem, case.federation, rounds=4, cohort=graphed(emulate=True))
    fields = Recorded.info.replies[0]._fields
    assert KNOWN[0] == ()
    assert len(KNOWN[1]) == 1
    assert KNOWN[1][0] in fields
    assert KNOWN[2] == KNOWN[3] == KNOWN[1]


@dataclass(frozen=True, kw_only=True)
class CacheRecorded(DQNFed):
    """DQN-Fed that records how many products with cached rows came with the replies."""

    def server_step(self, server: Any, replies: Any, cohort: Any) -> Any:
        CACHED.append(sum(products.shape[1] for products in replies.stats.beside.values()))
        return super().server_step(server, replies, cohort)


CACHED: list[int] = []


@pytest.mark.parametrize(("epochs", "n_without"), [(1, 3), (2, 2)])  # with gradients the first message is another one
def test_products_with_cached_rows_come_with_the_replies(epochs: int, n_without: int) -> None:
    """From the third reply to a message on; those with rows that are a new tensor in every round do not."""
    CACHED.clear()
    case = consistent_quadratics(6, 8)
    method = CacheRecorded(epochs=epochs, cached_clients=5)
    cohorts = (vectorised(), graphed(emulate=True))
    plain, emulated = (
        run(method, case.problem, case.federation, rounds=8, participation=0.5, cohort=cohort) for cohort in cohorts
    )
    assert [0] * (8 + n_without) + [5] * (8 - n_without) == CACHED
    torch.testing.assert_close(emulated.theta, plain.theta, rtol=1e-9, atol=1e-11)


def test_graphs_of_one_run_are_not_kept_for_the_next() -> None:
    runner = graphed(emulate=True)
    for n in (6, 8):
        case = consistent_quadratics(4, n)
        run(FedAvg(lr=0.1), case.problem, case.federation, rounds=4, cohort=runner)
        assert len(runner.steps) == 1


def test_methods_that_wait_for_the_host_are_not_captured() -> None:
    known = {kind.__name__ for kind in REGISTRY.values()}
    assert known >= NOT_CAPTURED.keys()
    assert cuda_graph_safe(FedAvg())
    assert cuda_graph_safe(DQNFed())
    assert not cuda_graph_safe(DQNFed(rates="hessian"))
    for name in ("fednl-head", "dqn-fed-literal", "fednl"):
        assert not cuda_graph_safe(REGISTRY[name]()), name


@needs_gpu
@pytest.mark.parametrize("algorithm", [*METHODS, DQNFed(metric="identity")], ids=named)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_on_a_gpu_the_bits_are_those_of_vmap(algorithm: AnyAlgorithm, participation: float) -> None:
    case = consistent_quadratics(4, 6)
    problem, federation = case.problem.to("cuda"), case.federation.to("cuda")
    runs = [
        run(algorithm, problem, federation, rounds=8, participation=share_of(algorithm, participation), cohort=cohort)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "algorithm",
    every(
        2,
        [
            DQNFed(metric="identity"),
            DQNFed(metric="lbfgs"),
            DQNFed(step="line-search"),
            DQNFed(metric="identity", cached_clients=0),
            DQNFed(batch_size=8),
            FedAvg(lr=0.1, batch_size=8),
        ],
    ),
    ids=named,
)
def test_phases_that_come_again_are_captured(
    algorithm: AnyAlgorithm, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the run is that of plain vmap, with its evaluations; a fallback would be slow and silent."""
    problem, federation = large_case(torch.float64)
    assert problem.n_parameters > BLOCK
    problem, federation = problem.to(device), federation.to(device)
    runner = graphed(emulate=device == "cpu")
    with caplog.at_level("INFO", logger="dqnfed"):
        plain, other = (
            run(
                algorithm,
                problem,
                federation,
                rounds=30 if device == "cuda" else 10,
                participation=share_of(algorithm, 0.34),
                cohort=cohort,
                evaluation=Evaluation(every=3),
            )
            for cohort in (vectorised(), runner)
        )
    assert not [record for record in caplog.messages if "no CUDA graph" in record]
    assert not any(function._gave_up for step in runner.steps.values() for function in step.functions.values())
    assert captured_steps(runner) > 0
    torch.testing.assert_close(other.theta, plain.theta, rtol=1e-6, atol=1e-9)
    for mine, its in zip(other.history, plain.history, strict=True):
        for part in ("accuracy", "train_loss"):
            assert (mine[part] is None) == (its[part] is None)
            if its[part] is not None:
                assert mine[part] == pytest.approx(its[part], rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "algorithm",
    [DQNFed(metric="lbfgs"), DQNFed(metric="identity"), DQNFed(step="line-search"), DQNFed(epochs=2)],
    ids=named,
)
def test_every_phase_can_be_captured(
    algorithm: AnyAlgorithm, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come once in a run too, here called twice."""
    problem, federation = large_case(torch.float64)
    problem, federation = problem.to(device), federation.to(device)
    once, share = GraphedFunction.__call__, share_of(algorithm, 0.5)

    def twice(function: GraphedFunction, *given: Tensor, fixed: Sequence[int] = ()) -> Sequence[Tensor]:
        once(function, *given, fixed=fixed)
        return once(function, *given, fixed=fixed)

    plain = run(algorithm, problem, federation, rounds=8, participation=share, cohort=vectorised())
    monkeypatch.setattr(GraphedFunction, "__call__", twice)
    runner = graphed(emulate=device == "cpu")
    with caplog.at_level("INFO", logger="dqnfed"):
        other = run(algorithm, problem, federation, rounds=8, participation=share, cohort=runner)
    assert not [record for record in caplog.messages if "no CUDA graph" in record]
    assert all(function.n_graphs for step in runner.steps.values() for function in step.functions.values())
    torch.testing.assert_close(other.theta, plain.theta, rtol=1e-6, atol=1e-9)


def test_tensors_are_grouped_for_few_launches() -> None:
    given = [torch.ones(3), torch.ones(0), torch.ones(3), torch.arange(3), torch.ones(2), torch.ones(LARGE + 1)]
    assert grouped(given, key=lambda t: t.dtype) == [[0, 2, 4], [3], [5]]
    assert grouped(given, key=lambda t: (t.shape, t.dtype)) == [[0, 2], [3], [4], [5]]
    assert torch.equal(rows_of([given[0], 2 * given[2]]), torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert rows_of([given[5]]).data_ptr() == given[5].data_ptr()


TIMES = 3  # eager, captured, replayed
Made = Callable[..., GraphedFunction]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(device: str) -> Made:
    """A graphed function for the device."""
    return lambda function, **settings: GraphedFunction(function, emulate=device == "cpu", **settings)


def test_outputs_of_all_shapes_come_back_in_order(made: Made, device: str) -> None:
    function = made(lambda x, y, n: [x + 1, x[:0], n + 1, y * 2, x + 3, n])
    for value in range(TIMES):
        x, y, n = torch.full((4,), float(value)), torch.full((2, 3), float(value)), torch.arange(4)
        found = function(*(t.to(device) for t in (x, y, n)))
        expected = [x + 1, x[:0], n + 1, y * 2, x + 3, n]
        assert all(torch.equal(mine.cpu(), other) for mine, other in zip(found, expected, strict=True))


@needs_gpu
def test_what_is_done_once_is_not_captured() -> None:
    function = GraphedFunction(doubled := Doubled())
    for n, n_calls in ((3, 1), (4, 2), (3, 3), (3, 3), (4, 4), (4, 4)):  # a capture is a call, a replay is none
        assert torch.equal(function(torch.ones(n, device="cuda"))[0].cpu(), torch.full((n,), 2.0))
        assert doubled.n_calls == n_calls


def test_shapes_are_captured_when_they_come_again(made: Made, device: str) -> None:
    function = made(Doubled())
    for n, n_graphs in ((3, 0), (4, 0), (3, 1), (3, 1), (4, 2), (4, 2)):
        assert torch.equal(function(torch.ones(n, device=device))[0].cpu(), torch.full((n,), 2.0))
        assert function.n_graphs == n_graphs


def test_shapes_that_keep_changing_end_the_captures(made: Made, device: str) -> None:
    function = made(Doubled())
    for n in range(1, MAX_GRAPHS + 3):
        for _ in range(2):
            assert torch.equal(function(torch.ones(n, device=device))[0].cpu(), torch.full((n,), 2.0))
    assert function._gave_up
    assert function.n_graphs == 0


def test_a_function_that_cannot_be_captured_is_called_eagerly(
    made: Made, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fails_when_captured(x: Tensor) -> list[Tensor]:
        calls.append(len(calls))
        found = x + 1
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [found]

    function = made(fails_when_captured)
    with caplog.at_level("INFO", logger="dqnfed"):
        for value in range(4):
            assert function(torch.full((2,), float(value), device=device))[0].tolist() == [value + 1.0] * 2
    assert [m for m in caplog.messages if "no CUDA graph" in m] == [
        "no CUDA graph, since the step cannot be captured: operation not permitted when stream is capturing"
    ]
    assert len(calls) == 5


def test_outputs_outlive_the_next_replay(made: Made, device: str) -> None:
    function = made(lambda x: [x + 1])
    outputs = [function(torch.full((4,), float(value), device=device))[0] for value in range(TIMES + 1)]
    assert [found.tolist() for found in outputs] == [[value + 1.0] * 4 for value in range(TIMES + 1)]


def test_a_transient_output_holds_until_the_next_call(made: Made, device: str) -> None:
    noted: list[float] = []
    function = made(lambda x: [x + 1, x + 2], n_transient=1, on_last=lambda t: noted.append(float(t[0])))
    transients = []
    for value in range(TIMES + 1):
        lasting, transient = function(torch.full((4,), float(value), device=device))
        assert torch.equal(lasting.cpu() + 1, transient.cpu())
        assert torch.equal(transient.cpu(), torch.full((4,), value + 2.0))
        transients.append(transient)
    assert noted == [value + 2.0 for value in range(TIMES + 1)]
    assert transients[-2].data_ptr() == transients[-1].data_ptr()  # and no longer: emulated graphs show that too


@pytest.mark.parametrize("place", [0, 1])
def test_fixed_arguments_are_read_where_they_are(place: int, made: Made, device: str) -> None:
    function = made(lambda a, b: [a.sum(0) + b.sum(0)])
    rows, elsewhere = torch.ones(3, 4, device=device), torch.full((3, 4), 7.0, device=device)
    for there, total in ((rows, 3.0), (rows, 6.0), (elsewhere, 21.0), (rows, 9.0), (rows, 12.0), (elsewhere, 21.0)):
        x = torch.rand(1, 4, device=device)
        given = (there, x) if place == 0 else (x, there)
        assert torch.equal(function(*given, fixed=[place])[0], x[0] + total)
        rows += 1.0 if there is rows else 0.0


def test_arguments_may_be_overwritten_after_a_call(made: Made, device: str) -> None:
    """The graph reads its own copies, and what it returns are no views of them."""
    function = made(lambda x: [x, 2 * x])
    for value in range(TIMES + 1):
        x = torch.full((4,), float(value), device=device)
        same, doubled = function(x.clone())
        function(torch.full((4,), -1.0, device=device))
        assert torch.equal(same, x)
        assert torch.equal(doubled, 2 * x)
