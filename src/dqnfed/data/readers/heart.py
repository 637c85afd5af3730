"""UCI heart disease: 920 patients of four hospitals, in files that come with this package."""

from __future__ import annotations

from importlib import resources
from math import nan

import numpy as np
import torch

from dqnfed.data.raw import Column, RawData

FILES = {
    "cleveland": "processed.cleveland.data",
    "hungarian": "processed.hungarian.data",
    "switzerland": "processed.switzerland.data",
    "va-long-beach": "processed.va.data",
}
MISSING = ""  # a code of its own where some patients have no value

COLUMNS = (
    Column("age"),
    Column("sex", ("0", "1"), titles=("female", "male")),
    Column("cp", ("1", "2", "3", "4")),  # kind of chest pain
    Column("trestbps"),  # blood pressure at rest
    Column("chol"),  # serum cholesterol
    Column("fbs", ("0", "1", MISSING)),  # fasting blood sugar above 120 mg/dl
    Column("restecg", ("0", "1", "2", MISSING)),  # electrocardiogram at rest
    Column("thalach"),  # largest heart rate
    Column("exang", ("0", "1", MISSING)),  # angina by exercise
    Column("oldpeak"),  # ST depression by exercise
    Column("slope", ("1", "2", "3", MISSING)),  # of the ST segment
    Column("ca"),  # major vessels, 0 to 3
    Column("thal", ("3", "6", "7", MISSING)),
)
ZERO_IS_MISSING = ("trestbps", "chol")  # no patient has none; Switzerland's cholesterol is 0 throughout


def read_heart() -> RawData:
    """Return the 13 usual columns and whether heart disease is present (num > 0), by hospital (Detrano et al., 1989).

    Inputs are the files' values, NaN where one is missing; `federation_of` scales and encodes them.
    """
    tables = [table_in(file) for file in FILES.values()]
    table = np.concatenate(tables)
    inputs, num = table[:, :-1], table[:, -1]
    for number, column in enumerate(COLUMNS):
        if column.name in ZERO_IS_MISSING:
            inputs[inputs[:, number] == 0, number] = nan
    return RawData(
        name="heart",
        inputs=torch.from_numpy(inputs.astype(np.float32)),
        targets=torch.from_numpy((num > 0).astype(np.int64)),
        n_classes=2,
        clients=torch.from_numpy(np.repeat(np.arange(len(tables)), [len(rows) for rows in tables])),
        client_names=tuple(FILES),
        class_names=("no disease", "disease"),
        columns=COLUMNS,
    )


def table_in(file: str) -> np.ndarray:
    """Return [patients, 14] of one hospital's file, NaN for `?`."""
    text = (resources.files("dqnfed.data") / "files" / "heart" / file).read_text(encoding="ascii")
    return np.array([[nan if v == "?" else float(v) for v in line.split(",")] for line in text.splitlines()])
