"""Small files in the official layouts, with known contents, for the reader tests and the preset miniatures."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

CINIC = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def blobs(rng: np.random.Generator, n: int, n_classes: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return byte images whose brightness pattern tells the class, and labels that go round the classes."""
    labels = np.arange(n) % n_classes
    patterns = np.random.default_rng(99).integers(40, 216, (n_classes, *shape))
    noise = rng.integers(-40, 40, (n, *shape))
    return (patterns[labels] + noise).astype(np.uint8), labels


def write_idx(path: Path, values: np.ndarray) -> None:
    code = {"u1": 0x08, "i4": 0x0C}[values.dtype.str[1:]]
    header = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(values.dtype.newbyteorder(">")).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)


def cifar10(folder: Path, n_batch: int = 20, n_test: int = 20) -> None:
    root = folder / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels, labels = blobs(np.random.default_rng(i), n_test if i == 5 else n_batch, 10, (3072,))
        np.column_stack([labels.astype(np.uint8), pixels]).tofile(root / f"{name}.bin")


def cifar10_python(folder: Path, n_batch: int = 20) -> None:
    root = folder / "cifar-10-batches-py"
    root.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels, labels = blobs(np.random.default_rng(i), n_batch, 10, (3072,))
        batch: dict[bytes, Any] = {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": pixels}
        (root / name).write_bytes(pickle.dumps(batch, protocol=2))


def cifar100(folder: Path, n_train: int = 300, n_test: int = 100) -> None:
    root = folder / "cifar-100-binary"
    root.mkdir(parents=True)
    for i, (name, n) in enumerate({"train": n_train, "test": n_test}.items()):
        pixels, fine = blobs(np.random.default_rng(i), n, 100, (3072,))
        np.column_stack([fine // 5, fine, pixels]).astype(np.uint8).tofile(root / f"{name}.bin")


def mnist(folder: Path, n_train: int = 100, n_test: int = 20) -> None:
    for i, (prefix, n) in enumerate({"train": n_train, "t10k": n_test}.items()):
        pixels, labels = blobs(np.random.default_rng(i), n, 10, (28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels.astype(np.uint8))


def emnist(folder: Path, n_train: int = 620, n_test: int = 124) -> None:
    for i, (part, n) in enumerate({"train": n_train, "test": n_test}.items()):
        pixels, labels = blobs(np.random.default_rng(i), n, 62, (28, 28))
        write_idx(folder / "gzip" / f"emnist-byclass-{part}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / "gzip" / f"emnist-byclass-{part}-labels-idx1-ubyte.gz", labels.astype(np.uint8))


def qmnist(folder: Path, n: int = 120, n_writers: int = 4) -> None:
    pixels, labels = blobs(np.random.default_rng(0), n, 10, (28, 28))
    extended = np.zeros((n, 8), np.int32)
    extended[:, 0], extended[:, 2] = labels, 100 + np.arange(n) % n_writers
    write_idx(folder / "qmnist-train-images-idx3-ubyte.gz", pixels)
    write_idx(folder / "qmnist-train-labels-idx2-int.gz", extended)


def mnist_by_writer(folder: Path, n: int = 120, n_writers: int = 4) -> None:
    folder.mkdir(parents=True)
    pixels, labels = blobs(np.random.default_rng(0), n, 10, (28, 28))
    np.savez_compressed(
        folder / "mnist_by_writer.npz", x=pixels, y=labels.astype(np.uint8), client=100 + np.arange(n) % n_writers
    )


def leaf(path: Path, data: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    path.write_text(json.dumps(content))


def femnist(folder: Path, n_writers: int = 4, n_each: int = 25) -> None:
    for part, share in (("train", 0.8), ("test", 0.2)):
        n = int(n_each * share)
        for file in range(2):
            data = {}
            for w in range(file, n_writers, 2):
                pixels, labels = blobs(np.random.default_rng(w), n, 62, (784,))
                data[f"f{w:04d}_0{w % 10}"] = ((pixels / 255).tolist(), labels.tolist())
            leaf(folder / part / f"all_data_{file}_niid_0_keep_0_{part}_9.json", data)


SPEECH = (
    "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds that lour'd. "
)


def shakespeare(folder: Path, n_roles: int = 3, n_windows: int = 200) -> None:
    data = {}
    for r in range(n_roles):
        text = (SPEECH[r:] * 20)[: n_windows + 80]
        data[f"RICHARD_III_ROLE_{r}"] = (
            [text[i : i + 80] for i in range(n_windows)],
            [text[i + 80] for i in range(n_windows)],
        )
    leaf(folder / "all_data.json", data)


def save_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def tinyimagenet(folder: Path, n_classes: int = 4, n_each: int = 12, n_val: int = 8) -> None:
    root = folder / "tiny-imagenet-200"
    words = [f"n{1000 + c}" for c in range(n_classes)]
    root.mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(words) + "\n")
    pixels, labels = blobs(np.random.default_rng(0), n_classes * n_each + n_val, n_classes, (64, 64, 3))
    lines = []
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        word = words[label]
        if i < n_classes * n_each:
            grey = image[:, :, 0] if i == 0 else image  # some official images are grey
            save_image(root / "train" / word / "images" / f"{word}_{i}.JPEG", grey)
        else:
            save_image(root / "val" / "images" / f"val_{i}.JPEG", image)
            lines.append(f"val_{i}.JPEG\t{word}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")


def cinic10(folder: Path, n_each: int = 6) -> None:
    for p, part in enumerate(("train", "valid", "test")):
        pixels, labels = blobs(np.random.default_rng(p), 10 * n_each, 10, (32, 32, 3))
        for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            save_image(folder / part / CINIC[label] / f"n{i:08d}.png", image)


def clothing1m(folder: Path, n_each: int = 2, size: tuple[int, int] = (40, 30)) -> None:
    rng = np.random.default_rng(0)
    number = 0
    noisy, clean = list[str](), list[str]()
    for kind, part in (("noisy", "noisy_train"), ("clean", "clean_val"), ("clean", "clean_test")):
        keys = []
        pixels, labels = blobs(rng, 14 * n_each, 14, (*size, 3))
        for image, label in zip(pixels, labels, strict=True):
            key = f"images/{number % 10}/{number % 100:02d}/{number},{number}.jpg"
            number += 1
            save_image(folder / key, image)
            keys.append(key)
            (noisy if kind == "noisy" else clean).append(f"{key} {label}")
        (folder / f"{part}_key_list.txt").write_text("\n".join(keys) + "\n")
    (folder / "noisy_label_kv.txt").write_text("\n".join(noisy) + "\n")
    (folder / "clean_label_kv.txt").write_text("\n".join(clean) + "\n")


def libsvm(folder: Path, name: str = "a1a") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("-1 1:1 3:0.5\n+1 2:1\n-1 4:2\n")
    (folder / f"{name}.t").write_text("+1 1:1 5:1\n-1 2:1\n")
