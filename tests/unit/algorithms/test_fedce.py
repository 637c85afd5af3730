"""FedCE and FedPW: their formulas in NumPy on small numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedce import FedCE, cosines_with_others
from dqnfed.algorithms.fedpw import FedPW, enlarged, without_smallest
from tests.helpers.baselines import GRADIENTS, LOSSES, LR, bowls
from tests.helpers.linear_clients import linear_clients
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play

G, F = GRADIENTS.numpy(), LOSSES.numpy()


def test_cosines_with_the_others_are_those_of_the_vectors() -> None:
    c = np.array([0.2, 0.5, 0.3])
    for k, found in enumerate(cosines_with_others(G @ G.T, c)):
        others = c @ G - c[k] * G[k]
        assert found == pytest.approx(G[k] @ others / np.linalg.norm(G[k]) / np.linalg.norm(others), rel=1e-12)


@pytest.mark.parametrize("joined_by", ["times", "plus"])
def test_fedce_follows_its_formulas(joined_by: str) -> None:
    """Three rounds on bowls, where losses, updates and the model without a client are known."""
    problem, federation, centres = bowls(3, 2, sizes=[4, 4, 4])
    targets, centre = federation.train.targets.numpy().reshape(3, 4, 2), centres.numpy()
    played = play(FedCE(lr=0.3, joined_by=joined_by), problem, federation, rounds=3)
    theta, c, local = np.zeros(2), np.full(3, 1 / 3), None
    angles: list[Floats] = []
    errors: list[Floats] = []
    weights: list[Floats] = []
    for after in played.thetas[1:]:
        if local is not None:
            without = [(theta - local[k] / 3) / (2 / 3) for k in range(3)]
            errors.append(np.array([0.5 * np.square(targets[k] - without[k]).sum(1).mean() for k in range(3)]))
        delta = 0.3 * (theta - centre)
        local = theta - delta
        others = [c @ delta - c[k] * delta[k] for k in range(3)]
        cosine = [delta[k] @ others[k] / np.linalg.norm(delta[k]) / np.linalg.norm(others[k]) for k in range(3)]
        angles.append(1 - np.array(cosine))
        a = np.mean(angles, 0) / np.mean(angles, 0).sum()
        e = np.mean(errors, 0) / np.mean(errors, 0).sum() if errors else np.full(3, 1 / 3)
        joined = a * e if joined_by == "times" else a + e
        weights.append(joined / joined.sum())
        c = np.mean(weights, 0)
        theta = theta - c @ delta
        np.testing.assert_allclose(after, theta, atol=1e-12)


def test_fedpw_weighs_by_running_losses_and_agreement() -> None:
    """Two rounds without the mask; linear losses, so the updates are the same in both."""
    problem, federation, _ = linear_clients()
    played = play(FedPW(lr=LR, drop_rate=0.0), problem, federation, rounds=2)
    delta, theta, zeros = LR * G, np.zeros(4), np.zeros(3)
    a, P, b, Q = zeros, zeros, zeros, zeros
    S = (delta @ delta.T).sum(1)
    for after in played.thetas[1:]:
        losses = F + G @ theta
        beta = 0.3 * losses.mean() / F.mean()
        a = (1 - beta) * a + beta * losses / losses.sum()
        P = (P + a) / (P + a).sum()
        b = 0.7 * b + 0.3 * S / S.sum()
        Q = (Q + b) / (Q + b).sum()
        rho = P.std() / (P.std() + Q.std())
        theta = theta - (rho * P + (1 - rho) * Q) @ delta
        np.testing.assert_allclose(after, theta, rtol=1e-10)


def test_fedpw_leaves_out_the_smallest_entries_of_each_tensor() -> None:
    rows = torch.tensor([[1.0, -3.0, 2.0, 0.1, 0.2], [1.0, -3.0, 2.0, 0.1, 0.2]])
    found = without_smallest(rows, [0.5, 1.0], [3, 2])
    assert found.tolist() == [[0.0, -3.0, 2.0, 0.0, pytest.approx(0.2)], [0.0] * 5]


def test_fedpw_enlarges_what_clients_agree_on() -> None:
    """The first coordinate is the same for both clients; what was left out has mean size 0.1."""
    rows = torch.tensor([[1.0, 1.0, 0.1], [1.0, -1.0, 0.1]])
    left_out = torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.0, 0.1]])
    step = torch.tensor([1.0, 0.0, 0.5])
    torch.testing.assert_close(enlarged(step, rows, left_out, 0.4), torch.tensor([1.1, 0.0, 0.5]))
    assert torch.equal(enlarged(step, rows, torch.zeros_like(rows), 0.4), step), "nothing was left out"


def test_equal_clients_make_fedpw_without_its_mask_fedavg() -> None:
    problem, federation, _ = linear_clients(GRADIENTS[:1].repeat(3, 1), LOSSES[:1].repeat(3), [5, 5, 5])
    mine = play(FedPW(lr=LR, drop_rate=0.0), problem, federation, rounds=3).thetas[-1]
    theirs = play(FedAvg(lr=LR), problem, federation, rounds=3).thetas[-1]
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
