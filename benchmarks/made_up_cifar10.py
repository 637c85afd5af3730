"""Writes made-up images in CIFAR-10's format, to time runs without the dataset: times depend on the shapes.

export DQNFED_DATA=FOLDER
python benchmarks/made_up_cifar10.py        # FOLDER/cifar10/cifar-10-batches-bin, 184 MB
python benchmarks/whole_runs.py cifar10-setup1-full fedavg --rounds 1000 --repeat 1 --set eval.every=20

Every class has a pattern of 4 x 4 squares in three colours, and an image is its class's pattern with Gaussian noise on
every square. With noise on every pixel a network soon fits its training images to a loss of almost 0, which it does not
on CIFAR-10. Accuracies on these images mean nothing. A folder that exists is left alone: it may hold the real ones.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dqnfed.data.cache import default_data_dir
from dqnfed.data.readers.cifar import BATCHES

N_IMAGES, N_CLASSES, SEED = 10_000, 10, 0  # images in each of the six files
SQUARES, PIXELS = (3, 4, 4), (1, 8, 8)  # of an image, and of a square
CONTRAST, NOISE = 10.0, 50.0  # standard deviations of the patterns and of the noise, in grey levels


def records(patterns: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return the records of one file, uint8 [N, 1 + 3072]: the label, then the red, green and blue pixels."""
    labels = generator.permutation(np.arange(N_IMAGES) % N_CLASSES)
    squares = np.clip(patterns[labels] + NOISE * generator.standard_normal((N_IMAGES, *SQUARES)), 0.0, 255.0)
    pixels = np.kron(squares.astype(np.uint8), np.ones((1, *PIXELS), np.uint8))
    return np.concatenate([labels.astype(np.uint8)[:, None], pixels.reshape(N_IMAGES, -1)], axis=1)


def main() -> None:
    """Write the five training files and the test file."""
    folder: Path = default_data_dir() / "cifar10" / "cifar-10-batches-bin"
    if folder.exists():
        sys.exit(f"{folder} exists and is left alone; name another place in DQNFED_DATA, or delete it.")
    folder.mkdir(parents=True)
    generator = np.random.default_rng(SEED)
    patterns = 128.0 + CONTRAST * generator.standard_normal((N_CLASSES, *SQUARES))
    for name in (*BATCHES, "test_batch"):
        records(patterns, generator).tofile(folder / f"{name}.bin")
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
