"""Partitioners: who holds which example, as seeded NumPy on label vectors, never a Python loop over examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from dqnfed.core.seeds import numpy_seed_for
from dqnfed.data.manifest import ClientIndices, Indices, Manifest, fingerprint
from dqnfed.data.raw import DataError, RawData

Scheme = Literal["iid", "shards", "dirichlet", "classes", "natural", "label"]
Pool = Literal["all", "train", "test"]


def partition(
    raw: RawData,
    scheme: Scheme,
    n_clients: int | None,
    seed: int,
    *,
    pool: Pool = "all",
    shards_per_client: int = 2,
    beta: float = 0.5,
    capped: bool = True,
    presence: float = 1.0,
    classes_per_client: int = 5,
    min_examples: int = 10,
    max_examples: int | None = None,
    max_tries: int = 1000,
) -> Manifest:
    """Return who holds which of the examples in `pool`, all of them in `train`; `split` comes next.

    `min_examples` is the floor on a client's size (dirichlet: redrawn, at most `max_tries` times; natural: smaller
    owners are left out). `max_examples` keeps the first so many of each client. `n_clients` may be None for natural
    and label.
    """
    if scheme not in get_args(Scheme):
        raise DataError(f"partition scheme {scheme!r} is unknown; choose one of {', '.join(get_args(Scheme))}.")
    available = pool_indices(raw, pool)
    rng = generator(seed, "partition", raw.name, scheme)
    names: Sequence[str] | None = None
    settings: dict[str, object] = {"n_clients": n_clients, "pool": pool}

    if scheme == "natural":
        owners, owner_names = natural_owners(raw, available)
        chosen, names = natural(owners, owner_names, n_clients, rng, min_examples=min_examples)
        settings |= {"min_examples": min_examples}
    elif scheme == "label":
        chosen = by_owner(raw.labels()[available])
        if n_clients not in (None, len(chosen)):
            raise DataError(
                f"scheme 'label' makes one client per class, {len(chosen)} here, but n_clients is {n_clients}; "
                "leave it out."
            )
        labels = [int(raw.targets[available[client[0]]]) for client in chosen]
        names = [raw.class_names[c] if raw.class_names else f"class {c}" for c in labels]
    else:
        n_clients = checked_count(n_clients, scheme, len(available))
        labels = raw.labels()[available]
        if scheme == "iid":
            chosen = iid(len(labels), n_clients, rng)
        elif scheme == "shards":
            chosen = shards(labels, n_clients, rng, shards_per_client=shards_per_client)
            settings |= {"shards_per_client": shards_per_client}
        elif scheme == "dirichlet":
            chosen = dirichlet(
                labels,
                n_clients,
                rng,
                beta=beta,
                min_examples=min_examples,
                capped=capped,
                presence=presence,
                max_tries=max_tries,
            )
            settings |= {"beta": beta, "min_examples": min_examples, "capped": capped, "max_tries": max_tries}
            settings |= {} if presence == 1 else {"presence": presence}
        else:
            chosen = classes(labels, n_clients, rng, classes_per_client=classes_per_client)
            settings |= {"classes_per_client": classes_per_client}

    if max_examples is not None:
        if max_examples < 1:
            raise DataError(f"max_examples must be at least 1, got {max_examples}.")
        chosen = [np.sort(client)[:max_examples] for client in chosen]
        settings |= {"max_examples": max_examples}
    nothing = np.empty(0, np.int64)
    return Manifest(
        dataset=raw.name,
        scheme=scheme,
        seed=seed,
        settings=settings,
        clients=tuple(ClientIndices(available[client], nothing, nothing) for client in chosen),
        names=tuple(names if names is not None else (f"client {k}" for k in range(len(chosen)))),
        n_examples=len(raw),
        fingerprint=fingerprint(raw),
    )


def iid(n_examples: int, n_clients: int, rng: np.random.Generator) -> list[Indices]:
    """Return a random equal share for every client (sizes differ by at most one)."""
    return np.array_split(rng.permutation(n_examples), n_clients)


def shards(labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, shards_per_client: int) -> list[Indices]:
    """Return `shards_per_client` random pieces of the label-sorted data for every client (McMahan et al., AISTATS
    2017).

    A client sees few classes; two shards of one class may meet, as in the published partitions.
    """
    n_shards = n_clients * shards_per_client
    if shards_per_client < 1 or n_shards > len(labels):
        raise DataError(
            f"{n_clients} clients with {shards_per_client} shards each need at least {n_shards} examples, got "
            f"{len(labels)}."
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), n_shards)
    order = rng.permutation(n_shards).reshape(n_clients, shards_per_client)
    return [np.concatenate([pieces[shard] for shard in mine]) for mine in order]


def dirichlet(
    labels: np.ndarray,
    n_clients: int,
    rng: np.random.Generator,
    *,
    beta: float,
    min_examples: int,
    capped: bool = True,
    presence: float = 1.0,
    max_tries: int = 1000,
) -> list[Indices]:
    """Return clients among whom every class is shared out in proportions drawn from Dirichlet(beta).

    Class-wise draw with the balancing step of Wang et al. (ICLR 2020) when `capped`: a client that already holds its
    equal share takes nothing from later classes. With `presence` below 1 a class is shared out among those clients only
    that may hold it, each with this probability and every client at least one class (Xu et al., CVPR 2022). Draws with
    a client below `min_examples` are rejected, `max_tries` times at most.
    """
    if not beta > 0:
        raise DataError(f"beta of a Dirichlet partition must be positive, got {beta}.")
    if not 0 < presence <= 1:
        raise DataError(f"presence must be a probability in (0, 1], got {presence}.")
    if min_examples * n_clients > len(labels):
        raise DataError(
            f"{n_clients} clients with at least {min_examples} examples each need {min_examples * n_clients} "
            "examples, "
            f"got {len(labels)}. Lower min_examples or n_clients."
        )
    by_class = by_owner(labels)
    class_sizes = np.array([len(members) for members in by_class])
    largest_minimum = -1
    for _ in range(max_tries):
        may_hold = present_classes(len(class_sizes), n_clients, rng, presence)
        cuts = dirichlet_cuts(class_sizes, n_clients, rng, beta=beta, capped=capped, may_hold=may_hold)
        smallest = int(np.diff(cuts, axis=1).sum(axis=0).min())
        if smallest >= min_examples:
            return shared_out(by_class, cuts, rng)
        largest_minimum = max(largest_minimum, smallest)
    raise DataError(
        f"no Dirichlet({beta}) draw in {max_tries} gave each of {n_clients} clients {min_examples} examples "
        f"(the best left one client with {largest_minimum}). Lower min_examples or n_clients, or raise beta or "
        "max_tries."
    )


def present_classes(n_classes: int, n_clients: int, rng: np.random.Generator, presence: float) -> np.ndarray:
    """Return [C, K] which client may hold which class; nobody is without one, and no class without anybody."""
    if presence == 1:
        return np.ones((n_classes, n_clients), dtype=bool)
    may_hold = rng.random((n_classes, n_clients)) < presence
    may_hold[rng.integers(n_classes, size=n_clients), np.arange(n_clients)] |= ~may_hold.any(axis=0)
    may_hold[np.arange(n_classes), rng.integers(n_clients, size=n_classes)] |= ~may_hold.any(axis=1)
    return may_hold


def dirichlet_cuts(
    class_sizes: np.ndarray,
    n_clients: int,
    rng: np.random.Generator,
    *,
    beta: float,
    capped: bool,
    may_hold: np.ndarray,
) -> np.ndarray:
    """Return [C, K + 1] cut points: client k takes the members cuts[c, k] to cuts[c, k + 1] of class c."""
    equal_share = class_sizes.sum() / n_clients
    held = np.zeros(n_clients)
    cuts = np.zeros((len(class_sizes), n_clients + 1), np.int64)
    shares = dirichlet_shares(len(class_sizes), n_clients, rng, beta)
    for c, size in enumerate(class_sizes):
        has_room = may_hold[c] & ((held < equal_share) if capped else True)
        share = np.where(has_room, shares[c], 0.0)
        if share.sum() <= 0:  # everybody drawn is full: those with room share equally (rare, tiny beta)
            share = (has_room if has_room.any() else may_hold[c]).astype(float)
        cuts[c, 1:] = (np.cumsum(share) / share.sum() * size).astype(np.int64)
        last = -1 if may_hold[c].all() else 1 + int(np.flatnonzero(share)[-1])  # who gets what rounding left over
        cuts[c, last:] = size
        held += np.diff(cuts[c])
    return cuts


def dirichlet_shares(n_rows: int, n_clients: int, rng: np.random.Generator, beta: float) -> np.ndarray:
    """Return [n_rows, K] draws from Dirichlet(beta), also for tiny beta, where every gamma variate can underflow to
    zero.
    """
    gammas = rng.standard_gamma(beta, (n_rows, n_clients))
    total = gammas.sum(axis=1, keepdims=True)
    winner = np.eye(n_clients)[rng.integers(n_clients, size=n_rows)]  # the limit beta -> 0: all to one client
    return np.where(total > 0, gammas / np.where(total > 0, total, 1.0), winner)


def classes(labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, classes_per_client: int) -> list[Indices]:
    """Return clients of log-normal size that each hold `classes_per_client` classes: the recipe of skewed FEMNIST.

    Sizes follow exp(N(3, 1)) + 10 and class shares exp(N(1, 1)), as in the scripts of FedProx and Ditto, rescaled so
    that every example is dealt. Every class has a holder and every client gets at least one example of each of its
    classes.
    """
    by_class = by_owner(labels)
    n_classes = len(by_class)
    if not 1 <= classes_per_client <= n_classes:
        raise DataError(
            f"classes_per_client must be between 1 and the {n_classes} classes of the data, got {classes_per_client}."
        )
    if n_clients * classes_per_client < n_classes:
        raise DataError(
            f"{n_clients} clients with {classes_per_client} classes each cannot hold all {n_classes} classes."
        )
    holds = class_choice(n_clients, n_classes, classes_per_client, rng)
    weights = (rng.lognormal(3.0, 1.0, (n_clients, 1)) + 10.0) * rng.lognormal(1.0, 1.0, (n_clients, n_classes)) * holds
    cuts = np.zeros((n_classes, n_clients + 1), np.int64)
    for c, members in enumerate(by_class):
        n_holders = int(holds[:, c].sum())
        spare = len(members) - n_holders
        if spare < 0:
            raise DataError(
                f"class {c} has {len(members)} examples for {n_holders} clients; lower n_clients or classes_per_client."
            )
        cumulative = np.cumsum(weights[:, c])
        cuts[c, 1:] = np.cumsum(holds[:, c]) + (cumulative / cumulative[-1] * spare).astype(np.int64)
    return shared_out(by_class, cuts, rng)


def class_choice(n_clients: int, n_classes: int, classes_per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Return [K, C] booleans with `classes_per_client` random classes a row and no empty column."""
    ranks = np.argsort(np.argsort(rng.random((n_clients, n_classes)), axis=1), axis=1)
    holds = ranks < classes_per_client
    for orphan in np.flatnonzero(~holds.any(axis=0)):  # rare: few clients, many classes
        spare = holds & (holds.sum(axis=0) > 1)
        client, crowded = rng.choice(np.argwhere(spare))
        holds[client, [crowded, orphan]] = False, True
    return holds


