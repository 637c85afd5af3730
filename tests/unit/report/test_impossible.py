"""Bounds on printed values: true for every set of accuracies and every average over seeds, and tight."""

import numpy as np
import pytest

from dqnfed.experiments.paper import TABLES, PrintedTable, printed_table
from dqnfed.report.impossible import impossible_values, std_bounds
from dqnfed.report.measures import measures


def seeds_of_accuracies(rng: np.random.Generator, K: int) -> list[dict[str, float]]:
    """Return the measures of one to four seeds whose clients are spread, clustered or nearly equal."""
    found = []
    for _ in range(rng.integers(1, 5)):
        spread = rng.normal(60, rng.uniform(0.5, 40), K)
        clustered = rng.choice(rng.uniform(0, 100, 3), K)
        found.append(measures(np.clip(spread if rng.random() < 0.5 else clustered, 0, 100)))
    return found


@pytest.mark.parametrize("K", [5, 10, 20, 31, 50, 100])
@pytest.mark.parametrize(("tail", "worst", "best"), [(0.05, "worst5", "best5"), (0.10, "worst10", "best10")])
def test_no_average_over_seeds_breaks_the_bounds(K: int, tail: float, worst: str, best: str) -> None:
    rng = np.random.default_rng(K)
    for _ in range(300):
        seeds = seeds_of_accuracies(rng, K)
        mean = {key: float(np.mean([seed[key] for seed in seeds])) for key in ("mean", "std", worst, best)}
        both = std_bounds(mean["mean"], mean[worst], mean[best], K, tail)
        one = std_bounds(mean["mean"], None, mean[best], K, tail)
        assert both.low - 1e-9 <= mean["std"] <= both.high + 1e-9
        assert one.low - 1e-9 <= mean["std"]


def test_the_lower_bound_is_reached() -> None:
    a = np.array([20.0] * 5 + [50.0] * 90 + [70.0] * 5)
    found = measures(a)
    assert std_bounds(found["mean"], 20.0, 70.0, 100, 0.05).low == pytest.approx(found["std"], rel=1e-12)


def test_the_upper_bound_is_near_what_is_possible() -> None:
    """Ten clients, tails of one: the others may sit at either tail's value, and then the bound is exact."""
    a = np.array([10.0] * 5 + [90.0] * 5)
    found = measures(a)
    assert std_bounds(found["mean"], 10.0, 90.0, 10, 0.10).high == pytest.approx(found["std"], rel=1e-12)


def marked(table: PrintedTable) -> dict[str, set[str]]:
    return {name: set(impossible_values(table, name)) for name in table.rows}


@pytest.mark.parametrize(
    ("key", "everyone"), [("cifar10-setup1", {"std"}), ("shakespeare-setup1", {"std"}), ("femnist-original", {"angle"})]
)
def test_whole_columns_are_impossible(key: str, everyone: set[str]) -> None:
    table = printed_table(key)
    assert table is not None
    assert all(found == everyone for found in marked(table).values())


def test_single_impossible_rows_are_found() -> None:
    by_key = {table.key: marked(table) for table in TABLES}
    for key, method in (("cifar10-setup2", "FedHEAL"), ("cifar100-setup2", "DQN-Fed")):
        assert {name for name, found in by_key[key].items() if found} == {method}
    assert by_key["fashion-mnist"]["DQN-Fed"] == {"mean", "std"}
    assert by_key["fashion-mnist"]["q-FFL"] == {"std"}
    assert by_key["femnist-skewed"]["FedNL"] == {"angle", "kl"}
    assert by_key["femnist-skewed"]["q-FFL"] == set()
    for key in ("cinic10", "tiny-imagenet", "clothing1m", "cifar100-setup1", "cifar10-setup2-participation10"):
        assert not any(by_key[key].values())


def test_reasons_give_the_bound() -> None:
    table = printed_table("cifar10-setup1")
    assert table is not None
    assert "at least 7.85 (its square, 12.53, is possible)" in impossible_values(table, "FedAvg")["std"]
