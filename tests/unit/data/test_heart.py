"""Heart disease of four hospitals: the files' own counts, inputs worked out by hand, and no test row in the scaling."""

from __future__ import annotations

import csv
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

import dqnfed.data
from dqnfed.core.federation import Examples, Federation
from dqnfed.data import Manifest, RawData, federation_of, load, partition, split
from dqnfed.data.fetch import verify
from dqnfed.experiments.config import read_config
from dqnfed.experiments.data_source import dealt
from dqnfed.experiments.experiment import run_experiment
from dqnfed.experiments.predict import predictions

FOLDER = Path(dqnfed.data.__file__).parent / "files" / "heart"
NUMBERS = {"age": 0, "trestbps": 3, "chol": 4, "thalach": 7, "oldpeak": 9, "ca": 11}  # place in a line
ALWAYS_THERE = {"age"}
# place in a line and documented codes; the empty one is a missing value
CATEGORIES: dict[str, tuple[int, list[int | str]]] = {
    "sex": (1, [0, 1]), "cp": (2, [1, 2, 3, 4]), "fbs": (5, [0, 1, ""]), "restecg": (6, [0, 1, 2, ""]),
    "exang": (8, [0, 1, ""]), "slope": (10, [1, 2, 3, ""]), "thal": (12, [3, 6, 7, ""]),
}  # fmt: skip


def lines() -> list[tuple[str, list[str]]]:
    """Return every patient's hospital and values, by the csv module."""
    found = []
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        with (FOLDER / f"processed.{hospital}.data").open(newline="") as file:
            found += [(hospital, row) for row in csv.reader(file)]
    return found


def number(row: Sequence[str], name: str) -> float | None:
    text = row[NUMBERS[name]]
    if text == "?" or (name in ("trestbps", "chol") and float(text) == 0):
        return None
    return float(text)


def expected_inputs(train: Sequence[int]) -> np.ndarray:
    """Return the model inputs of all patients: numbers with marks of missing ones, then categories."""
    rows = [row for _, row in lines()]
    columns: list[list[float]] = []
    for name in NUMBERS:
        values = [number(row, name) for row in rows]
        known = [value for i in train if (value := values[i]) is not None]
        mean, spread = fmean(known), pstdev(known)
        columns.append([0.0 if value is None else (value - mean) / spread for value in values])
        if name not in ALWAYS_THERE:
            columns.append([float(value is None) for value in values])
    for place, codes in CATEGORIES.values():
        for code in codes:
            is_it = [
                (row[place] == "?") if code == "" else row[place] not in "?" and float(row[place]) == code
                for row in rows
            ]
            columns.append([float(hot) for hot in is_it])
    return np.array(columns).T


def split_of(seed: int) -> tuple[RawData, Manifest]:
    raw = load("heart")
    return raw, split(raw, partition(raw, "natural", None, seed), test=0.2, validation=0.2)


def test_the_hospitals_hold_the_patients_that_their_files_hold() -> None:
    raw = load("heart")
    assert raw.clients is not None
    assert raw.client_names == ("cleveland", "hungarian", "switzerland", "va-long-beach")
    assert raw.clients.bincount().tolist() == [303, 294, 123, 200]
    is_ill = [int(row[13]) > 0 for _, row in lines()]
    assert raw.targets.tolist() == is_ill
    ill = [int(raw.targets[raw.clients == k].sum()) for k in range(4)]
    assert ill == [139, 106, 115, 149]
    assert raw.inputs.shape == (920, 13)
    assert all(verdict.is_right for verdict in verify("heart"))


