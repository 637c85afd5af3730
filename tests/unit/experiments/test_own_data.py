"""Your own table: clients, splits, messages; and scores that agree with scikit-learn's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch.func import vmap

from dqnfed.data import DataError
from dqnfed.experiments.own_data import FEATURES_FILE, OwnData, check_score, load_columns, own_federation
from dqnfed.experiments.scores import auc, macro_f1, negative_cross_entropy
from tests.helpers.hospitals import hospital_rows, write_csv


def own(path: Path, rows: list[dict[str, str]] | None = None) -> OwnData:
    return OwnData(write_csv(path / "clinics.csv", rows or hospital_rows()), "hospital", "outcome", drop=("region",))


def test_a_table_becomes_a_federation(tmp_path: Path) -> None:
    found = own_federation(own(tmp_path))
    federation = found.federation
    assert federation.names == ("Avon", "Brook", "Cedar", "Dale")
    assert federation.n_examples.tolist() == [160, 96, 48, 10]
    assert federation.test.sizes.tolist() == [40, 24, 12, 2]
    assert federation.n_classes == 2
    assert found.columns.classes == ("died", "survived")
    assert torch.isfinite(federation.train.inputs).all()
    assert federation.train.inputs.mean(0)[0].abs() < 0.05  # standardised over all clients, holes count as 0
    said = " / ".join(found.notes)
    assert "died = 0, survived = 1" in said
    assert "client 'Dale' is tested on 2 rows only" in said
    assert "missing values (5" in said or "missing values (4" in said


def test_groups_are_declared_by_a_column(tmp_path: Path) -> None:
    rows = hospital_rows()
    declared = replace(own(tmp_path, rows), drop=(), group="region")
    assert own_federation(declared).federation.groups == ("urban", "urban", "rural", "rural")
    rows[0]["region"] = "rural"
    with pytest.raises(DataError, match="'Avon' must belong to one group, but column 'region' says 'rural', 'urban'"):
        own_federation(replace(own(tmp_path, rows), drop=(), group="region"))


def test_what_was_learnt_about_the_columns_is_saved(tmp_path: Path) -> None:
    found = own_federation(own(tmp_path))
    (tmp_path / FEATURES_FILE).write_text(found.text())
    assert load_columns(tmp_path) == found.columns


def test_numbers_are_regressed_and_standardised(tmp_path: Path) -> None:
    rows = hospital_rows(missing=0.0)
    found = own_federation(replace(own(tmp_path, rows), label="pressure", validation=0.1))
    train = found.federation.train.targets
    assert found.federation.n_classes is None
    assert train.dtype == torch.float32
    assert abs(float(train.mean())) < 1e-5
    assert float(train.std(correction=0)) == pytest.approx(1, abs=1e-5)
    pressures = np.array([float(row["pressure"]) for row in rows])
    assert abs(found.columns.target_mean - pressures.mean()) < 3  # 15 / sqrt(275) is 0.9
    assert found.federation.validation is not None


def test_whole_numbers_are_classes_unless_told_otherwise(tmp_path: Path) -> None:
    rows = [{**row, "outcome": str(int(row["outcome"] == "died"))} for row in hospital_rows()]
    assert own_federation(own(tmp_path, rows)).columns.classes == ("0", "1")
    assert own_federation(replace(own(tmp_path, rows), task="regression")).columns.classes == ()


def test_a_client_with_one_class_is_pointed_out(tmp_path: Path) -> None:
    rows = [{**r, "outcome": "died" if r["hospital"] == "Dale" else r["outcome"]} for r in hospital_rows()]
    found = own_federation(own(tmp_path, rows))
    assert any("client 'Dale' has one class only (died)" in note for note in found.notes)
    with pytest.raises(DataError, match="AUC is undefined for client 'Dale'"):
        check_score("auc", found)
    check_score("accuracy", found)


def changed(where: str, column: str, value: str) -> list[dict[str, str]]:
    return [{**row, column: value} if row["hospital"] == where else row for row in hospital_rows()]


def test_an_unknown_column_names_its_neighbour(tmp_path: Path) -> None:
    for field, message in (
        ({"client": "hospitl"}, "no column 'hospitl' for the client. Did you mean 'hospital'"),
        ({"label": "outcom"}, "no column 'outcom' for the label. Did you mean 'outcome'"),
        ({"group": "zone"}, "no column 'zone' for the group. It has: hospital, region, age"),
        ({"drop": ("wards",)}, "no column 'wards' for the columns to drop. Did you mean 'ward'"),
    ):
        with pytest.raises(DataError) as caught:
            own_federation(replace(own(tmp_path), **field))
        assert message in str(caught.value)


def test_impossible_tables_get_an_answer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test share of your own data is 0\.0, but every client is evaluated"):
        own_federation(replace(own(tmp_path), test=0.0))
    with pytest.raises(DataError, match="client 'Dale' has no row with a label: all 12 are empty"):
        own_federation(own(tmp_path, changed("Dale", "outcome", "")))
    with pytest.raises(DataError, match=r"12 rows of .* have no client in column 'hospital', the first is row 381"):
        own_federation(own(tmp_path, changed("Dale", "hospital", "")))
    with pytest.raises(DataError, match=r"label 'smokes' is text \(such as .*\), and regression needs numbers"):
        own_federation(replace(own(tmp_path, hospital_rows(0.0)), label="smokes", task="regression"))
    with pytest.raises(DataError, match="is 'died' in every row"):
        own_federation(own(tmp_path, [{**row, "outcome": "died"} for row in hospital_rows()]))
    with pytest.raises(DataError, match="more than 50 classes; it looks like free text"):
        own_federation(own(tmp_path, [{**row, "outcome": f"note {i}"} for i, row in enumerate(hospital_rows())]))
    with pytest.raises(DataError, match="a different value in each of 392 rows"):
        own_federation(own(tmp_path, [{**row, "hospital": f"{i}"} for i, row in enumerate(hospital_rows())]))


def test_a_client_too_small_to_be_tested_is_kept_for_training_and_said_so(tmp_path: Path) -> None:
    rows = [*hospital_rows(), {**hospital_rows()[0], "hospital": "Lonely"}]
    found = own_federation(own(tmp_path, rows))
    assert found.federation.names[-1] == "Lonely"
    assert (int(found.federation.train.sizes[-1]), int(found.federation.test.sizes[-1])) == (1, 0)
    assert "client 'Lonely' is too small to be tested: kept for training, without a score" in found.notes
    alone = [{**row, "hospital": name} for row, name in zip(hospital_rows(), "abcde", strict=False)]
    with pytest.raises(ValueError, match="no client has test examples"):
        own_federation(own(tmp_path, alone))


def test_a_text_among_numbers_is_named(tmp_path: Path) -> None:
    """With many different numbers it is refused, with few they would silently become categories: that is said."""
    rows = hospital_rows()
    rows[16]["age"] = "0x10"
    with pytest.raises(DataError, match=r"row 17, column 'age': '0x10' is no number, but nearly all other values"):
        own_federation(own(tmp_path, rows))
    found = own_federation(own(tmp_path, [{**row, "age": str(i % 7) if i else "old"} for i, row in enumerate(rows)]))
    assert any("'age' is read as 8 categories, since 'old' in row 1 is no number" in note for note in found.notes)


@pytest.mark.parametrize("write", ["{},5", "1 {}00", "{}00.000.000", "{} %", "€{}", "\u2212{}"])
def test_numbers_in_another_notation_are_refused(tmp_path: Path, write: str) -> None:
    """Few different ones would be categories, silently; as a label they would be classes."""
    rows = hospital_rows()
    odd = [write.format(i % 7) for i in range(len(rows))]
    for column in ("age", "outcome"):
        with pytest.raises(
            DataError, match=rf"row 1, column '{column}': .* is a number in a notation that is not read"
        ):
            own_federation(own(tmp_path, [{**row, column: cell} for row, cell in zip(rows, odd, strict=True)]))
    own_federation(own(tmp_path, [{**row, "age": f"2024-01-0{i % 7 + 1}"} for i, row in enumerate(rows)]))


def test_columns_that_tell_nothing_about_a_row_are_pointed_out(tmp_path: Path) -> None:
    rows = hospital_rows()[:60]
    for cells, said in (
        ([f"2024-{i // 28 + 1:02d}-{i % 28 + 1:02d}" for i in range(60)], "training rows, so hardly any tells"),
        ([f"{7 + i}" for i in range(60)], "counts the rows"),
    ):
        found = own_federation(own(tmp_path, [{**row, "age": cell} for row, cell in zip(rows, cells, strict=True)]))
        assert any("age" in note and re.search(said, note) for note in found.notes), found.notes
    rows[0]["hospital"] = rows[0]["hospital"].upper() + " "
    assert any("differ in case or spaces only" in note for note in own_federation(own(tmp_path, rows)).notes)


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (1e12, 1.0), (0.0, 1e25), (0.0, 1e-28)])
def test_targets_are_standardised_whatever_their_unit(tmp_path: Path, shift: float, scale: float) -> None:
    """Float32 has no digits for the minutes of a date in milliseconds, and no squares of 1e25."""
    rows, generator = hospital_rows(), np.random.default_rng(0)
    values = generator.normal(size=len(rows))
    labels = [repr(float(shift + scale * value)) for value in values]
    found = own_federation(own(tmp_path, [{**row, "outcome": y} for row, y in zip(rows, labels, strict=True)]))
    train = found.federation.train.targets
    assert abs(float(train.mean())) < 1e-4
    assert abs(float(train.std(correction=0)) - 1.0) < 1e-4
    again = train.double() * found.columns.target_std + found.columns.target_mean
    assert np.isin(np.round((again.numpy() - shift) / scale, 3), np.round(values, 3)).mean() > 0.95
    with pytest.raises(DataError, match=r"is 3\.5 in every row; there is nothing to learn"):
        own_federation(own(tmp_path, [{**row, "outcome": "3.5"} for row in rows]))


EXTREMES = ["inf", "-inf", "1e999", "1e300", "-1e31", "1e20", "-3e12"]


@pytest.mark.parametrize("cell", EXTREMES)
@pytest.mark.parametrize("column", ["pressure", "age"])
def test_an_infinite_or_absurd_cell_is_refused_with_row_and_column(tmp_path: Path, cell: str, column: str) -> None:
    rows = hospital_rows()
    rows[17][column] = cell
    with pytest.raises(
        DataError, match=rf"clinics.csv, row 18, column '{column}': .* \(1 such value .*extremes=missing"
    ):
        own_federation(own(tmp_path, rows))


@pytest.mark.parametrize("cell", EXTREMES)
def test_such_a_cell_is_missing_where_the_user_says_so(tmp_path: Path, cell: str) -> None:
    """The inputs are those of a table in which the cell is empty, and the terminal is told."""
    rows = hospital_rows()
    rows[17]["pressure"] = ""
    empty = own_federation(own(tmp_path, rows))
    rows[17]["pressure"] = cell
    found = own_federation(replace(own(tmp_path, rows), extremes="missing"))
    assert torch.equal(found.federation.train.inputs, empty.federation.train.inputs)
    assert torch.equal(found.federation.test.inputs, empty.federation.test.inputs)
    assert "1 value of column 'pressure' taken for missing" in " / ".join(found.notes)
    assert "in row 18" in " / ".join(found.notes)


def test_an_infinite_label_or_client_is_refused_too(tmp_path: Path) -> None:
    rows = hospital_rows(missing=0.0)
    rows[3]["pressure"] = "inf"
    with pytest.raises(DataError, match="row 4, column 'pressure': inf is not a finite number"):
        own_federation(replace(own(tmp_path, rows), label="pressure"))
    numbered = [{**row, "hospital": "inf" if row["hospital"] == "Dale" else "1"} for row in hospital_rows()]
    with pytest.raises(DataError, match="column 'hospital': inf is not a finite number"):
        own_federation(own(tmp_path, numbered))


def test_heavy_tails_are_not_absurd(tmp_path: Path) -> None:
    """Incomes of a lognormal with sigma 3, and counts that are mostly zero, are used as they are."""
    generator = np.random.default_rng(0)
    rows = hospital_rows()
    incomes = np.exp(3 * generator.standard_normal(len(rows)) + 8)
    for row, income in zip(rows, incomes, strict=True):
        row["pressure"], row["age"] = f"{income:.2f}", str(int(generator.random() < 0.02) * 10**6)
    assert own_federation(own(tmp_path, rows)).federation.n_clients == 4


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = hospital_rows()
    for i in (0, 5, 250):
        rows[i]["outcome"] = "NA"
    found = own_federation(own(tmp_path, rows))
    assert "3 rows without a label were left out" in found.notes
    assert sum(found.federation.n_examples.tolist()) + sum(found.federation.test.sizes.tolist()) == 389


@pytest.mark.parametrize("n_classes", [2, 4])
def test_scores_agree_with_scikit_learn_and_ignore_padding(n_classes: int) -> None:
    generator = torch.Generator().manual_seed(n_classes)
    k, n, real = 5, 60, 47
    outputs = torch.randn(k, n, n_classes, generator=generator, dtype=torch.float64).mul(4).round().div(4)  # ties
    targets = torch.randint(n_classes, (k, n), generator=generator)
    mask = (torch.arange(n) < real).double().expand(k, n)
    found = {f: vmap(f)(outputs, targets, mask) for f in (auc, macro_f1, negative_cross_entropy)}
    for i in range(k):
        p, y = outputs[i, :real].softmax(-1).numpy(), targets[i, :real].numpy()
        area = roc_auc_score(y, p[:, 1]) if n_classes == 2 else roc_auc_score(y, p, multi_class="ovr")
        assert float(found[auc][i]) == pytest.approx(100 * area, abs=1e-9)
        assert float(found[macro_f1][i]) == pytest.approx(100 * f1_score(y, p.argmax(1), average="macro"), abs=1e-9)
        assert float(found[negative_cross_entropy][i]) == pytest.approx(
            -log_loss(y, p, labels=range(n_classes)), abs=1e-9
        )


def test_auc_of_one_class_is_a_guess() -> None:
    outputs = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    assert float(auc(outputs, torch.ones(6, dtype=torch.int64), torch.ones(6))) == 50.0
