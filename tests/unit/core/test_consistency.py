"""The check of losses against rows, on quadratics, whose losses follow the trapezoid rule exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dqnfed.core.algorithm import Cohort
from dqnfed.core.consistency import (
    ConsistencyState,
    fault_sizes,
    inconsistent,
    judged,
    may_drop,
    no_claims,
    with_absence,
    with_claims,
    with_left_out,
    with_turned,
)

K, n = 8, 5
Floats = NDArray[np.float64]


class Quadratics:
    """K clients with f_k = (x - c_k)' A_k (x - c_k) / 2 + b_k; their rows are gradients times the local rate."""

    def __init__(self, seed: int, rate: float) -> None:
        r = np.random.default_rng(seed)
        roots = r.normal(size=(K, n, n))
        self.A, self.c, self.rate = roots @ roots.transpose(0, 2, 1) / n, r.normal(size=(K, n)), rate

    def rows(self, x: Floats) -> Floats:
        return np.asarray(self.rate * np.einsum("kij,kj->ki", self.A, x - self.c))

    def losses(self, x: Floats) -> Floats:
        return np.asarray(0.5 * np.einsum("ki,kij,kj->k", x - self.c, self.A, x - self.c) + 1.0)


def cohort(round: int = 0) -> Cohort:
    return Cohort(torch.arange(K), torch.ones(K), K, round)


def after_one_step(
    clients: Quadratics, false_rows: Floats | None = None, false_losses: Floats | None = None
) -> ConsistencyState:
    """Return the record after the clients replied at both ends of a step; false numbers are factors of all replies."""
    x = np.full(n, 2.0)
    y = x - 0.3 * clients.rows(x).mean(0) / clients.rate
    times, scale = (
        np.ones(K) if false_rows is None else false_rows,
        np.ones(K) if false_losses is None else false_losses,
    )
    rows = [torch.from_numpy(times[:, None] * clients.rows(at)) for at in (x, y)]
    losses = [scale * clients.losses(at) for at in (x, y)]
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    state = with_claims(no_claims(K), rows[0], losses[0], a, b, cohort())
    return judged(state, rows[1], losses[1], b, cohort(1), 0.2)


def changed(place: int, factor: float) -> Floats:
    factors = np.ones(K)
    factors[place] = factor
    return factors


@pytest.mark.parametrize("rate", [1.0, 1e-3, 50.0])
@pytest.mark.parametrize("seed", range(5))
def test_honest_clients_have_no_fault_whatever_their_learning_rate(seed: int, rate: float) -> None:
    state = after_one_step(Quadratics(seed, rate))
    assert state.faults.max() <= 1e-6
    assert not inconsistent(state, cohort(), 0.5).any()


@pytest.mark.parametrize("factor", [-1.0, -10.0, 10.0, 1e6, 0.1, 1e-6])
@pytest.mark.parametrize("seed", range(5))
def test_a_false_row_is_found(seed: int, factor: float) -> None:
    state = after_one_step(Quadratics(seed, 0.1), changed(3, factor))
    assert inconsistent(state, cohort(), 0.2).tolist() == [client == 3 for client in range(K)]


@pytest.mark.parametrize("factor", [-1.0, 1e-6, 0.1, 12.0, 1e6])
@pytest.mark.parametrize("seed", range(5))
def test_a_false_loss_is_found(seed: int, factor: float) -> None:
    state = after_one_step(Quadratics(seed, 0.1), None, changed(5, factor))
    assert inconsistent(state, cohort(), 0.2).tolist() == [client == 5 for client in range(K)]


def test_who_scales_row_and_loss_alike_is_not_found() -> None:
    """It is a client with another loss, and consistent: the bounds of the policy hold it, not this check."""
    state = after_one_step(Quadratics(0, 0.1), changed(2, 3.0), changed(2, 3.0))
    assert not inconsistent(state, cohort(), 0.2).any()


def test_a_fault_is_remembered_for_some_rounds() -> None:
    state = after_one_step(Quadratics(0, 0.1), changed(3, -1.0))
    quiet = state._replace(theta=torch.zeros(0))
    n_rounds = 0
    while inconsistent(quiet, cohort(), 0.2).any():
        quiet = judged(quiet, torch.ones(K, n).double(), np.ones(K), torch.zeros(n).double(), cohort(), 0.2)
        n_rounds += 1
    assert 2 <= n_rounds <= 5


def test_how_many_may_be_left_out() -> None:
    """One of three or four; nobody of two, who can only contradict each other; else the share, rounded down."""
    assert [may_drop(0.2, size) for size in (1, 2, 3, 4, 5, 9, 10, 20)] == [0, 0, 1, 1, 1, 1, 2, 4]
    assert may_drop(0.0, 100) == 0


def test_unknown_losses_say_nothing() -> None:
    x = torch.zeros(n).double()
    state = with_claims(no_claims(K), torch.ones(K, n).double(), np.full(K, np.nan), x, x + 1.0, cohort())
    state = judged(state, -torch.ones(K, n).double(), np.ones(K), x + 1.0, cohort(1), 0.2)
    assert state.faults.max() == 0.0


