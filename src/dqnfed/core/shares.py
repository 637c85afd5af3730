"""Which of a client's examples are for training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.examples import Part
from dqnfed.core.seeds import numpy_seed_for

MANY = 10_000  # clients, above which they do not all have a generator of their own for their split
BLOCK = 2**20  # examples that are split at once
IntArray = NDArray[np.int64]
Split = dict[Part, tuple[Tensor, Tensor]]  # row numbers, client after client, and where each client's begin [C + 1]


def split_rows(n: int, targets: Tensor, shares: dict[Part, float], *, seed: int, client: int) -> dict[Part, Tensor]:
    """Return disjoint row numbers for each held-out part and "train", every class shared out alike.

    Rows are ordered by class after a shuffle and dealt out along evenly spaced places, so that each part has the
    client's label mix up to rounding; every part with a positive share gets at least one row when there are two.
    """
    generator = numpy_seed_for(seed, client=client, purpose="split")
    order = generator.permutation(n)
    if not targets.is_floating_point() and targets.dim() == 1:
        order = order[np.argsort(targets.cpu().numpy()[order], kind="stable")]
    rows: dict[Part, Tensor] = {}
    left = order
    for part, share in shares.items():
        count = min(max(round(share * n), 1), len(left) - 1) if share > 0 and len(left) > 1 else 0
        places = ((np.arange(count) + 0.5) * len(left) / max(count, 1)).astype(int)
        rows[part] = torch.as_tensor(np.sort(left[places]))
        left = np.delete(left, places)
    rows["train"] = torch.as_tensor(np.sort(left))
    return rows


def split_clients(
    starts: Tensor, targets: Tensor, order: Tensor | None, shares: Mapping[Part, float], seed: int
) -> Split:
    """Return the split of all clients; client c has the rows order[starts[c]:starts[c + 1]] (None: as they stand).

    Each by `split_rows` or, of more than `MANY` clients, by the same rule after one shuffle for many.
    """
    if len(starts) - 1 <= MANY:
        return _split_one_by_one(starts, targets, order, shares, seed)
    bounds, parts = starts.numpy(), [*shares, "train"]
    found: dict[Any, list[tuple[IntArray, IntArray]]] = {part: [] for part in parts}
    first = 0
    while first < len(bounds) - 1:
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + BLOCK, side="right")) - 1)
        rows = np.arange(bounds[first], bounds[last]) if order is None else order[bounds[first] : bounds[last]].numpy()
        block = split_block(rows, bounds[first : last + 1] - bounds[first], targets, shares, seed=seed, block=first)
        for part in parts:
            found[part].append(block[part])
        first = last
    return {part: _connected(blocks) for part, blocks in found.items()}


def split_block(
    rows: IntArray, starts: IntArray, targets: Tensor, shares: Mapping[Part, float], *, seed: int, block: int
) -> dict[Any, tuple[IntArray, IntArray]]:
    """Return every part's rows and numbers of rows of the clients in a block, after one shuffle for all of them."""
    sizes = np.diff(starts)
    owner, chance = np.repeat(np.arange(len(sizes)), sizes), numpy_seed_for(seed, client=block, purpose="split of many")
    labels = np.zeros(len(rows), dtype=np.int64)
    if not targets.is_floating_point() and targets.dim() == 1:
        labels = targets[torch.from_numpy(rows)].numpy()
    left = np.lexsort((chance.random(len(rows)), labels, owner))  # places in `rows`: by client, then class, then chance
    found: dict[Any, tuple[IntArray, IntArray]] = {}
    for part, share in shares.items():
        counts = held_out(np.diff(starts), sizes, share)
        begins = np.cumsum(sizes) - sizes
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        among = (number + 0.5) * np.repeat(sizes, counts) / np.repeat(counts, counts)
        places = np.repeat(begins, counts) + among.astype(np.int64)
        found[part] = rows[np.sort(left[places])], counts
        left, sizes = np.delete(left, places), sizes - counts
    found["train"] = rows[np.sort(left)], sizes
    return found


def held_out(all_rows: IntArray, left: IntArray, share: float) -> IntArray:
    """Return how many of every client's rows a share of all of them means, where some may be held out already."""
    if share <= 0:
        return np.zeros_like(left)
    wanted = np.maximum(np.rint(share * all_rows).astype(np.int64), 1)
    return np.asarray(np.maximum(np.minimum(wanted, left - 1), 0))


def part_sizes(sizes: IntArray, shares: Mapping[Part, float]) -> dict[Part, IntArray]:
    """Return how many examples every client has in each part."""
    found: dict[Part, IntArray] = {}
    left = sizes
    for part, share in shares.items():
        found[part] = held_out(sizes, left, share)
        left = left - found[part]
    found["train"] = left
    return found


def _split_one_by_one(
    starts: Tensor, targets: Tensor, order: Tensor | None, shares: Mapping[Part, float], seed: int
) -> Split:
    bounds = starts.tolist()
    found: dict[Any, list[tuple[IntArray, IntArray]]] = {}
    for c in range(len(bounds) - 1):
        rows = torch.arange(bounds[c], bounds[c + 1]) if order is None else order[bounds[c] : bounds[c + 1]]
        for part, chosen in split_rows(len(rows), targets[rows], dict(shares), seed=seed, client=c).items():
            found.setdefault(part, []).append((rows[chosen].numpy(), np.array([len(chosen)])))
    return {part: _connected(blocks) for part, blocks in found.items()}


def _connected(blocks: list[tuple[IntArray, IntArray]]) -> tuple[Tensor, Tensor]:
    sizes = np.concatenate([np.zeros(1, dtype=np.int64), *(counts for _, counts in blocks)])
    return torch.from_numpy(np.concatenate([rows for rows, _ in blocks])), torch.from_numpy(np.cumsum(sizes))
