"""IDX files: MNIST, Fashion-MNIST, EMNIST, and QMNIST's extended labels."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import bytes_of, find, is_there
from dqnfed.data.table import NPZ_ERRORS

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
FASHION_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
)  # fmt: skip
QMNIST_CLASS, QMNIST_WRITER = 0, 2  # columns of the extended labels (Yadav & Bottou, NeurIPS 2019, table of fields)


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an IDX file (LeCun's MNIST page): two zero bytes, type, rank, sizes, then big-endian
    values.
    """
    raw = bytes_of(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in TYPES:
        raise DataError(f"{path} does not start like an IDX file; it is another file or damaged. Fetch it again.")
    rank = raw[3]
    header = 4 + 4 * rank
    if len(raw) < header:
        raise DataError(f"{path} ends inside its header ({len(raw)} of {header} bytes); fetch it again.")
    shape = struct.unpack(f">{rank}I", raw[4:header])
    dtype = np.dtype(TYPES[raw[2]])
    expected = header + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise DataError(
            f"{path} promises {' x '.join(map(str, shape))} values, {expected} bytes, but has {len(raw)}; it was "
            "cut or "
            "damaged. Fetch it again."
        )
    return np.frombuffer(raw, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def read_mnist(folder: Path) -> RawData:
    """Return MNIST from its four IDX files, packed or not."""
    return idx_images("mnist", folder, "train-", "t10k-", n_classes=10)


def read_fashion_mnist(folder: Path) -> RawData:
    """Return Fashion-MNIST (Xiao et al., 2017) from its four IDX files, packed or not."""
    raw = idx_images("fashion_mnist", folder, "train-", "t10k-", n_classes=10)
    return replace(raw, class_names=FASHION_CLASSES)


def read_emnist(folder: Path) -> RawData:
    """Return EMNIST byclass (Cohen et al., 2017): 0-9 digits, 10-35 capitals, 36-61 small letters; 36-45 are 'a' to
    'j'.

    The official files store every image transposed; here it stands upright.
    """
    root = folder / "gzip" if is_there(folder, "gzip") else folder
    raw = idx_images("emnist", root, "emnist-byclass-train-", "emnist-byclass-test-", n_classes=62)
    return replace(raw, inputs=raw.inputs.transpose(-1, -2).contiguous())


def read_mnist_by_writer(folder: Path) -> RawData:
    """Return MNIST's training images with their NIST writers as natural clients.

    Reads `mnist_by_writer.npz` (arrays x, y, client), or MNIST's training images with QMNIST's extended labels.
    """
    if is_there(folder, "mnist_by_writer.npz"):
        path = folder / "mnist_by_writer.npz"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                images, labels, writer = (arrays[key] for key in ("x", "y", "client"))
        except NPZ_ERRORS as error:
            raise DataError(
                f"{path} is not an .npz with plain arrays x, y and client ({type(error).__name__})."
            ) from error
    else:
        images = read_idx(either(folder, "train-images-idx3-ubyte", "qmnist-train-images-idx3-ubyte"))
        extended = read_idx(either(folder, "qmnist-train-labels-idx2-int"))
        if extended.ndim != 2 or extended.shape[1] <= QMNIST_WRITER:
            raise DataError(f"{folder}: QMNIST's labels have 8 columns, but these are {list(extended.shape)}.")
        labels, writer = extended[:, QMNIST_CLASS], extended[:, QMNIST_WRITER]
    if images.ndim != 3 or labels.ndim != 1 or writer.ndim != 1 or not len(images) == len(labels) == len(writer) > 0:
        raise DataError(
            f"{folder}: images {list(images.shape)}, {len(labels)} labels and {len(writer)} writers do not belong "
            "together."
        )
    if labels.dtype.kind not in "iu" or images.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        odd = labels.max() if labels.dtype.kind not in "iu" or labels.max() > 9 else labels.min()
        raise DataError(f"{folder}: labels must be 0..9, found {odd}, and images bytes, found {images.dtype}.")
    numbers, owner = np.unique(writer, return_inverse=True)
    return RawData(
        name="mnist_by_writer",
        inputs=torch.from_numpy(images[:, None].astype(np.uint8)),
        targets=torch.from_numpy(labels.astype(np.int64)),
        n_classes=10,
        clients=torch.from_numpy(owner.astype(np.int64)),
        client_names=tuple(f"writer {number}" for number in numbers),
    )


def idx_images(name: str, folder: Path, train: str, test: str, *, n_classes: int) -> RawData:
    """Return the dataset of the four files PREFIXimages-idx3-ubyte, PREFIXlabels-idx1-ubyte."""
    images, labels = [], []
    for prefix in (train, test):
        images.append(read_idx(either(folder, f"{prefix}images-idx3-ubyte")))
        labels.append(read_idx(either(folder, f"{prefix}labels-idx1-ubyte")))
        if images[-1].ndim != 3 or len(images[-1]) != len(labels[-1]):
            raise DataError(
                f"{folder}: {prefix}images {list(images[-1].shape)} and {len(labels[-1])} labels do not match."
            )
        if labels[-1].dtype.kind not in "iu" or images[-1].dtype != np.uint8 or not len(labels[-1]):
            raise DataError(
                f"{folder}: {prefix}images must be bytes and {prefix}labels whole numbers, at least one, but they are "
                f"{len(images[-1])} {images[-1].dtype} and {len(labels[-1])} {labels[-1].dtype}."
            )
        if labels[-1].min() < 0 or labels[-1].max() >= n_classes:
            odd = labels[-1].max() if labels[-1].min() >= 0 else labels[-1].min()
            raise DataError(f"{folder}: {prefix}labels must be 0..{n_classes - 1}, found {odd}.")
    targets = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    return RawData(
        name=name,
        inputs=torch.from_numpy(np.concatenate(images)[:, None]),
        targets=targets,
        n_classes=n_classes,
        is_test=torch.arange(len(targets)) >= len(labels[0]),
    )


def either(folder: Path, *stems: str) -> Path:
    """Return the packed or unpacked file; some mirrors write a dot before idx."""
    names = [s + suffix for stem in stems for s in (stem, stem.replace("-idx", ".idx")) for suffix in (".gz", "")]
    return find(folder, *names)