def test_who_is_caught_again_stays_out_longer() -> None:
    """Two rounds, then four, then eight; and others may go on."""
    state, out = no_claims(K), np.arange(K) == 3
    for n_rounds, round in ((2, 10), (4, 20), (8, 30)):
        now = Cohort(torch.arange(K), torch.ones(K), K, round)
        state = with_absence(state._replace(clear=torch.from_numpy(out)), out, now)
        left = [inconsistent(state, now._replace(round=round + 1 + later), 0.2)[3] for later in range(n_rounds + 1)]
        assert left == [True] * n_rounds + [False]
        assert inconsistent(state, now._replace(round=round + 1), 0.2).sum() == 1


USUAL_STEP = (np.full(4, -1.0), np.full(4, -0.8), np.full(4, -0.9))  # slopes before and after, changes: as is said


def faults_beside_usual_clients(before: float, after: float, change: float) -> tuple[float, bool, bool]:
    """Return the fault of a fifth client, whether its loss agrees, and whether it was hurt."""
    given = [np.append(values, own) for values, own in zip(USUAL_STEP, (before, after, change), strict=True)]
    found = fault_sizes(given[0], given[1], given[2], 0.0)
    return float(found.sizes[-1]), bool(found.agrees[-1]), bool(found.hurt[-1])


@pytest.mark.parametrize(("before", "after"), [(-1.0, 0.2), (-0.3, -0.1), (-0.2, 0.6), (0.2, 0.5), (0.5, 3.0)])
@pytest.mark.parametrize("change", [0.3, 1.5, 4.0])
def test_whom_a_step_has_hurt_is_not_at_fault(before: float, after: float, change: float) -> None:
    """Its slope has vanished or turned, and its loss rises by more than that says: who is out does not come back so."""
    if change > 0.5 * (before + after):
        fault, agrees, hurt = faults_beside_usual_clients(before, after, change)
        assert (fault, hurt) == (0.0, True)
        assert agrees == (change - 0.5 * (before + after) <= 0.25 * (abs(before) + abs(after)))


@pytest.mark.parametrize("before", [-1.0, -0.5])
def test_who_reverses_its_rows_and_is_hurt_is_at_fault(before: float) -> None:
    """The truth is a loss that rises ever faster; it says one that falls ever faster."""
    fault, agrees, _ = faults_beside_usual_clients(before, 1.2 * before, -1.1 * before)
    assert fault > 1.0
    assert not agrees


def test_two_that_reverse_their_rows_do_not_hide_in_the_scatter_that_they_make() -> None:
    """Ten clients, eight of which follow their slopes as local training does, by a half to a little more than all."""
    slopes = np.append(np.full(8, -1.0), [-5.0, -5.0])
    followed = np.array([0.38, 0.86, 1.16, 0.84, 0.89, 1.31, 1.06, 0.45, -0.53, -0.47])  # recorded in such a round
    for out, n_seen in (0.0, 0), (0.2, 2):
        found = fault_sizes(slopes, slopes, followed * slopes, 0.0, out)
        seen = found.sizes * found.weights > 1.0
        assert seen.sum() == n_seen
        assert not seen[:8].any()


def test_a_rise_beyond_all_measure_is_at_fault() -> None:
    assert faults_beside_usual_clients(-0.3, 0.1, 1e6)[0] > 1.0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_what_a_convex_loss_can_do_is_no_fault(share: float) -> None:
    """It changes by what lies between its slopes at both ends, if these rise."""
    before, after = -3.0, -0.1
    assert faults_beside_usual_clients(before, after, (1 - share) * before + share * after)[0] == 0.0


def test_a_turn_that_the_loss_confirms_is_no_fault_and_a_reversed_row_is() -> None:
    """Both rows go from falling to rising; the loss of the one who went past its lowest point has hardly changed."""
    assert faults_beside_usual_clients(-1.0, 1.0, 0.1)[1]
    assert not faults_beside_usual_clients(-1.0, 1.0, -0.9)[1]
    state = no_claims(K)._replace(past=torch.arange(K) == 2)
    told = with_turned(state, np.array([True, True]), torch.tensor([2, 5]))
    assert inconsistent(told, cohort(), 0.3).nonzero()[0].tolist() == [5]


def test_the_first_time_one_round_in_agreement_is_enough() -> None:
    out = np.arange(K) == 3
    for n_caught, stays in ((1, False), (2, True)):
        state = no_claims(K)._replace(clear=torch.from_numpy(out), caught=torch.full((K,), n_caught - 1))
        state = with_absence(state, out, cohort(5))._replace(agrees=torch.ones(K, dtype=torch.bool))
        assert inconsistent(state, cohort(6), 0.2)[3] == stays


def test_who_was_left_out_comes_back_with_less_than_leaves_out() -> None:
    faults, weights = torch.zeros(K).double(), torch.ones(K).double()
    faults[3] = 0.8
    state = no_claims(K)._replace(faults=faults, weights=weights)
    assert not inconsistent(state, cohort(), 0.2).any()
    assert inconsistent(state._replace(out=torch.arange(K) == 3), cohort(), 0.2)[3]


def test_whom_the_method_left_out_stays_out_until_it_agrees() -> None:
    state = with_left_out(no_claims(K), [3])
    assert inconsistent(state, cohort(), 0.2).nonzero()[0].tolist() == [3]
    agrees = state._replace(agrees=torch.ones(K, dtype=torch.bool), faults=0.8 * state.faults)
    assert not inconsistent(agrees, cohort(), 0.2).any()
