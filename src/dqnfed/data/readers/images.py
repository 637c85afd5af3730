"""Folders of images: TinyImageNet-200, CINIC-10 and Clothing1M. Needs Pillow (the extra `images`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import MissingFiles, find, text_of

CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLOTHING_CLASSES = 14


def read_tinyimagenet(folder: Path) -> RawData:
    """Return Tiny ImageNet (Le & Yang, 2015): 100,000 training images, and the labelled validation set as test set.

    The official test set has no labels and is left out. Classes are numbered in the order of wnids.txt.
    """
    root = find(folder, "tiny-imagenet-200", "wnids.txt")
    root = root if root.is_dir() else folder
    words = text_of(find(root, "wnids.txt")).split()
    number = {word: i for i, word in enumerate(words)}
    train = [(path, number[word]) for word in words for path in listed(root / "train" / word / "images", ".jpeg")]
    annotations = find(root, "val/val_annotations.txt")
    test = []
    for line in text_of(annotations).splitlines():
        name, _, rest = line.partition("\t")
        word = rest.split("\t")[0]
        if word not in number:
            raise DataError(f"{annotations}: {name!r} is of class {word!r}, which wnids.txt does not list.")
        test.append((root / "val" / "images" / name, number[word]))
    return labelled_images("tinyimagenet", train, test, n_classes=len(words), side=64)


def read_cinic10(folder: Path) -> RawData:
    """Return CINIC-10 (Darlow et al., 2018): train, valid and test of 90,000 each; valid is the official validation
    set.
    """
    root = folder / "CINIC-10" if (folder / "CINIC-10").is_dir() else folder
    parts = {
        part: [(path, c) for c, name in enumerate(CINIC_CLASSES) for path in listed(root / part / name, ".png")]
        for part in ("train", "valid", "test")
    }
    raw = labelled_images("cinic10", parts["train"] + parts["valid"], parts["test"], n_classes=10, side=32)
    n_train, n_valid = len(parts["train"]), len(parts["valid"])
    place = torch.arange(len(raw))
    is_validation = (place >= n_train) & (place < n_train + n_valid)
    return replace(raw, is_validation=is_validation, class_names=CINIC_CLASSES)


def read_clothing1m(folder: Path, *, per_class: int | None = 2000, side: int = 224) -> RawData:
    """Return Clothing1M (Xiao et al., CVPR 2015): noisy training labels, clean validation and test labels.

    The first `per_class` training images of each noisy class are kept (None: all, 150 GB in memory); every image is
    scaled to 256 on its shorter side and cut to `side` pixels in the middle.
    """
    noisy, clean = (key_values(find(folder, f"{kind}_label_kv.txt")) for kind in ("noisy", "clean"))
    train = with_labels(folder, "noisy_train_key_list.txt", noisy)
    if per_class is not None:
        seen = [0] * CLOTHING_CLASSES
        kept = []
        for path, label in train:
            seen[label] += 1
            if seen[label] <= per_class:
                kept.append((path, label))
        train = kept
    validation = with_labels(folder, "clean_val_key_list.txt", clean)
    test = with_labels(folder, "clean_test_key_list.txt", clean)
    raw = labelled_images(
        "clothing1m",
        train + validation,
        test,
        n_classes=CLOTHING_CLASSES,
        side=side,
        scale_to=max(side, side * 256 // 224),
    )
    place = torch.arange(len(raw))
    return replace(raw, is_validation=(place >= len(train)) & (place < len(train) + len(validation)))


def key_values(path: Path) -> dict[str, int]:
    """Return {image: class} of a file with lines `images/0/00/name.jpg 5`."""
    found = {}
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        key, _, value = line.strip().rpartition(" ")
        if not key or not value.isdigit() or int(value) >= CLOTHING_CLASSES:
            raise DataError(
                f"{path}, line {number}: expected 'image class' with a class in 0..{CLOTHING_CLASSES - 1}, got "
                f"{line!r}."
            )
        found[key] = int(value)
    return found


def with_labels(folder: Path, key_list: str, labels: dict[str, int]) -> list[tuple[Path, int]]:
    keys = text_of(find(folder, key_list)).split()
    unknown = [key for key in keys if key not in labels]
    if unknown:
        raise DataError(f"{folder / key_list} names {unknown[0]!r}, which has no label ({len(unknown)} such images).")
    return [(folder / key, labels[key]) for key in keys]


def listed(folder: Path, suffix: str) -> list[Path]:
    if not folder.is_dir():
        raise MissingFiles(f"the folder {folder} is missing.")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == suffix)


def labelled_images(
    name: str,
    train: Sequence[tuple[Path, int]],
    test: Sequence[tuple[Path, int]],
    *,
    n_classes: int,
    side: int,
    scale_to: int | None = None,
) -> RawData:
    """Return the images [N, 3, side, side], training first, decoded on all cores into one block of bytes."""
    if not train or not test:
        raise DataError(f"{name}: found {len(train)} training and {len(test)} test images; both are needed.")
    both = [*train, *test]
    pixels = np.empty((len(both), 3, side, side), np.uint8)

    def decode_into(i: int) -> None:
        pixels[i] = decoded(both[i][0], side, scale_to)

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter lock
        for _ in pool.map(decode_into, range(len(both)), chunksize=256):
            pass
    return RawData(
        name=name,
        inputs=torch.from_numpy(pixels),
        targets=torch.tensor([label for _, label in both], dtype=torch.int64),
        n_classes=n_classes,
        is_test=torch.arange(len(both)) >= len(train),
    )


def decoded(path: Path, side: int, scale_to: int | None) -> np.ndarray:
    """Return one image as bytes [3, side, side], grey ones with three equal channels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading image folders needs Pillow; install it with `pip install dqnfed[images]`.") from error
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path} is not a whole image ({error}); unpack the archive again.") from error
    if scale_to is not None:
        factor = scale_to / min(image.size)
        image = image.resize((max(side, round(image.width * factor)), max(side, round(image.height * factor))))
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    if image.size != (side, side):
        raise DataError(f"{path} has {image.width}x{image.height} pixels; this dataset's images have {side}x{side}.")
    return np.asarray(image).transpose(2, 0, 1)