def test_a_missing_value_is_not_a_number_and_a_zero_that_cannot_be_is_missing() -> None:
    raw = load("heart")
    n_missing = raw.inputs.isnan().sum(0).tolist()
    rows = [row for _, row in lines()]
    for place, column in enumerate(raw.columns):
        expected = sum(row[place] == "?" for row in rows)
        if column.name in ("trestbps", "chol"):
            expected += sum(row[place] != "?" and float(row[place]) == 0 for row in rows)
        assert n_missing[place] == expected, column.name
    chol = [column.name for column in raw.columns].index("chol")
    assert raw.clients is not None
    assert raw.inputs[raw.clients == 2, chol].isnan().all()  # Switzerland has none


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_every_part_has_its_hospitals_share_of_disease(seed: int) -> None:
    raw, manifest = split_of(seed)
    labels = raw.labels()
    for client in manifest:
        n, n_ill = len(client.all), labels[client.all].sum()
        assert len(set(client.all.tolist())) == n
        for part, share in zip(client, (0.6, 0.2, 0.2), strict=True):
            assert abs(len(part) - share * n) <= 1
            assert abs(labels[part].sum() - share * n_ill) < 2.01  # drawn twice, and each draw is within one
            assert 0 < labels[part].sum() < len(part)  # both classes, even in Switzerland
    assert split_of(seed)[1].hash() == manifest.hash() != split_of(seed + 1)[1].hash()


@pytest.mark.parametrize("seed", [0, 3])
def test_inputs_are_those_worked_out_by_hand_from_the_training_rows(seed: int) -> None:
    raw, manifest = split_of(seed)
    federation = federation_of(raw, manifest)
    train, validation, test = (np.concatenate(rows) for rows in zip(*manifest, strict=True))
    expected = expected_inputs(train.tolist())
    assert expected.shape == (920, 35)
    assert federation.validation is not None
    for part, rows in ((federation.train, train), (federation.validation, validation), (federation.test, test)):
        assert part.inputs.dtype == torch.float32
        np.testing.assert_allclose(part.inputs.numpy(), expected[rows], atol=1e-5)
    assert federation.names == ("cleveland", "hungarian", "switzerland", "va-long-beach")


def test_no_test_or_validation_row_has_a_part_in_the_scaling() -> None:
    raw, manifest = split_of(0)
    held_out = torch.from_numpy(np.concatenate([np.concatenate(client[1:]) for client in manifest]))
    changed = raw.inputs.clone()
    numeric = torch.tensor([not column.codes for column in raw.columns])
    changed[held_out] = torch.where(numeric, changed[held_out] * 100 + 7, changed[held_out])

    def same(one: Examples, other: Examples) -> bool:
        return torch.equal(one.inputs, other.inputs)

    def made(inputs: torch.Tensor) -> Federation:
        return federation_of(replace(raw, inputs=inputs), manifest)

    before, after = made(raw.inputs), made(changed)
    assert same(before.train, after.train)
    assert not same(before.test, after.test)
    moved = raw.inputs.clone()
    moved[manifest.clients[0].train[0], 0] += 50
    assert not same(before.test, made(moved).test)  # a training row has


def test_a_run_needs_no_files_and_no_network_and_predicts_for_new_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setenv("DQNFED_DATA", str(tmp_path / "nothing"))
    config = read_config("heart", ["train.rounds=2", 'run.device="cpu"'])
    assert (config.train.rounds, read_config("heart").train.rounds, config.eval.every) == (2, 60, 1)
    result = run_experiment(config.with_algorithm("fedavg"), tmp_path / "run")
    assert [client["name"] for client in result.clients] == ["cleveland", "hungarian", "switzerland", "va-long-beach"]
    assert torch.isfinite(result.theta).all()

    raw, manifest = dealt(config.data, config.run.seed)
    tested = np.concatenate([client.test for client in manifest])
    patients = lines()
    rows = [[v if v != "?" else "" for v in patients[i][1][:13]] for i in tested]
    names = sorted(
        [*NUMBERS.items(), *((name, place) for name, (place, _) in CATEGORIES.items())], key=lambda at: at[1]
    )
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[name for name, _ in names], *rows])
    chosen = result.model()(federation_of(raw, manifest).test.inputs).argmax(-1)
    is_zero = np.array([row[4] != "" and float(row[4]) == 0 for row in rows])  # a table says "" for missing, not 0
    is_zero |= np.array([row[3] != "" and float(row[3]) == 0 for row in rows])
    said = np.array(predictions(tmp_path / "run", tmp_path / "new.csv").answers())
    expected = np.array(["no disease", "disease"])[chosen.numpy()]
    assert said[~is_zero].tolist() == expected[~is_zero].tolist()
    assert (~is_zero).sum() > 100
