"""Damaged and hostile files of every reader: what they hold, or a refusal in words; never a wrong label."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dqnfed import FedAvg, RunResult, run
from dqnfed.data import Manifest, RawData, partition
from dqnfed.data.cache import read_cached, write_cached
from dqnfed.data.catalogue import dataset_called
from dqnfed.data.fetch import unpack
from dqnfed.data.raw import DataError
from dqnfed.experiments.predict import read_inputs
from dqnfed.report.reader import read_runs
from tests.fuzz.harness import QUICK, outcome, slow_seeds, spoiled
from tests.helpers import official
from tests.helpers.bowls import network_bowl

WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cifar10": ("cifar10", partial(official.cifar10, n_batch=2, n_test=2)),
    "cifar10 python": ("cifar10", partial(official.cifar10_python, n_batch=2)),
    "cifar100": ("cifar100", partial(official.cifar100, n_train=4, n_test=2)),
    "mnist": ("mnist", partial(official.mnist, n_train=6, n_test=3)),
    "fashion_mnist": ("fashion_mnist", partial(official.mnist, n_train=6, n_test=3)),
    "emnist": ("emnist", partial(official.emnist, n_train=62, n_test=62)),
    "qmnist": ("mnist_by_writer", partial(official.qmnist, n=12)),
    "mnist_by_writer": ("mnist_by_writer", partial(official.mnist_by_writer, n=12)),
    "femnist": ("femnist", partial(official.femnist, n_writers=2, n_each=3)),
    "shakespeare": ("shakespeare", partial(official.shakespeare, n_roles=2, n_windows=5)),
    "tinyimagenet": ("tinyimagenet", partial(official.tinyimagenet, n_classes=2, n_each=1, n_val=1)),
    "cinic10": ("cinic10", partial(official.cinic10, n_each=1)),
    "clothing1m": ("clothing1m", partial(official.clothing1m, n_each=1)),
    "libsvm": ("a1a", official.libsvm),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of every dataset, small and whole."""
    found = {}
    for name, (_, write) in WRITERS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-")) / "files"
        write(folder)
        found[name] = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found


def laid_out(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)


def judge_reader(seed: int, originals: dict[str, dict[str, bytes]], folder: Path) -> None:
    chance = random.Random(seed)
    name = chance.choice(list(WRITERS))
    files = dict(originals[name])
    for _ in range(chance.choice((1, 1, 2))):
        victim = chance.choice(list(files))
        if chance.random() < 0.08 and len(files) > 1:
            del files[victim]
        elif chance.random() < 0.08:
            files[victim] = files[chance.choice(list(files))]
        else:
            files[victim] = spoiled(files[victim], chance)
    laid_out(folder, files)
    case = f"seed {seed}, {name}"
    raw, _ = outcome(lambda: dataset_called(WRITERS[name][0]).read(folder), case)
    if raw is not None:
        check_raw(raw, case)


def check_raw(raw: RawData, case: str) -> None:
    assert len(raw.inputs) == len(raw.targets) > 0, case
    assert int(raw.targets.min()) >= 0, case
    assert int(raw.targets.max()) < raw.n_classes, case
    assert not raw.inputs.is_floating_point() or bool(raw.inputs.isfinite().all()), case


@pytest.mark.parametrize("seed", QUICK)
def test_damaged_datasets(seed: int, originals: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    judge_reader(seed, originals, tmp_path / "data")


@pytest.mark.parametrize("seeds", slow_seeds(1500))
def test_many_damaged_datasets(seeds: range, originals: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    for seed in seeds:
        judge_reader(seed, originals, tmp_path / "data")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of every other file that is read: a run, a manifest, a cache, inputs and archives."""
    folder = tmp_path_factory.mktemp("small")
    case = network_bowl(n_clients=3)
    run(FedAvg(), case.problem, case.federation, rounds=2, out=folder / "run")
    raw = drawn()
    partition(raw, "iid", 3, 0).save(folder / "manifest.safetensors")
    write_cached(raw, folder / "cache.safetensors", "stamp")
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.normal(size=(5, 4)))
    np.savez(folder / "x.npz", x=rng.normal(size=(5, 4)))
    (folder / "x.csv").write_text("a,b,c,d\n" + "\n".join("1,2.5,-3,0.1" for _ in range(5)) + "\n")
    source = folder / "packed"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file.txt").write_text("content\n" * 20)
    for kind in ("zip", "gztar"):
        shutil.make_archive(str(folder / "packed"), kind, source)
    return folder


def drawn() -> RawData:
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(0, 3, 60))
    return RawData("drawn", torch.from_numpy(generator.normal(size=(60, 2)).astype(np.float32)), labels, 3)


def judge_file(seed: int, small: Path, folder: Path) -> None:
    chance = random.Random(seed)
    kind = chance.choice(("run", "run", "manifest", "cache", "x.npy", "x.npz", "x.csv", "packed.zip", "packed.tar.gz"))
    case = f"seed {seed}, {kind}"
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "run":
        shutil.copytree(small / "run", folder)
        if chance.random() < 0.5:
            (folder / "checksums.json").unlink()  # as in a folder of an earlier version
        victim = chance.choice([p for p in folder.iterdir() if p.is_file() and p.name not in (".lock",)])
        victim.write_bytes(spoiled(victim.read_bytes(), chance))
        outcome(lambda: RunResult.load(folder), f"{case} {victim.name}")
        outcome(lambda: read_runs([folder]), f"{case} {victim.name}")
        return
    names = {"manifest": "manifest.safetensors", "cache": "cache.safetensors"}
    folder.mkdir(parents=True)
    path = folder / names.get(kind, kind)
    path.write_bytes(spoiled((small / path.name).read_bytes(), chance))
    if kind == "manifest":
        found, _ = outcome(lambda: Manifest.load(path), case)
        if found is not None:
            outcome(lambda: found.check(drawn()), case)
    elif kind == "cache":
        outcome(lambda: read_cached(path, "stamp"), case)
    elif kind.startswith("x."):
        found, _ = outcome(lambda: read_inputs(path, (4,)), case)
        assert found is None or bool(found.double().isfinite().all()), case
    else:
        outcome(lambda: unpack(path), case)
        outside = {p.name for p in folder.parent.iterdir()} - {folder.name}
        assert not outside, f"{case}: {outside} outside"


@pytest.mark.parametrize("seed", QUICK)
def test_damaged_files(seed: int, small: Path, tmp_path: Path) -> None:
    judge_file(seed, small, tmp_path / "file")


@pytest.mark.parametrize("seeds", slow_seeds(1500))
def test_many_damaged_files(seeds: range, small: Path, tmp_path: Path) -> None:
    for seed in seeds:
        judge_file(seed, small, tmp_path / "file")


@pytest.mark.parametrize("label", [10, 255, -1])
def test_writers_labels_outside_the_digits_are_refused(label: int, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    official.mnist_by_writer(folder, n=12)
    with np.load(folder / "mnist_by_writer.npz") as arrays:
        content = dict(arrays)
    content["y"] = content["y"].astype(np.int64)
    content["y"][3] = label
    np.savez(folder / "mnist_by_writer.npz", **content)
    with pytest.raises(DataError, match=rf"labels must be 0\.\.9, found {label}"):
        dataset_called("mnist_by_writer").read(folder)
