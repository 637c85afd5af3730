"""CIFAR-10 and CIFAR-100: the binary version, and the python version through an unpickler that runs no code."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import MissingFiles, find, is_there

SHAPE = (3, 32, 32)
N_PIXELS = 3 * 32 * 32
# NumPy's own helpers for unpickling arrays, wherever the installed version keeps them.
RECONSTRUCT, FROM_BUFFER = np.zeros(1).__reduce__()[0], np.zeros(1).__reduce_ex__(5)[0]
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def read_cifar10(folder: Path) -> RawData:
    """Return CIFAR-10 (Krizhevsky, 2009) from `cifar-10-batches-bin` or `cifar-10-batches-py`, in the files' order."""
    if is_there(folder, "cifar-10-batches-bin"):
        root = folder / "cifar-10-batches-bin"
        parts = [binary_records(find(root, f"{name}.bin"), n_labels=1, n_classes=10) for name in BATCHES]
        test = binary_records(find(root, "test_batch.bin"), n_labels=1, n_classes=10)
    elif is_there(folder, "cifar-10-batches-py"):
        root = folder / "cifar-10-batches-py"
        parts = [python_batch(find(root, name), b"labels", n_classes=10) for name in BATCHES]
        test = python_batch(find(root, "test_batch"), b"labels", n_classes=10)
    else:
        raise MissingFiles(f"{folder} holds neither cifar-10-batches-bin nor cifar-10-batches-py.")
    return replace(together("cifar10", parts, test, n_classes=10), class_names=CIFAR10_CLASSES)


def read_cifar100(folder: Path) -> RawData:
    """Return CIFAR-100 with its 100 fine labels from `cifar-100-binary` or `cifar-100-python`."""
    if is_there(folder, "cifar-100-binary"):
        root = folder / "cifar-100-binary"
        train, test = (binary_records(find(root, f"{p}.bin"), n_labels=2, n_classes=100) for p in ("train", "test"))
    elif is_there(folder, "cifar-100-python"):
        root = folder / "cifar-100-python"
        train, test = (python_batch(find(root, p), b"fine_labels", n_classes=100) for p in ("train", "test"))
    else:
        raise MissingFiles(f"{folder} holds neither cifar-100-binary nor cifar-100-python.")
    return together("cifar100", [train], test, n_classes=100)


def binary_records(path: Path, *, n_labels: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [N, 3, 32, 32] and labels of one binary file: label bytes (the last is the finest), then RGB
    planes.
    """
    raw = np.fromfile(path, np.uint8)
    size = n_labels + N_PIXELS
    if len(raw) == 0 or len(raw) % size:
        raise DataError(
            f"{path} has {len(raw)} bytes, not a multiple of {size}; it was cut or is another file. Fetch it again."
        )
    records = raw.reshape(-1, size)
    return records[:, n_labels:].reshape(-1, *SHAPE), checked_labels(path, records[:, n_labels - 1], n_classes)


class NumpyUnpickler(pickle.Unpickler):
    """Unpickles dictionaries, lists, numbers, bytes and plain NumPy arrays; anything else in the file is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return RECONSTRUCT
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return FROM_BUFFER
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 2 strings of bytes come through protocol 2
            import _codecs

            return _codecs.encode
        raise DataError(
            f"a CIFAR batch holds arrays and lists, but this file asks for {module}.{name}; it is not trusted."
        )


def python_batch(path: Path, label_key: bytes, *, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [N, 3, 32, 32] and labels of one file of the python version."""
    try:
        batch = NumpyUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[label_key])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is not a batch of CIFAR's python version ({error!r}); fetch it again.") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), N_PIXELS):
        raise DataError(
            f"{path}: expected uint8 pixels [{len(labels)}, {N_PIXELS}], got {pixels.dtype} {list(pixels.shape)}."
        )
    return pixels.reshape(-1, *SHAPE), checked_labels(path, labels, n_classes)


def checked_labels(path: Path, labels: np.ndarray, n_classes: int) -> np.ndarray:
    if len(labels) and not (labels.min() >= 0 and labels.max() < n_classes):
        raise DataError(
            f"{path}: labels must be 0..{n_classes - 1}, found {labels.max()}; it is damaged or another file."
        )
    return labels.astype(np.int64)


def together(
    name: str, train: list[tuple[np.ndarray, np.ndarray]], test: tuple[np.ndarray, np.ndarray], *, n_classes: int
) -> RawData:
    parts = [*train, test]
    n_train = sum(len(labels) for _, labels in train)
    targets = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    return RawData(
        name=name,
        inputs=torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])),
        targets=targets,
        n_classes=n_classes,
        is_test=torch.arange(len(targets)) >= n_train,
    )
