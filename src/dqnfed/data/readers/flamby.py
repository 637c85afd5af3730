"""FLamby's layouts (Ogier du Terrail et al., NeurIPS 2022): Fed-Heart-Disease, Fed-TCGA-BRCA and Fed-ISIC2019."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import Column, DataError, RawData
from dqnfed.data.readers.files import find, text_of
from dqnfed.data.readers.images import labelled_images

HEART_FILES = {"cleveland": 0, "hungarian": 1, "switzerland": 2, "va": 3}
HEART_COLUMNS = (  # the last three of the 13 usual ones are mostly missing, and FLamby leaves them out
    Column("age"), Column("sex"), Column("cp", ("1", "2", "3", "4")), Column("trestbps"), Column("chol"), Column("fbs"),
    Column("restecg", ("0", "1", "2")), Column("thalach"), Column("exang"), Column("oldpeak"),
)  # fmt: skip
HEART_TRAIN, HEART_SEED = 0.66, 43  # FLamby's split, drawn by scikit-learn
ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
ISIC_SIDE = 200  # FLamby cuts this square from the middle of images whose shorter side is 224
N_BRCA = 39  # features of Fed-TCGA-BRCA
SPLIT_PLACES = ("dataset_creation_scripts/train_test_split", "train_test_split")


def read_fed_heart(folder: Path) -> RawData:
    """Return Fed-Heart-Disease: the patients of four hospitals without a missing value in ten columns.

    The rows and the test set are FLamby's. Unlike FLamby, columns are standardised, and every code of `cp` and
    `restecg` is an input, the first one too.
    """
    inputs, targets, clients, tests = [], [], [], []
    for name, number in HEART_FILES.items():
        path = find(folder, f"processed.{name}.data")
        rows = [row for row in csv.reader(text_of(path).splitlines()) if row]
        if any(len(row) != 14 for row in rows):
            raise DataError(f"{path} must have 14 values a line, as UCI's processed files have; fetch it again.")
        kept = [[*row[:10], row[13]] for row in rows if "?" not in (*row[:10], row[13])]
        if not kept:
            raise DataError(f"{path} has no patient without a missing value.")
        values = numbers_in(path, kept)
        labels = (values[:, -1] > 0).astype(np.int64)
        inputs.append(values[:, :-1])
        targets.append(labels)
        clients.append(np.full(len(kept), number))
        tests.append(heart_test_rows(labels))
    return RawData(
        name="fed_heart",
        inputs=torch.from_numpy(np.concatenate(inputs).astype(np.float32)),
        targets=torch.from_numpy(np.concatenate(targets)),
        n_classes=2,
        clients=torch.from_numpy(np.concatenate(clients)),
        client_names=tuple(HEART_FILES),
        class_names=("no disease", "disease"),
        is_test=torch.from_numpy(np.concatenate(tests)),
        columns=HEART_COLUMNS,
    )


def heart_test_rows(labels: np.ndarray) -> np.ndarray:
    """Return which of a hospital's patients FLamby tests on: a third of each class, where both have more than two."""
    from sklearn.model_selection import train_test_split

    counts = np.bincount(labels, minlength=2)
    _, test = train_test_split(
        np.arange(len(labels)),
        test_size=1.0 - HEART_TRAIN,
        train_size=HEART_TRAIN,
        random_state=HEART_SEED,
        stratify=labels if counts.min() > 2 else None,
    )
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[test] = True
    return is_test


def read_fed_tcga_brca(folder: Path) -> RawData:
    """Return Fed-TCGA-BRCA: 39 features of breast cancer patients in six regions, and whether one was seen to die.

    Unlike FLamby, which fits Cox's model, the time `T` is not used: Cox's loss compares patients with each other and is
    no mean over examples. Rows, regions and test set are FLamby's.
    """
    path = find(folder, "brca.csv")
    rows = list(csv.reader(text_of(path).splitlines()))
    head, body = rows[0] if rows else [], rows[1:]
    if len(head) != N_BRCA + 3 or head[0] != "pid" or head[-2:] != ["E", "T"]:
        raise DataError(f"{path} must have the columns pid, {N_BRCA} features, E and T, but has {len(head)} columns.")
    folds = fold_rows(find(folder, *(f"{place}.csv" for place in SPLIT_PLACES)), "pid")
    known = [row for row in body if row[0] in folds]
    if not known or any(len(row) != len(head) for row in known):
        raise DataError(f"{path} has no patient of the split file, or lines of another length than its header.")
    values = numbers_in(path, [row[1:] for row in known])
    return RawData(
        name="fed_tcga_brca",
        inputs=torch.from_numpy(values[:, :N_BRCA].astype(np.float32)),
        targets=torch.from_numpy(values[:, N_BRCA].astype(np.int64)),
        n_classes=2,
        clients=torch.tensor([folds[row[0]][0] for row in known]),
        client_names=center_names(folds.values()),
        class_names=("alive when last seen", "died"),
        is_test=torch.tensor([folds[row[0]][1] for row in known]),
        columns=tuple(Column(name) for name in head[1 : N_BRCA + 1]),
    )


def read_fed_isic(folder: Path) -> RawData:
    """Return Fed-ISIC2019: dermoscopy images of six centres, eight diagnoses, cut to 200x200 in the middle."""
    split = find(folder, *SPLIT_PLACES, *(f"{place}.csv" for place in SPLIT_PLACES))
    images = find(folder, "ISIC_2019_Training_Input_preprocessed")
    folds = fold_rows(split, "image")
    with_target = {row["image"]: row for row in csv.DictReader(text_of(split).splitlines())}
    parts: dict[bool, list[tuple[Path, int]]] = {False: [], True: []}
    centers: dict[bool, list[int]] = {False: [], True: []}
    for image, (center, is_test) in folds.items():
        target = with_target[image].get("target") or ""
        if not target.isdigit() or int(target) >= len(ISIC_CLASSES):
            raise DataError(f"{split}: image {image!r} has the target {target!r}, but there are classes 0 to 7.")
        parts[is_test].append((images / f"{image}.jpg", int(target)))
        centers[is_test].append(center)
    raw = labelled_images(
        "fed_isic", parts[False], parts[True], n_classes=len(ISIC_CLASSES), side=ISIC_SIDE, scale_to=224
    )
    return replace(
        raw,
        clients=torch.tensor(centers[False] + centers[True]),
        client_names=center_names(folds.values()),
        class_names=ISIC_CLASSES,
    )


def fold_rows(path: Path, key: str) -> dict[str, tuple[int, bool]]:
    """Return centre and test mark by name, from the column `fold2` with entries such as train_0 or test_5."""
    found: dict[str, tuple[int, bool]] = {}
    for number, row in enumerate(csv.DictReader(text_of(path).splitlines()), start=2):
        part, _, center = (row.get("fold2") or "").partition("_")
        if not row.get(key) or part not in ("train", "test") or not center.isdigit():
            raise DataError(
                f"{path}, line {number}: expected the columns {key} and fold2 with entries such as train_0, got {row}."
            )
        found[str(row[key])] = int(center), part == "test"
    if not found:
        raise DataError(f"{path} names nobody; fetch it again.")
    return found


def center_names(folds: Iterable[tuple[int, bool]]) -> tuple[str, ...]:
    """Return the centres' names, counted from 0 as in the split file."""
    return tuple(f"centre {number}" for number in range(1 + max(center for center, _ in folds)))


def numbers_in(path: Path, rows: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the rows as numbers."""
    try:
        return np.array([[float(value) for value in row] for row in rows], dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path} holds something that is no number ({error}); fetch it again.") from error
