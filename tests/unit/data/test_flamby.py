"""FLamby's files in its own layouts: rows, centres and test sets as it has them."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dqnfed.data.load import load
from dqnfed.data.raw import DataError
from dqnfed.data.readers.flamby import read_fed_heart, read_fed_isic, read_fed_tcga_brca
from dqnfed.experiments.config import checked
from dqnfed.experiments.experiment import run_experiment

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def heart(folder: Path) -> Path:
    """Write UCI's files, which FLamby's script downloads, from those that come with the package."""
    folder.mkdir(parents=True)
    for name in HOSPITALS:
        source = resources.files("dqnfed.data") / "files" / "heart" / f"processed.{name}.data"
        (folder / f"processed.{name}.data").write_bytes(source.read_bytes())
    return folder


def brca(folder: Path) -> Path:
    """Write brca.csv and the split file with 6 regions of 10 patients, 3 of each for the test; one is in no region."""
    random = np.random.default_rng(0)
    (folder / "dataset_creation_scripts").mkdir(parents=True)
    names = [f"TCGA-{i:02}" for i in range(60)]
    with (folder / "brca.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pid", "age_at_index", *(f"feature, {i}" for i in range(38)), "E", "T"])
        for name in [*names[::-1], "TCGA-99"]:
            writer.writerow([name, 40 + int(name[-2:]), *random.integers(0, 2, 38), float(int(name[-1]) % 2), 100.0])
    with (folder / "dataset_creation_scripts" / "train_test_split.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pid", "fold", "fold2"])
        for i, name in enumerate(names):
            part = "test" if i % 10 < 3 else "train"
            writer.writerow([name, part, f"{part}_{i // 10}"])
    return folder


def isic(folder: Path) -> Path:
    """Write 12 images of two centres, wider or higher than 224, and the split file without a suffix."""
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    images.mkdir(parents=True)
    (folder / "dataset_creation_scripts").mkdir()
    lines = ["image,target,center,fold,fold2"]
    for i in range(12):
        shape = (224, 300, 3) if i % 2 else (260, 224, 3)
        pixels = np.full(shape, 20 * i, np.uint8)
        Image.fromarray(pixels).save(images / f"ISIC_{i:03}.jpg", quality=100)
        part = "test" if i >= 8 else "train"
        lines.append(f"ISIC_{i:03},{i % 8},{i % 2},{part},{part}_{i % 2}")
    (folder / "dataset_creation_scripts" / "train_test_split").write_text("\n".join(lines) + "\n")
    return folder


def test_heart_has_flambys_patients_and_test_set(tmp_path: Path) -> None:
    raw = read_fed_heart(heart(tmp_path / "x"))
    assert raw.clients is not None
    assert raw.is_test is not None
    counts = torch.bincount(raw.clients).tolist()
    assert counts == [303, 261, 46, 130]  # patients of each hospital in FLamby's paper, table 1
    tested = [int(raw.is_test[raw.clients == k].sum()) for k in range(4)]
    assert tested == [104, 89, 16, 45]  # and those of its test set
    assert raw.client_names == HOSPITALS
    first = raw.inputs[0].tolist()
    assert first == pytest.approx([63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3])  # Cleveland's first line
    assert not raw.inputs.isnan().any()


def test_brca_has_its_regions_and_its_features(tmp_path: Path) -> None:
    raw = read_fed_tcga_brca(brca(tmp_path / "x"))
    assert raw.clients is not None
    assert raw.is_test is not None
    assert raw.inputs.shape == (60, 39)
    assert torch.bincount(raw.clients).tolist() == [10] * 6
    assert [int(raw.is_test[raw.clients == k].sum()) for k in range(6)] == [3] * 6
    ages = raw.inputs[:, 0].long() - 40  # the patient's number
    assert torch.equal(raw.clients, ages // 10)
    assert torch.equal(raw.targets, ages % 2)
    assert raw.columns[1].name == "feature, 0"


def test_isic_is_cut_in_the_middle_and_keeps_its_centres(tmp_path: Path) -> None:
    raw = read_fed_isic(isic(tmp_path / "x"))
    assert raw.clients is not None
    assert raw.is_test is not None
    assert raw.inputs.shape == (12, 3, 200, 200)
    assert raw.inputs.dtype == torch.uint8
    assert raw.is_test.tolist() == [False] * 8 + [True] * 4
    assert raw.clients.tolist() == [i % 2 for i in range(12)]
    assert raw.targets.tolist() == [i % 8 for i in range(12)]
    levels = raw.inputs.float().mean((1, 2, 3))
    assert levels == pytest.approx(20.0 * np.arange(12), abs=2)  # JPEG
    assert raw.n_classes == 8


@pytest.mark.parametrize("name", ["fed_heart", "fed_tcga_brca"])
def test_a_config_trains_on_them_and_the_cache_keeps_their_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "cache"))
    heart(tmp_path / "fed_heart_disease")
    brca(tmp_path / "fed_tcga_brca")
    assert load(name, tmp_path).columns == load(name, tmp_path).columns != ()
    data = {"name": name, "partition": "natural", "split": "official", "dir": str(tmp_path)}
    content = {"name": name, "data": data, "model": {"name": "linear"}, "train": {"rounds": 2}}
    config = checked({**content, "algorithm": {"name": "dqn-fed"}}, name)
    result = run_experiment(config, None)
    assert torch.isfinite(result.theta).all()
    assert len(result.clients) == {"fed_heart": 4, "fed_tcga_brca": 6}[name]


def test_what_is_not_flambys_is_named(tmp_path: Path) -> None:
    folder = brca(tmp_path / "brca")
    split = folder / "dataset_creation_scripts" / "train_test_split.csv"
    split.write_text(split.read_text().replace("train_0", "learn_0", 1))
    with pytest.raises(DataError, match=r"line 5: expected the columns pid and fold2"):
        read_fed_tcga_brca(folder)
    text = (folder / "brca.csv").read_text()
    (folder / "brca.csv").write_text(text.replace(",E,T", ",E,T,U", 1))
    with pytest.raises(DataError, match="must have the columns pid, 39 features, E and T"):
        read_fed_tcga_brca(folder)
    folder = heart(tmp_path / "heart")
    (folder / "processed.va.data").write_text("1,2,3\n")
    with pytest.raises(DataError, match="must have 14 values a line"):
        read_fed_heart(folder)
    (folder / "processed.va.data").unlink()
    with pytest.raises(DataError, match=r"holds none of: processed\.va\.data"):
        read_fed_heart(folder)
    with pytest.raises(DataError, match=r"github\.com/owkin/FLamby"):
        load("fed_isic", tmp_path)
