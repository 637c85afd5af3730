"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.maths.transfer import sent_to

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Visit(NamedTuple):
    """Who was here last, while the numbers about the rows are still those of the time before."""

    row: Tensor  # [k]         where their gradients lie
    client: Tensor  # [k]
    rate: Tensor  # [k]
    curvature: Tensor  # [k]
    products: Tensor  # [k, R] of their gradients with the rows, which they are among
    asked: Tensor  # []        the round
    stays: Tensor  # []        how many rounds others are kept for, counted from their own visit
    room: Tensor  # []         how many of the others are kept


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row for each of them; rows that do not count are free.

    A round's new rows are written into free ones of the same matrix, which is too large to be copied every round. So a
    state before still finds what it counted, but only the last one: the rows that it lost are free to the next. Rows of
    the last visit count once it is settled, and everything else here wants that done first.
    """

    gradient: Tensor  # [R, n]
    rate: Tensor  # [R]        the decrease that it was promised then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]      -1: the row does not count
    asked: Tensor  # [R]       the round of the visit
    products: Tensor  # [R, R] of the rows with each other, where both count
    visit: Visit


PATIENCE = 4  # with clients drawn at random, one in fifty stays away for longer by chance


def nobody(theta: Tensor) -> Absentees:
    """Return no rows; those to come lie with theta, the numbers about them on the host."""
    numbers, nowhere = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    rows = theta.new_zeros(0, len(theta))
    return Absentees(rows, numbers, numbers.clone(), nowhere, nowhere.clone(), numbers.new_zeros(0, 0), no_visit())


def no_visit() -> Visit:
    """Return a visit of nobody."""
    numbers, nowhere = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    products, number = numbers.new_zeros(0, 0), nowhere.new_zeros(())
    return Visit(nowhere, nowhere.clone(), numbers, numbers.clone(), products, number, number.clone(), number.clone())


def rows_of_absent(kept: Absentees, cohort: Cohort) -> IntArray:
    """Return the rows of clients who are not here."""
    assert not kept.visit.row.shape[0]
    client = kept.client.numpy()
    is_here = np.zeros(cohort.n_clients, dtype=np.bool_)
    is_here[cohort.clients.numpy()] = True
    return np.flatnonzero((client >= 0) & ~is_here[client])


def with_present(
    kept: Absentees,
    cohort: Cohort,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
    *,
    most: int,
) -> tuple[Absentees, IntArray]:
    """Return what is kept after a round, and the rows of those who were here, in order; -1: not kept.

    They are kept, and before them those who were asked last, `most` in all. GG [K, K] and GA [K, R] are the products of
    the new gradients with each other and with the rows so far. A client that has missed four times as many rounds as it
    takes to ask everybody is forgotten: what it said must not bind the steps for ever if it has left, or has nothing
    more to learn, so that its answers of no length are not used. The numbers about the rows wait for `settled`: the
    model can go out before.
    """
    assert not kept.visit.row.shape[0]
    here, K = cohort.clients.numpy(), cohort.clients.shape[0]
    kept = kept if kept.client.shape[0] >= most + min(K, most) else _with_rows(kept, most + min(K, most))
    if most < K:
        chosen = np.sort(_shuffled(here, cohort.round)[K - most :])
        here, rates, curvature = here[chosen], rates[chosen], curvature[chosen]
        GG, GA = GG[chosen][:, chosen], GA[chosen]
        G = G.index_select(0, sent_to(G.device, torch.from_numpy(chosen)))
    free = (kept.client.numpy() < 0).nonzero()[0][: len(here)]
    kept.gradient.index_copy_(0, sent_to(kept.gradient.device, torch.from_numpy(free)), G.detach())
    stays = PATIENCE * -(-cohort.n_clients // K)
    products = np.zeros((len(free), kept.client.shape[0]))
    products[:, : GA.shape[1]] = GA
    products[:, free] = GG
    numbers = (free, here, rates, curvature, products, cohort.round, stays, max(0, most - K))
    visit = Visit(*(torch.from_numpy(np.array(values)) for values in numbers))  # copies: others hold some of these, too
    if most >= K:
        return kept._replace(visit=visit), free
    rows = np.full(K, -1)
    rows[chosen] = free
    return kept._replace(visit=visit), rows


def settled(kept: Absentees) -> Absentees:
    """Return the same with the numbers about its rows as they are after the last visit."""
    free, new = kept.visit.row.numpy(), kept.visit
    if not len(free):
        return kept
    client, asked, when = kept.client.numpy(), kept.asked.numpy(), int(new.asked)
    is_here = np.zeros(max(client.max(), new.client.numpy().max()) + 1, dtype=np.bool_)
    is_here[new.client.numpy()] = True
    stay = np.flatnonzero((client >= 0) & ~is_here[client] & (when - asked < int(new.stays)))
    if len(stay) > int(new.room):
        stay = stay[_shuffled(client[stay], asked[stay])[len(stay) - int(new.room) :]]

    def updated(old: Tensor, values: NDArray[np.generic] | int) -> Tensor:
        numbers = old.numpy().copy()
        numbers[free] = values
        return torch.from_numpy(numbers)

    whose = np.full(len(client), -1)
    whose[stay], whose[free] = client[stay], new.client.numpy()
    products = kept.products.numpy().copy()
    products[free], products[:, free] = new.products.numpy(), new.products.numpy().T
    return Absentees(
        kept.gradient,
        updated(kept.rate, new.rate.numpy()),
        updated(kept.curvature, new.curvature.numpy()),
        torch.from_numpy(whose),
        updated(kept.asked, when),
        torch.from_numpy(products),
        no_visit(),
    )


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    k = len(A)
    joined = np.empty((k + len(C),) * 2)
    joined[:k, :k], joined[:k, k:], joined[k:, :k], joined[k:, k:] = A, B, B.T, C
    return joined


def _shuffled(clients: IntArray, asked: IntArray | int) -> IntArray:
    """Return an order by the round of the visit; within one, not always the same clients come first."""
    return np.argsort(asked * 2**32 + (clients * 2654435761 + asked * 40503) % 2**32, kind="stable")


def _with_rows(kept: Absentees, n_rows: int) -> Absentees:
    """Return the same with so many rows, free ones at the end."""
    more, at_the_end = n_rows - len(kept.client), torch.nn.functional.pad
    return Absentees(
        torch.cat([kept.gradient, kept.gradient.new_zeros(more, kept.gradient.shape[1])]),
        at_the_end(kept.rate, (0, more)),
        at_the_end(kept.curvature, (0, more)),
        at_the_end(kept.client, (0, more), value=-1),
        at_the_end(kept.asked, (0, more)),
        at_the_end(kept.products, (0, more, 0, more)),
        kept.visit,
    )
