"""Groups of rows: every row is in exactly one, and a band's name says what is in it."""

from __future__ import annotations

import numpy as np
import pytest

from dqnfed.data.raw import DataError
from dqnfed.data.row_groups import MISSING, row_groups
from dqnfed.data.table import Table


def test_categories_are_named_as_in_the_table_and_those_without_one_come_last() -> None:
    table = Table("t", {"sex": np.array(["M", "", "F", "M"]), "code": np.array([2.0, 10.0, np.nan, 2.0])})
    sex, code = row_groups(table, ["sex", "code"])
    assert sex.names == ("F", "M", MISSING)
    assert [sex.names[i] for i in sex.numbers] == ["M", MISSING, "F", "M"]
    assert code.names == ("2", "10", MISSING)
    assert not code.is_cut


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("whole", [True, False])
def test_bands_hold_what_their_names_say(seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal(55, 12, size=200), 0 if whole else 3)
    values[rng.random(200) < 0.1] = np.nan
    [age] = row_groups(Table("t", {"age": values}), ["age"])
    assert age.is_cut
    assert age.names[-1] == MISSING
    counts = np.bincount(age.numbers)
    assert counts.sum() == 200
    assert counts[:-1].min() > 20  # near quarters
    for value, g in zip(values, age.numbers, strict=True):
        name = age.names[g]
        words = name.split()
        if np.isnan(value):
            assert name == MISSING
        elif name.startswith("under"):
            assert value < float(words[1])
        elif name.endswith("over"):
            assert value >= float(words[0])
        elif whole:
            assert float(words[0]) <= value <= float(words[2])
        else:
            assert float(words[0]) <= value < float(words[3])


def test_edges_can_be_named_and_empty_bands_are_left_out() -> None:
    table = Table("t", {"age": np.array([30.0, 44, 45, 64, 65, 90, 91])})
    [age] = row_groups(table, ["age:45:65:200"])
    assert age.names == ("under 45", "45 to 64", "65 to 199")
    assert age.numbers.tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_a_constant_column_of_holes_and_one_number_is_two_groups() -> None:
    [found] = row_groups(Table("t", {"x": np.array([7.0, np.nan, 7.0])}), ["x"])
    assert found.names == ("7", MISSING)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("sxe", "no column 'sxe' for the groups of rows. Did you mean 'sex'"),
        ("age:65:45", "rising numbers"),
        ("age:old", "rising numbers"),
        ("sex:1", "holds text"),
        ("id", "more than 12 groups"),
    ],
)
def test_what_makes_no_groups_is_refused(wanted: str, message: str) -> None:
    n = 30
    columns = {
        "sex": np.array(["F", "M"] * 15),
        "age": np.arange(30.0, 60),
        "id": np.array([f"P{i}" for i in range(n)]),
    }
    with pytest.raises(DataError, match=message):
        row_groups(Table("t", columns), [wanted])