def natural(
    owners: np.ndarray,
    owner_names: Sequence[str],
    n_clients: int | None,
    rng: np.random.Generator,
    *,
    min_examples: int,
) -> tuple[list[Indices], list[str]]:
    """Return the data as its owners hold it: all owners with `min_examples` examples, or `n_clients` of them at
    random.
    """
    numbers, starts, counts = np.unique(np.sort(owners, kind="stable"), return_index=True, return_counts=True)
    held = np.split(np.argsort(owners, kind="stable"), starts[1:])
    eligible = np.flatnonzero(counts >= min_examples)
    wanted = len(eligible) if n_clients is None else n_clients
    if not 1 <= wanted <= len(eligible):
        raise DataError(
            f"{wanted} clients are wanted, but {len(eligible)} of {len(numbers)} owners hold at least "
            f"{min_examples} examples; "
            "lower n_clients or min_examples."
        )
    chosen = np.sort(rng.choice(eligible, wanted, replace=False))
    return [held[k] for k in chosen], [owner_names[int(numbers[k])] for k in chosen]


def natural_owners(raw: RawData, available: Indices) -> tuple[np.ndarray, Sequence[str]]:
    if raw.clients is None:
        raise DataError(f"{raw.name} has no natural clients; use scheme shards, dirichlet, classes or iid.")
    owners = raw.clients.numpy()
    names = raw.client_names or [str(k) for k in range(int(owners.max()) + 1)]
    return owners[available], names


