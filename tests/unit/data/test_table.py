"""Tables: three file types, one meaning; and inputs whose statistics come from training rows alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dqnfed.data import DataError
from dqnfed.data.features import Preprocessing, fit_preprocessing
from dqnfed.data.table import Table, as_text, is_hole, is_numeric, read_table
from tests.helpers.hospitals import hospital_rows, write_csv


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return read_table(write_csv(tmp_path / "t.csv", hospital_rows()))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_columns_are_numbers_or_text_with_holes(tmp_path: Path, delimiter: str) -> None:
    rows = hospital_rows()
    table = read_table(write_csv(tmp_path / "t.csv", rows, delimiter))
    assert list(table.columns) == list(rows[0])
    assert len(table) == 392
    assert is_numeric(table.columns["age"])
    assert not is_numeric(table.columns["smokes"])
    for name in ("age", "smokes"):
        assert is_hole(table.columns[name]).tolist() == [row[name] == "" for row in rows]
    known = [i for i, row in enumerate(rows) if row["age"]]
    assert table.columns["age"][known].tolist() == [float(rows[i]["age"]) for i in known]


def test_parquet_and_npz_say_the_same_as_csv(tmp_path: Path, table: Table) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {
        name: [None if hole else value for value, hole in zip(values.tolist(), is_hole(values), strict=True)]
        for name, values in table.columns.items()
    }
    pyarrow.parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", **dict(table.columns))  # type: ignore[arg-type]
    for other in (read_table(tmp_path / "t.parquet"), read_table(tmp_path / "t.npz")):
        for name, values in table.columns.items():
            assert as_text(other.columns[name]).tolist() == as_text(values).tolist()


def test_npz_matrices_become_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.arange(6).reshape(3, 2), y=np.array([0, 1, 1]), who=np.array(["a", "b", "a"]))
    table = read_table(tmp_path / "t.npz")
    assert list(table.columns) == ["x0", "x1", "y", "who"]
    assert table.columns["x1"].tolist() == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "a,b\n", "has no rows"),
        ("t.csv", "a,b\n1,2\n1\n", "line 3: 1 values for 2 columns"),
        ("t.csv", 'a,b\n\n"1\n2",2\n\n1\n', "line 6: 1 values for 2 columns"),
        ("t.csv", "a,b\n1,2\x00\n", "line 2 holds a NUL character"),
        ("t.csv", "a,a\n1,2\n", "more than one column called 'a'"),
        ("t.xlsx", "x", r"is not one of \.csv"),
        ("t.npz", "x", "is not an .npz file"),
        ("t.parquet", "x", "Parquet"),
    ],
)
def test_unreadable_tables_get_an_answer(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / name)
    with pytest.raises(DataError, match="there is no file"):
        read_table(tmp_path / "other.csv")


def test_training_inputs_are_standardised_and_the_rest_follows(table: Table) -> None:
    training = np.arange(0, len(table), 2)
    found = fit_preprocessing(table, training, ["age", "pressure", "smokes", "ward"])
    inputs = found.apply(table).astype(float)
    assert inputs.shape == (392, found.n_inputs) == (392, 2 * 2 + 4 + 3)
    for column in (0, 2):  # value, hole, value, hole
        present = training[inputs[training, column + 1] == 0]
        assert abs(inputs[present, column].mean()) < 1e-6  # float32 of standardised values
        assert abs(inputs[present, column].std() - 1) < 1e-6
        holes = inputs[:, column + 1] == 1
        assert (inputs[holes, column] == 0).all()
    assert (inputs[:, 4:8].sum(axis=1) == 1).all()  # one category each, a hole being one


def test_test_rows_do_not_leak_into_the_statistics(table: Table) -> None:
    training = np.arange(100)
    before = fit_preprocessing(table, training, ["age", "smokes"])
    changed = dict(table.columns)
    changed["age"] = changed["age"].copy()
    changed["age"][100:] *= 1000
    changed["smokes"] = np.where(np.arange(len(table)) < 100, changed["smokes"], "pipe")
    assert fit_preprocessing(Table("t", changed), training, ["age", "smokes"]) == before


def test_unseen_categories_give_zeros_and_constant_columns_do_no_harm() -> None:
    table = Table("t", {"c": np.array(["x", "y", "z"]), "k": np.array([3.0, 3.0, 3.0]), "n": np.full(3, np.nan)})
    inputs = fit_preprocessing(table, np.array([0, 1]), ["c", "k", "n"]).apply(table)
    assert inputs.tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 1, 0, 0]]


def test_preprocessing_survives_json(table: Table) -> None:
    found = fit_preprocessing(table, np.arange(200), ["age", "smokes"])
    again = Preprocessing.from_json(found.to_json())
    assert again == found
    assert np.array_equal(again.apply(table), found.apply(table))


def test_strange_columns_get_an_answer(table: Table) -> None:
    free = Table("t", {"note": np.array([f"text {i}" for i in range(200)])})
    with pytest.raises(DataError, match=r"\(200 texts\) holds more than 50 different ones in training.*--drop note"):
        fit_preprocessing(free, np.arange(200), ["note"])
    with pytest.raises(DataError, match="no columns left to learn from"):
        fit_preprocessing(table, np.arange(10), [])
    found = fit_preprocessing(table, np.arange(200), ["age"])
    text = Table("new.csv", {"age": np.array(["12", "old"])})
    with pytest.raises(DataError, match=r"held numbers in training, but new\.csv has 'old'"):
        found.apply(text)


@pytest.mark.parametrize("cell", [[1, 2], {"a": 1}, b"\xff"])
def test_a_parquet_column_of_more_than_one_value_a_cell_is_refused(tmp_path: Path, cell: object) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"y": [0, 1], "x": [cell, cell]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"column .x. is of type .*, but a cell of a table is one number or one text"):
        read_table(tmp_path / "t.parquet")


def test_codes_with_an_underscore_are_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("bed,x\n1_05,1\n12_3,2\n")
    assert read_table(tmp_path / "t.csv").columns["bed"].tolist() == ["1_05", "12_3"]


def test_texts_of_parquet_and_npz_are_read_as_those_of_csv(tmp_path: Path) -> None:
    """Spaces around them are no part of them, NA is missing, numbers are numbers."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    cells = {"label": ["no", "no ", " yes"], "age": ["31", "NA", "4.5"]}
    (tmp_path / "t.csv").write_text("label,age\nno,31\nno ,NA\n yes,4.5\n")
    pyarrow.parquet.write_table(arrow.table(cells), tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", **{name: np.array(values) for name, values in cells.items()})  # type: ignore[arg-type]
    np.savez(tmp_path / "bytes.npz", **{name: np.array(values, dtype="S") for name, values in cells.items()})  # type: ignore[arg-type]
    for name in ("t.csv", "t.parquet", "t.npz", "bytes.npz"):
        found = read_table(tmp_path / name).columns
        assert found["label"].tolist() == ["no", "no", "yes"], name
        np.testing.assert_array_equal(found["age"], [31.0, np.nan, 4.5])


def test_no_array_of_an_npz_file_is_left_out_silently(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.ones((3, 2)), x0=np.zeros(3))
    with pytest.raises(DataError, match="two columns 'x0'"):
        read_table(tmp_path / "t.npz")
    np.savez(tmp_path / "t.npz", x=np.ones(3), z=np.ones(3) * 1j)
    with pytest.raises(DataError, match="array 'z' is of type complex128"):
        read_table(tmp_path / "t.npz")
    days = np.array(["2024-01-01", "NaT"], dtype="datetime64[D]")
    np.savez(tmp_path / "t.npz", x=np.ones(2), day=days)
    assert read_table(tmp_path / "t.npz").columns["day"].tolist() == ["2024-01-01", ""]


def test_a_folder_without_one_of_its_tables_is_refused_and_other_files_are_noted(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("x,y\n1,2\n")
    (tmp_path / "c.xlsx").write_text("x")
    assert read_table(tmp_path).ignored == ("c.xlsx",)
    (tmp_path / "d.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"d\.csv is a link to a file that is not there"):
        read_table(tmp_path)
