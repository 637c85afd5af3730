"""Who takes part: declared probabilities, rounds with nobody, the same bits again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed import DQNFed, Evaluation, FedAvg, RunResult, run
from dqnfed.core.problem import Problem
from dqnfed.flower import run_in_process
from dqnfed.sim.availability import Span, Trace, drawn_trace, read_trace, trace_text
from dqnfed.sim.sampling import RULES, Draw, Sampling, cyclic_draw, inclusion_probabilities, poisson_draw, size_draw
from dqnfed.sim.stragglers import Stragglers
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import Case, federation_of, labelled_clients, small_network

ROUNDS = 2000
TRACE = Trace((Span(0, 0, 3), Span(1, 1, 1), Span(2, 0, 1), Span(2, 3, 3), Span(5, 2, 3)))


def draw(round: int, *, size: int = 3, share: float = 0.3, sizes: tuple[int, ...] = (1,) * 10) -> Draw:
    return Draw(1, round, np.arange(len(sizes)), size, share, np.array(sizes, dtype=float))


def case(n_clients: int = 6) -> Case:
    return Case(Problem.from_module(small_network(4, 3, 3)), federation_of(labelled_clients(n_clients, 4)))


def asked(result: RunResult) -> list[list[int]]:
    return [record["clients"] for record in result.history[1:]]


def counts_of(rule: Any, **settings: Any) -> torch.Tensor:
    """Return how often each client is drawn, and each pair of clients."""
    n = len(settings.get("sizes", (1,) * 10))
    pairs = torch.zeros(n, n, dtype=torch.float64)
    for round in range(ROUNDS):
        chosen = torch.from_numpy(rule(draw(round, **settings)))
        pairs[chosen[:, None], chosen[None, :]] += 1
    return pairs


def test_poisson_takes_each_client_by_itself() -> None:
    """Counts of clients p, of pairs p^2 (no dependence), each within 5 standard deviations."""
    pairs, p = counts_of(poisson_draw), 0.3
    off = ~torch.eye(10, dtype=torch.bool)
    for counts, chance in ((pairs.diag(), p), (pairs[off], p * p)):
        assert (counts - ROUNDS * chance).abs().max() <= 5 * math.sqrt(ROUNDS * chance * (1 - chance))
    sizes = torch.tensor([float(len(poisson_draw(draw(round)))) for round in range(ROUNDS)])
    assert float(sizes.var()) == pytest.approx(10 * p * (1 - p), rel=0.1)  # uniform sampling has none


def test_by_size_everybody_has_a_chance_in_proportion() -> None:
    sizes = (5, 10, 10, 15, 20, 40, 300)
    chances = torch.from_numpy(inclusion_probabilities(np.array(sizes, dtype=float), 3))
    assert chances.tolist() == [0.1, 0.2, 0.2, 0.3, 0.4, 0.8, 1.0]
    counts = counts_of(size_draw, sizes=sizes).diag()
    assert ((counts - ROUNDS * chances).abs() <= 5 * (ROUNDS * chances * (1 - chances)).sqrt()).all()
    assert all(len(set(size_draw(draw(round, sizes=sizes)).tolist())) == 3 for round in range(200))


def test_cyclic_visits_everybody_once_a_cycle() -> None:
    visits = [cyclic_draw(draw(round, size=5)).tolist() for round in range(6)]
    assert visits[0] == visits[2] == visits[4]
    assert sorted(visits[0] + visits[1]) == list(range(10))
    uneven = [client for round in range(10) for client in cyclic_draw(draw(round)).tolist()]  # 3 does not divide 10
    assert sorted(uneven) == sorted(3 * list(range(10)))


def test_power_of_choice_takes_the_largest_losses_of_its_candidates() -> None:
    small = case()
    rule = Sampling(rule="power-of-choice", candidates=6)
    result = run(FedAvg(lr=0.2), *small[:2], rounds=4, participation=0.34, sampling=rule)
    models = [small.problem.theta0]
    for n in range(1, 4):
        models.append(run(FedAvg(lr=0.2), *small[:2], rounds=n, participation=0.34, sampling=rule).theta)
    for theta, chosen in zip(models, asked(result), strict=True):
        losses = []
        for inputs, targets in labelled_clients(6, 4):
            losses.append(float(small.problem.losses(small.problem.predict(theta, inputs), targets).mean()))
        assert chosen == sorted(sorted(range(6), key=lambda c: -round(losses[c], 9))[:2])


@pytest.mark.parametrize("rule", RULES)
def test_flower_asks_the_same_clients(rule: str) -> None:
    small, seldom = case(), Evaluation(participants=False)
    given: dict[str, Any] = {"rounds": 5, "participation": 0.4, "sampling": rule, "evaluation": seldom}
    here, there = (go(FedAvg(lr=0.2), *small[:2], **given) for go in (run, run_in_process))
    assert asked(here) == asked(there)
    assert torch.allclose(here.theta, there.theta, rtol=1e-12, atol=1e-12)


def test_a_round_with_nobody_keeps_the_model() -> None:
    """With a chance of 0.05 each, most rounds are empty; evaluations and the records go on."""
    small = case()
    for evaluation in (Evaluation(), Evaluation(every=3), Evaluation(participants=False)):
        result = run(
            FedAvg(lr=0.2), *small[:2], rounds=12, participation=0.05, sampling="poisson", evaluation=evaluation
        )
        empty = [record for record in result.history[1:] if not record["clients"]]
        assert 3 <= len(empty) < 12
        assert {record["status"] for record in empty} == {"hold"}
        assert {record["bytes_up"] for record in empty} == {0}
    assert not torch.equal(result.theta, small.problem.theta0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("traced", [False, True])
def test_resumed_runs_have_the_same_bits(rule: str, traced: bool, tmp_path: Path) -> None:
    small = case()
    sampling = Sampling(rule=rule, trace=TRACE if traced else None)

    def result(out: Path, rounds: int, *, resume: bool = False) -> RunResult:
        return run(
            DQNFed(epochs=2, batch_size=4),
            *small[:2],
            rounds=rounds,
            participation=0.5,
            sampling=sampling,
            out=out,
            resume=resume,
        )

    whole = result(tmp_path / "whole", 7)
    result(tmp_path / "parts", 3)
    parts = result(tmp_path / "parts", 7, resume=True)
    assert torch.equal(whole.theta, parts.theta)
    assert asked(whole) == asked(parts)
    other = "cyclic" if rule != "cyclic" else "size"
    with pytest.raises(ValueError, match=r"train\.sampling"):
        run(FedAvg(), *small[:2], rounds=8, participation=0.5, sampling=other, out=tmp_path / "parts", resume=True)


def test_who_is_offline_is_not_asked() -> None:
    small, online = case(), [[0, 2], [0, 1, 2], [0, 5], [0, 2, 5]]
    for rule in RULES:
        result = run(FedAvg(), *small[:2], rounds=9, participation=0.5, sampling=Sampling(rule=rule, trace=TRACE))
        for round, clients in enumerate(asked(result)):
            assert set(clients) <= set(online[round % 4]), rule
        if rule in ("uniform", "size", "power-of-choice"):  # they make up for those who are away
            assert [len(clients) for clients in asked(result)] == [2, 3, 2, 3, 2, 3, 2, 3, 2]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = drawn_trace(20, 200, online=0.3, stay=5, spread=1.0, seed=3)
    (tmp_path / "trace.csv").write_text(trace_text(trace), encoding="utf-8")
    assert read_trace(tmp_path / "trace.csv") == trace


def test_a_drawn_trace_has_the_declared_share_and_stays() -> None:
    trace = drawn_trace(100, 2000, online=0.3, stay=5)
    assert trace.mean_online(100) / 100 == pytest.approx(0.3, abs=0.01)
    inner = [span for span in trace.spans if span.first > 0 and span.last < 1999]
    assert np.mean([span.last - span.first + 1 for span in inner]) == pytest.approx(5, rel=0.05)
    always = drawn_trace(3, 50, online=1.0)
    assert always.spans == tuple(Span(c, 0, 49) for c in range(3))
    uneven = drawn_trace(100, 2000, online=0.5, spread=2.0)
    shares = [sum(s.last - s.first + 1 for s in uneven.spans if s.client == c) / 2000 for c in range(100)]
    assert np.std(shares) > 0.2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,first\n0,1\n", "must have the columns client, first_round, last_round"),
        ("client,first_round,last_round\n0,3,2\n", "line 2: client, first_round and last_round must be whole"),
        ("client,first_round,last_round\n0,0,1\n1,x,2\n", "line 3"),
        ("client,first_round,last_round\n0,0,99999999999\n", "line 2"),
        ("client,first_round,last_round\n", "at least one row"),
    ],
)
def test_a_false_trace_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_trace(tmp_path / "trace.csv")


def test_what_does_not_fit_is_refused() -> None:
    small = case()
    with pytest.raises(ValueError, match="the trace names client 9"):
        run(FedAvg(), *small[:2], rounds=1, sampling=Sampling(trace=Trace((Span(9, 0, 1),))))
    with pytest.raises(ValueError, match="the trace names client 9"):  # asked before the run is set up
        Sampling(trace=Trace((Span(9, 0, 1),))).expected_size(6, 0.5)
    with pytest.raises(ValueError, match="`candidates` must be from 3"):
        run(
            FedAvg(),
            *small[:2],
            rounds=1,
            participation=0.5,
            sampling=Sampling(rule="power-of-choice", candidates=2),
        )
    with pytest.raises(ValueError, match="`candidates` is 4, but has no effect on the rule 'uniform'"):
        Sampling(candidates=4)
    with pytest.raises(ValueError, match="must be one of uniform, poisson"):
        run(FedAvg(), *small[:2], rounds=1, sampling="random")


def test_speeds_are_log_normal_and_time_goes_with_the_examples() -> None:
    rule = Stragglers(deadline=0.1, spread=0.5, jitter=0.2)
    sizes = np.ones(4000)
    times = np.array([0.1 / rule.share(0, 3, c, sizes) for c in range(4000)])
    assert np.log(times[times > 0.1]).std() == pytest.approx(math.hypot(0.5, 0.2), rel=0.05)
    double = np.array([1.0, 1.0, 2.0])
    one = [Stragglers(deadline=0.01, spread=0.0).share(0, 0, c, double) for c in range(3)]
    assert one == pytest.approx([0.01, 0.01, 0.005])


def test_late_clients_are_left_out_and_named() -> None:
    small, rule = case(), Stragglers(deadline=1.0, spread=1.0, jitter=1.0)
    result = run(FedAvg(lr=0.2), *small[:2], rounds=12, stragglers=rule)
    sizes = small.federation.n_examples.double().numpy()
    for record in result.history[1:]:
        late = [c for c in range(6) if rule.share(0, record["round"], c, sizes) < 1.0]
        assert [drop["client"] for drop in record["dropped"]] == late
        assert all(drop["why"].startswith("late: it needs ") for drop in record["dropped"])
    assert 0 < sum(len(record["dropped"]) for record in result.history[1:]) < 72


def test_a_round_in_which_everybody_is_late_keeps_the_model() -> None:
    small = case()
    result = run(FedAvg(), *small[:2], rounds=2, stragglers=Stragglers(deadline=1e-3, jitter=0.1))
    assert torch.equal(result.theta, small.problem.theta0)
    assert [record["status"] for record in result.history[1:]] == ["hold", "hold"]


def test_partial_work_is_the_first_steps() -> None:
    """One client at three quarters of its four steps is the client of three steps."""
    small = case(1)
    sizes = small.federation.n_examples.double().numpy()
    batch = -(-int(sizes[0]) // 2)  # two steps an epoch
    rule = Stragglers(deadline=0.75, spread=0.0, late="partial")
    found = run(FedAvg(lr=0.2, epochs=2, batch_size=batch), *small[:2], rounds=1, stragglers=rule).theta
    tasks = TaskBuilder(small.federation, small.problem, FedAvg(lr=0.2, epochs=2, batch_size=batch), 0)
    [task] = tasks.per_client(torch.tensor([0]), 0)
    expected = FedAvg(lr=0.2).local_sgd(small.problem, task._replace(batches=task.batches[:3]), small.problem.theta0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="needs local training with mini-batches"):
        run(FedAvg(), *small[:2], rounds=1, stragglers=rule)


@pytest.mark.parametrize("late", ["drop", "partial"])
def test_runs_with_stragglers_resume_to_the_same_bits(late: str, tmp_path: Path) -> None:
    small, rule = case(), Stragglers(deadline=0.8, jitter=0.5, late=late)

    def result(out: Path, rounds: int, *, resume: bool = False) -> RunResult:
        method = DQNFed(epochs=2, batch_size=4)
        return run(method, *small[:2], rounds=rounds, stragglers=rule, out=out, resume=resume)

    whole = result(tmp_path / "whole", 6)
    result(tmp_path / "parts", 3)
    assert torch.equal(whole.theta, result(tmp_path / "parts", 6, resume=True).theta)
    with pytest.raises(ValueError, match=r"train\.deadline"):
        run(DQNFed(epochs=2, batch_size=4), *small[:2], rounds=8, out=tmp_path / "parts", resume=True)


def test_rounds_without_a_reply_are_counted() -> None:
    small = case()
    away = run(FedAvg(), *small[:2], rounds=5, sampling=Sampling(trace=Trace((Span(1, 3, 3),))))
    assert [len(clients) for clients in asked(away)] == [0, 0, 0, 1, 0]
    assert away.summary["idle_rounds"] == 4
    late = run(FedAvg(), *small[:2], rounds=3, stragglers=Stragglers(deadline=1e-6))
    assert late.summary["idle_rounds"] == 3
    assert torch.equal(late.theta, small.problem.theta0)
    assert "idle_rounds" not in run(FedAvg(), *small[:2], rounds=2).summary
