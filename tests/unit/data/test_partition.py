"""Partitioners: nobody shares an example, nothing is lost, sizes and label mixes are as promised, and nothing loops
forever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed.data import DataError, Manifest, RawData, load, partition
from dqnfed.data.partition import Scheme, class_choice, dirichlet_shares

SCHEMES: list[tuple[Scheme, dict[str, Any]]] = [
    ("iid", {}),
    ("shards", {"shards_per_client": 2}),
    ("dirichlet", {"beta": 0.5}),
    ("dirichlet", {"beta": 0.1, "capped": False}),
    ("dirichlet", {"beta": 10.0, "capped": False, "presence": 0.7}),
    ("classes", {"classes_per_client": 3}),
]


def labelled(labels: np.ndarray, **columns: Any) -> RawData:
    n_classes = int(labels.max()) + 1
    return RawData("made up", torch.zeros(len(labels), 1), torch.from_numpy(labels), n_classes, **columns)


def balanced(n_examples: int, n_classes: int, seed: int = 0) -> RawData:
    return labelled(np.random.default_rng(seed).permutation(np.arange(n_examples) % n_classes))


def held(manifest: Manifest) -> np.ndarray:
    return np.concatenate([client.all for client in manifest])


@pytest.mark.parametrize(("scheme", "settings"), SCHEMES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n_examples", "n_clients"), [(997, 7), (2000, 20)])
def test_partitions_are_disjoint_and_complete(
    scheme: Scheme, settings: dict[str, Any], seed: int, n_examples: int, n_clients: int
) -> None:
    raw = balanced(n_examples, 10)
    manifest = partition(raw, scheme, n_clients, seed, **settings)
    assert len(manifest) == n_clients
    assert np.array_equal(np.sort(held(manifest)), np.arange(n_examples))
    assert manifest.label_counts(raw).sum() == n_examples
    assert manifest.sizes[:, 0].min() >= 1


@pytest.mark.parametrize(("scheme", "settings"), SCHEMES)
def test_the_seed_decides_everything(scheme: Scheme, settings: dict[str, Any]) -> None:
    raw = balanced(600, 10)
    first, again, other = (partition(raw, scheme, 6, seed, **settings).hash() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_iid_shares_differ_by_at_most_one() -> None:
    sizes = partition(balanced(1003, 10), "iid", 10, 0).sizes[:, 0]
    assert sizes.max() - sizes.min() == 1


def test_shards_give_equal_sizes_and_few_classes() -> None:
    """CIFAR-10 setup 1: 200 shards of 250, two a client; a shard lies within one class, so a client sees at most
    two.
    """
    raw = balanced(50_000, 10)
    manifest = partition(raw, "shards", 100, 0, shards_per_client=2)
    assert set(manifest.sizes[:, 0]) == {500}
    classes_held = (manifest.label_counts(raw) > 0).sum(axis=1)
    assert set(classes_held) <= {1, 2}
    assert (classes_held == 2).mean() > 0.8  # 1 - 19/199 = 90 % expected, 3 standard deviations of 100 clients are 9 %


def test_shards_of_digits_are_forty_pieces_of_the_sorted_data() -> None:
    raw = load("digits")
    manifest = partition(raw, "shards", 20, 0)
    order = np.argsort(raw.labels(), kind="stable")
    rank = np.empty(len(raw), int)
    rank[order] = np.arange(len(raw))
    for client in manifest:
        places = np.sort(rank[client.all])
        assert (np.diff(places) > 1).sum() <= 1  # two runs, or one where neighbours met
    assert set(manifest.sizes[:, 0]) <= {88, 89, 90}


@pytest.mark.parametrize(
    ("n_classes", "n_clients", "beta"), [(10, 10, 0.5), (10, 50, 0.5), (100, 50, 0.05), (200, 20, 0.05)]
)
def test_dirichlet_keeps_the_floor_in_the_papers_setups(n_classes: int, n_clients: int, beta: float) -> None:
    raw = balanced(60_000, n_classes)
    for seed in range(5):
        assert partition(raw, "dirichlet", n_clients, seed, beta=beta, min_examples=10).sizes[:, 0].min() >= 10


def test_capped_dirichlet_bounds_the_largest_client() -> None:
    """A client stops taking at its equal share, so it ends below that plus one class."""
    raw = balanced(10_000, 10)
    for seed in range(5):
        sizes = partition(raw, "dirichlet", 20, seed, beta=0.1, min_examples=0).sizes[:, 0]
        assert sizes.max() <= 10_000 / 20 + 10_000 / 10


def test_dirichlet_shares_have_the_distributions_moments() -> None:
    """Mean 1/K and variance (K - 1) / (K^2 (K beta + 1)); N = 20,000 rows, five standard errors."""
    n, k, beta = 20_000, 5, 0.5
    shares = dirichlet_shares(n, k, np.random.default_rng(0), beta)
    variance = (k - 1) / (k**2 * (k * beta + 1))
    assert np.allclose(shares.sum(axis=1), 1)
    assert np.abs(shares.mean(axis=0) - 1 / k).max() < 5 * np.sqrt(variance / n)
    assert np.abs(shares.var(axis=0) / variance - 1).max() < 5 * np.sqrt(3 / n) * 2


def test_dirichlet_with_tiny_beta_gives_whole_classes() -> None:
    """All gamma variates underflow to zero at beta = 1e-6; the limit gives each class to one client."""
    shares = dirichlet_shares(200, 4, np.random.default_rng(0), 1e-6)
    assert np.isfinite(shares).all()
    assert np.allclose(shares.max(axis=1), 1)


def test_a_smaller_beta_is_more_skewed() -> None:
    raw = balanced(20_000, 10)

    def skew(beta: float) -> float:
        counts = partition(raw, "dirichlet", 10, 0, beta=beta, min_examples=1).label_counts(raw)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert skew(0.05) > skew(0.5) > skew(5.0) > skew(500.0)
    assert skew(500.0) < 0.13  # a tenth, nearly


def test_a_floor_that_cannot_be_reached_ends_with_an_answer() -> None:
    raw = balanced(1000, 10)
    with pytest.raises(DataError, match=r"no Dirichlet\(0.01\) draw in 20 .* Lower min_examples"):
        partition(raw, "dirichlet", 50, 0, beta=0.01, min_examples=19, max_tries=20)
    with pytest.raises(DataError, match="need 1050 examples, got 1000"):
        partition(raw, "dirichlet", 50, 0, min_examples=21)


@pytest.mark.parametrize("seed", range(5))
def test_every_client_holds_its_classes_and_no_class_is_left_out(seed: int) -> None:
    raw = balanced(20_000, 10)
    manifest = partition(raw, "classes", 100, seed, classes_per_client=5)
    counts = manifest.label_counts(raw)
    assert set((counts > 0).sum(axis=1)) == {5}
    assert (counts.sum(axis=0) == 2000).all()
    sizes = manifest.sizes[:, 0]
    assert sizes.max() > 5 * np.median(sizes) or sizes.std() > 0.5 * sizes.mean()  # log-normal: heavy upper tail


@pytest.mark.parametrize(("n_clients", "n_classes", "each"), [(2, 10, 5), (3, 10, 4), (10, 10, 1), (100, 10, 5)])
def test_class_choice_covers_all_classes(n_clients: int, n_classes: int, each: int) -> None:
    for seed in range(20):
        holds = class_choice(n_clients, n_classes, each, np.random.default_rng(seed))
        assert (holds.sum(axis=1) == each).all()
        assert holds.any(axis=0).all()


def test_natural_clients_are_the_owners() -> None:
    owners = torch.tensor([3, 0, 3, 1, 3, 0, 1, 3, 0, 2])
    raw = labelled(np.arange(10) % 2, clients=owners, client_names=("ann", "bob", "cy", "dee"))
    manifest = partition(raw, "natural", None, 0, min_examples=2)
    assert manifest.names == ("ann", "bob", "dee")  # cy holds one example only
    assert [sorted(client.all) for client in manifest] == [[1, 5, 8], [3, 6], [0, 2, 4, 7]]
    two = partition(raw, "natural", 2, 0, min_examples=2)
    assert len(two) == 2
    assert set(two.names) < {"ann", "bob", "dee"}
    with pytest.raises(DataError, match="4 clients are wanted, but 3 of 4 owners"):
        partition(raw, "natural", 4, 0, min_examples=2)
    assert max(partition(raw, "natural", None, 0, min_examples=2, max_examples=2).sizes[:, 0]) == 2


def test_one_client_a_class() -> None:
    raw = balanced(90, 3)
    manifest = partition(raw, "label", None, 0)
    assert np.array_equal(manifest.label_counts(raw), 30 * np.eye(3))
    assert manifest.names == ("class 0", "class 1", "class 2")
    named = replace(raw, class_names=("shirt", "coat", "bag"))
    assert partition(named, "label", None, 0).names == ("shirt", "coat", "bag")
    with pytest.raises(DataError, match="one client per class, 3 here, but n_clients is 4"):
        partition(raw, "label", 4, 0)


def test_the_pool_keeps_the_official_test_set_out() -> None:
    raw = labelled(np.arange(100) % 10, is_test=torch.arange(100) >= 80)
    assert held(partition(raw, "iid", 4, 0, pool="train")).max() == 79
    assert held(partition(raw, "iid", 4, 0, pool="test")).min() == 80
    with pytest.raises(DataError, match="no official test set"):
        partition(balanced(100, 10), "iid", 4, 0, pool="train")


@pytest.mark.parametrize(
    ("scheme", "n_clients", "settings", "message"),
    [
        ("sharts", 5, {}, "is unknown; choose one of iid, shards"),
        ("iid", None, {}, "needs n_clients between 1 and the 100 examples"),
        ("iid", 101, {}, "needs n_clients between 1 and the 100 examples"),
        ("shards", 60, {"shards_per_client": 2}, "need at least 120 examples, got 100"),
        ("dirichlet", 5, {"beta": 0.0}, "beta of a Dirichlet partition must be positive"),
        ("classes", 5, {"classes_per_client": 11}, "between 1 and the 10 classes"),
        ("classes", 2, {"classes_per_client": 2}, "cannot hold all 10 classes"),
        ("classes", 50, {"classes_per_client": 10}, "examples for 50 clients"),
        ("natural", 5, {}, "has no natural clients"),
        ("iid", 5, {"max_examples": 0}, "max_examples must be at least 1"),
    ],
)
def test_impossible_wishes_get_an_answer(
    scheme: Any, n_clients: int | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        partition(balanced(100, 10), scheme, n_clients, 0, **settings)


@pytest.mark.parametrize("presence", [0.05, 0.3, 0.7])
def test_a_class_is_shared_out_among_those_who_may_hold_it(presence: float) -> None:
    """With Dirichlet(10) nearly everybody who may hold a class does; nobody else holds any, and none is without."""
    raw, n_clients = balanced(20_000, 14), 40
    counts = partition(
        raw, "dirichlet", n_clients, 0, beta=10.0, capped=False, presence=presence, min_examples=1
    ).label_counts(raw)
    held_classes = (counts > 0).sum(axis=1)
    assert held_classes.min() >= 1
    assert (counts > 0).any(axis=0).all()
    expected = max(presence, 1 / 14)
    spread = np.sqrt(presence * (1 - presence) / (14 * n_clients))
    assert expected - 4 * spread < held_classes.mean() / 14 < expected + 4 * spread + 1 / 14
    with pytest.raises(DataError, match=r"presence must be a probability in \(0, 1\], got 0"):
        partition(raw, "dirichlet", n_clients, 0, presence=0.0)