def pool_indices(raw: RawData, pool: Pool) -> Indices:
    """Return the positions of the examples that are dealt out: all, or only the official training or test set."""
    if pool == "all":
        return np.arange(len(raw))
    if raw.is_test is None:
        raise DataError(f"{raw.name} has no official test set, so pool = {pool!r} means nothing; use pool = 'all'.")
    is_test = raw.is_test.numpy()
    held_out = is_test if raw.is_validation is None else is_test | raw.is_validation.numpy()
    return np.flatnonzero(is_test if pool == "test" else ~held_out)


def by_owner(labels: np.ndarray) -> list[Indices]:
    """Return, for each distinct label in order, the positions that carry it."""
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def shared_out(by_class: Sequence[Indices], cuts: np.ndarray, rng: np.random.Generator) -> list[Indices]:
    """Return each client's slice of every (shuffled) class, given [C, K + 1] cut points."""
    owner = [np.repeat(np.arange(cuts.shape[1] - 1), np.diff(cut)) for cut in cuts]
    order = np.concatenate([rng.permutation(members) for members in by_class])
    owners = np.concatenate(owner)
    sizes = np.bincount(owners, minlength=cuts.shape[1] - 1)
    return np.split(order[np.argsort(owners, kind="stable")], np.cumsum(sizes)[:-1])


def checked_count(n_clients: int | None, scheme: str, n_examples: int) -> int:
    if n_clients is None or not 1 <= n_clients <= n_examples:
        raise DataError(
            f"scheme {scheme!r} needs n_clients between 1 and the {n_examples} examples at hand, got {n_clients}; "
            "set `data.clients`."
        )
    return n_clients


def generator(seed: int, *purpose: str) -> np.random.Generator:
    """Return the stream for one purpose: the same seed gives unrelated numbers to the partition and to the split."""
    return numpy_seed_for(seed, purpose="/".join(purpose))
