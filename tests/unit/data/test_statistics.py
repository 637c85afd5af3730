"""Statistics of the sites together are those of their pooled rows; what they may not say, they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dqnfed.data.raw import DataError
from dqnfed.data.schema import Schema, SchemaColumn, fitting_table, read_schema, schema_in
from dqnfed.data.statistics import agreed, checked_statistics, combined, moments, site_statistics
from dqnfed.data.table import Table

SCHEMA = Schema(
    "outcome",
    ("no", "yes"),
    (SchemaColumn("age", "number", 0.0, 120.0), SchemaColumn("dose", "number"), SchemaColumn("ward", "category")),
)


def site(seed: int, n: int = 40, shift: float = 0.0) -> Table:
    random = np.random.default_rng(seed)
    dose = 1e6 + shift + random.normal(size=n)  # a mean far from 0: sums of squares would lose digits
    dose[random.random(n) < 0.2] = np.nan
    ward = random.choice(np.array(["A", "B", "", "rare"]), n, p=[0.5, 0.4, 0.09, 0.01])
    outcome, age = random.integers(0, 2, n).astype(float), random.uniform(20, 90, n)
    return Table(f"site {seed}", {"outcome": outcome, "age": age, "dose": dose, "ward": ward})


def said(table: Table, schema: Schema = SCHEMA) -> dict[str, Any]:
    return checked_statistics(site_statistics(table, np.arange(len(table)), schema), schema)


@pytest.mark.parametrize("seed", range(10))
def test_moments_of_parts_are_those_of_the_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [10.0 ** random.integers(-3, 7) + random.normal(size=random.integers(0, 50)) for _ in range(5)]
    whole = np.concatenate(parts)
    found = combined([moments(part) for part in parts])
    assert found.n == len(whole)
    assert found.mean == pytest.approx(whole.mean(), rel=1e-9)
    assert found.std == pytest.approx(whole.std(), rel=1e-9)


def test_federated_statistics_equal_the_pooled_ones() -> None:
    tables = [site(0), site(1, 60, 3.0), site(2, 200, -1.0)]
    preprocessing, target = agreed([said(table) for table in tables], SCHEMA)
    assert target is None
    for column in preprocessing.numeric:
        pooled = np.concatenate([table.columns[column.name] for table in tables])
        assert column.mean == pytest.approx(np.nanmean(pooled), rel=1e-9)
        assert column.std == pytest.approx(np.nanstd(pooled), rel=1e-9)
        assert column.has_holes == bool(np.isnan(pooled).any())
    assert (preprocessing.numeric[0].low, preprocessing.numeric[0].high) == (
        0.0,
        120.0,
    )  # the schema's, not a patient's
    assert preprocessing.categorical[0].categories == ("", "A", "B")


def test_rare_categories_are_not_named() -> None:
    table = site(0, 200)
    ward = np.array(["A"] * 150 + ["B"] * 41 + ["five"] * 5 + ["four"] * 4)
    found = site_statistics(Table("x", {**table.columns, "ward": ward}), np.arange(200), SCHEMA)
    assert found["categories"] == {"ward": ["A", "B", "five"]}
    assert "four" not in str(found)


def test_only_what_is_listed_is_said() -> None:
    found = site_statistics(site(3), np.arange(30), SCHEMA)
    assert set(found) == {"schema", "rows", "training", "numbers", "categories"}
    assert set(found["numbers"]) == {"age", "dose"}
    assert all(len(values) == 4 for values in found["numbers"].values())


def test_sites_too_small_for_means_take_no_part() -> None:
    with pytest.raises(DataError, match="4 training rows, fewer than 5"):
        site_statistics(site(0), np.arange(4), SCHEMA)
    table = site(0, 20)
    dose = np.full(20, np.nan)
    dose[:3] = 1.0
    with pytest.raises(DataError, match="column 'dose' has 3 known values"):
        site_statistics(Table("x", {**table.columns, "dose": dose}), np.arange(20), SCHEMA)


def test_categories_of_the_schema_are_not_sent() -> None:
    schema = Schema("outcome", ("no", "yes"), (SchemaColumn("ward", "category", categories=("A", "B", "rare")),))
    found = said(site(0), schema)
    assert found["categories"] == {}
    assert agreed([found], schema).preprocessing.categorical[0].categories == ("A", "B", "rare", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "0" * 64}, "another schema"),
        ({"training": 10**9}, "training rows of"),
        ({"numbers": {}}, "of other columns"),
        ({"numbers": {"age": [30, 1e300, 1.0, 0], "dose": [30, 1.0, 1.0, 0]}}, "cannot be read"),
        ({"numbers": {"age": [30, 130.0, 1.0, 0], "dose": [30, 1.0, 1.0, 0]}}, "column 'age' are not possible"),
        ({"numbers": {"age": [30, 50.0, -1.0, 0], "dose": [30, 1.0, 1.0, 0]}}, "cannot be read"),
        ({"numbers": {"age": [10**7, 50.0, 1.0, 0], "dose": [30, 1.0, 1.0, 0]}}, "column 'age' are not possible"),
        ({"categories": {"ward": [str(i) for i in range(51)]}}, "looks like free text"),
        ({"categories": {"ward": 3}}, "cannot be read"),
        ({"rows": "many"}, "cannot be read"),
    ],
)
def test_a_site_is_not_believed_unread(change: dict[str, Any], message: str) -> None:
    found = site_statistics(site(3), np.arange(30), SCHEMA)
    with pytest.raises(DataError, match=message):
        checked_statistics({**found, **change}, SCHEMA)


GOOD = """
label = "outcome"
classes = ["no", "yes"]
[columns.age]
kind = "number"
high = 120
[columns.ward]
kind = "category"
[split]
test = 0.3
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('label = "outcome"', "", "must name"),
        ('kind = "number"', 'kind = "numbers"', r"\[columns.age\] needs kind"),
        ("high = 120", "hihg = 120", "no key 'hihg' .did you mean 'high'"),
        ("high = 120", "high = -1\nlow = 0", "low must be below high"),
        ('classes = ["no", "yes"]', 'classes = ["no"]', "at least two names"),
        ("[columns.age]", "[columns.outcome]", "is the label"),
        ("test = 0.3", "test = 1.3", "leave something to train on"),
        ("test = 0.3", "= 3", "is not TOML"),
    ],
)
def test_a_schema_is_refused_with_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(GOOD)
    assert read_schema(path).test == 0.3
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(DataError, match=message):
        read_schema(path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("age", np.array([1.0, 2.0, 121.0]), "row 3 with a label: column 'age' is outside"),
        ("age", np.array(["1", "x", "2"]), "must hold numbers"),
        ("outcome", np.array(["no", "yes", "maybe"]), "none of the classes no, yes, but holds 'maybe'"),
        ("outcome", np.array(["", "", ""]), "no row with a label"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(column: str, values: np.ndarray, message: str) -> None:
    schema = schema_in(
        {"label": "outcome", "classes": ["no", "yes"], "columns": {"age": {"kind": "number", "high": 120}}}, "x"
    )
    columns = {"age": np.array([1.0, np.nan, 3.0]), "outcome": np.array(["no", "yes", ""]), "more": np.zeros(3)}
    assert set(fitting_table(Table("x", columns), schema).columns) == {"age", "outcome"}
    with pytest.raises(DataError, match=message):
        fitting_table(Table("x", {**columns, "outcome": np.array(["no", "yes", "no"]), column: values}), schema)
