"""The printed values: complete rows, and found under the names that experiments and methods have here."""

import pytest

from dqnfed.experiments.paper import TABLES, printed_table


def test_rows_are_as_long_as_their_columns() -> None:
    for table in TABLES:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows.values())


def test_keys_are_unique() -> None:
    assert len({table.key for table in TABLES}) == len(TABLES)


@pytest.mark.parametrize("name", ["cifar10-setup1", "CIFAR10_setup1", "cifar-10 Setup 1"])
def test_experiments_are_found_whatever_their_punctuation(name: str) -> None:
    table = printed_table(name)
    assert table is not None
    assert table.key == "cifar10-setup1"


def test_a_variant_stands_beside_the_table_of_its_setting() -> None:
    assert printed_table("cifar10-setup1-full") is printed_table("cifar10-setup1")
    assert printed_table("cifar10-setup2-cnn") is None  # another model


def test_other_experiments_have_no_printed_table() -> None:
    assert printed_table("digits") is None


@pytest.mark.parametrize(
    ("algorithm", "mean"),
    [
        ("fedavg", 46.85),
        ("q-ffl", 46.30),
        ("qffl", 46.30),
        ("fedmgda-plus", 45.34),
        ("dqn-fed", 47.72),
        ("adafed", None),
    ],
)
def test_methods_are_found_under_our_names(algorithm: str, mean: float | None) -> None:
    table = printed_table("cifar10-setup1")
    assert table is not None
    assert table.value(algorithm, "mean") == mean
    assert table.value(algorithm, "jain") is None


def test_a_variant_is_not_taken_for_the_printed_method() -> None:
    table = printed_table("cifar10-setup1")
    assert table is not None
    assert table.printed_name("dqn-fed-literal") is None
