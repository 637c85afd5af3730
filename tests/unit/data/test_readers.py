"""Readers: every official layout, whole, cut, damaged and dishonest."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed.data import DataError, RawData
from dqnfed.data.readers.cifar import read_cifar10, read_cifar100
from dqnfed.data.readers.idx import read_emnist, read_fashion_mnist, read_idx, read_mnist, read_mnist_by_writer
from dqnfed.data.readers.images import read_cinic10, read_clothing1m, read_tinyimagenet
from dqnfed.data.readers.leaf import read_femnist
from dqnfed.data.readers.libsvm import read_libsvm
from dqnfed.data.readers.shakespeare import read_shakespeare
from dqnfed.data.readers.text import ALPHABET, decode, encode, speeches, text_by_role, windows
from tests.helpers import official


def test_cifar10_binary(tmp_path: Path) -> None:
    official.cifar10(tmp_path)
    raw = read_cifar10(tmp_path)
    pixels, labels = official.blobs(np.random.default_rng(2), 20, 10, (3072,))  # the third of five batches
    assert raw.inputs.shape == (120, 3, 32, 32)
    assert raw.inputs.dtype == torch.uint8
    assert np.array_equal(raw.inputs[40:60].numpy().reshape(20, -1), pixels)
    assert raw.targets[40:60].tolist() == labels.tolist()
    assert raw.is_test is not None
    assert raw.is_test.tolist() == [False] * 100 + [True] * 20


def test_cifar10_python_version_holds_the_same(tmp_path: Path) -> None:
    official.cifar10(tmp_path / "bin")
    official.cifar10_python(tmp_path / "py")
    one, other = read_cifar10(tmp_path / "bin"), read_cifar10(tmp_path / "py")
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_unpickler_takes_arrays_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    official.cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(batch, protocol=protocol))
    assert len(read_cifar10(tmp_path)) == 120


class Hostile:
    """Unpickling this with `pickle.load` would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_the_unpickler_runs_no_code(tmp_path: Path) -> None:
    official.cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({b"data": Hostile(tmp_path / "made"), b"labels": []}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_3: .*mkdir; it is not trusted"):
        read_cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    official.cifar100(tmp_path)
    raw = read_cifar100(tmp_path)
    assert raw.n_classes == 100
    assert raw.targets[:300].tolist() == [i % 100 for i in range(300)]


def test_idx_images_and_labels(tmp_path: Path) -> None:
    official.mnist(tmp_path)
    raw = read_mnist(tmp_path)
    pixels, labels = official.blobs(np.random.default_rng(1), 20, 10, (28, 28))
    assert raw.inputs.shape == (120, 1, 28, 28)
    assert np.array_equal(raw.inputs[100:, 0].numpy(), pixels)
    assert raw.targets[100:].tolist() == labels.tolist()
    for path in list(tmp_path.glob("*.gz")):  # unpacked files are read as well
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(read_fashion_mnist(tmp_path).inputs, raw.inputs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_idx_files_hold_any_shape(tmp_path: Path, dtype: type) -> None:
    values: np.ndarray = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    official.write_idx(tmp_path / "values", values)
    assert np.array_equal(read_idx(tmp_path / "values"), values)


def test_emnist_stands_upright(tmp_path: Path) -> None:
    official.emnist(tmp_path)
    raw = read_emnist(tmp_path)
    pixels, _ = official.blobs(np.random.default_rng(0), 620, 62, (28, 28))
    assert np.array_equal(raw.inputs[5, 0].numpy(), pixels[5].T)
    assert raw.n_classes == 62


def test_writers_come_from_the_npz_or_from_qmnist(tmp_path: Path) -> None:
    official.mnist_by_writer(tmp_path / "npz")
    official.qmnist(tmp_path / "qmnist")
    one, other = read_mnist_by_writer(tmp_path / "npz"), read_mnist_by_writer(tmp_path / "qmnist")
    assert one.clients is not None
    assert other.clients is not None
    assert one.client_names == other.client_names == ("writer 100", "writer 101", "writer 102", "writer 103")
    assert torch.equal(one.clients, other.clients)
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)


def test_an_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist_by_writer.npz", x=np.array([{}]), y=np.zeros(1), client=np.zeros(1))
    with pytest.raises(DataError, match="plain arrays x, y and client"):
        read_mnist_by_writer(tmp_path)


def test_femnist_by_writer(tmp_path: Path) -> None:
    official.femnist(tmp_path / "data", n_writers=4, n_each=25)  # LEAF's own folder level
    raw = read_femnist(tmp_path)
    pixels, labels = official.blobs(np.random.default_rng(2), 20, 62, (784,))
    assert len(raw.client_names) == 4
    assert raw.clients is not None
    assert raw.is_test is not None
    mine = (raw.clients == raw.client_names.index("f0002_02")) & ~raw.is_test
    assert np.array_equal(raw.inputs[mine].numpy().reshape(20, -1), pixels)  # bytes survive LEAF's floats exactly
    assert raw.targets[mine].tolist() == labels.tolist()
    assert int(raw.is_test.sum()) == 4 * 5


def test_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    text = "To be, or not to be: [that] is the question; 42 & more?"
    assert decode(encode(text)) == text
    assert encode("é\t☃ok").tolist() == [0, 0, 0, *encode("ok")]


def test_windows_are_one_character_apart() -> None:
    codes = np.arange(100, dtype=np.uint8) % 80
    inputs, targets = windows(codes)
    assert inputs.shape == (20, 80)
    assert all(np.array_equal(inputs[i], codes[i : i + 80]) and targets[i] == codes[i + 80] for i in range(20))
    assert windows(codes[:80])[0].shape == (0, 80)


def test_shakespeare_from_leaf(tmp_path: Path) -> None:
    official.shakespeare(tmp_path, n_roles=3, n_windows=200)
    raw = read_shakespeare(tmp_path)
    assert raw.inputs.shape == (600, 80)
    assert raw.inputs.dtype == torch.uint8
    assert raw.client_names == ("RICHARD_III_ROLE_0", "RICHARD_III_ROLE_1", "RICHARD_III_ROLE_2")
    text = decode(raw.inputs[0].numpy()) + decode(raw.targets[:100].numpy())
    assert text == (official.SPEECH * 20)[:180]


PLAYS = """
THE COMPLETE WORKS

A PLAY OF TWO

by William Shakespeare

DRAMATIS PERSONAE
ANNE. a lady

ACT I. SCENE I. A street.

ANNE.
Good morrow, sir. [Aside] I like him not.
  What news?

BOB. None that I know,
    my lady.

_Exit Bob._

ANNE.
Then fare you well.

THE END

ANOTHER PLAY

by William Shakespeare

  Anne. I am another Anne.
"""


def test_plays_are_read_by_role() -> None:
    roles = text_by_role(speeches(PLAYS.splitlines()))
    assert roles["A_PLAY_OF_TWO_BOB"] == "None that I know, my lady."
    assert roles["A_PLAY_OF_TWO_ANNE"].endswith("Good morrow, sir. I like him not. What news? Then fare you well.")
    assert roles["ANOTHER_PLAY_ANNE"] == "I am another Anne."
    with pytest.raises(DataError, match="no speeches were found"):
        text_by_role(speeches(["nothing", "here"], "play"))


def test_shakespeare_from_plain_text(tmp_path: Path) -> None:
    lines = [f"RICHARD.\n{official.SPEECH}\n" for _ in range(3)] + ["EDWARD.\nToo short.\n"]
    (tmp_path / "richard_iii.txt").write_text("\n".join(lines))
    raw = read_shakespeare(tmp_path)
    assert raw.client_names == ("RICHARD_III_RICHARD",)  # Edward does not fill a window
    assert len(raw) == len(" ".join([official.SPEECH.strip()] * 3)) - 80


def test_tinyimagenet_folder(tmp_path: Path) -> None:
    official.tinyimagenet(tmp_path)
    raw = read_tinyimagenet(tmp_path)
    assert raw.inputs.shape == (4 * 12 + 8, 3, 64, 64)
    assert raw.is_test is not None
    assert int(raw.is_test.sum()) == 8
    assert raw.targets[:48].tolist() == [c for c in range(4) for _ in range(12)]  # in the order of wnids.txt
    assert raw.targets[48:].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert torch.equal(raw.inputs[0, 0], raw.inputs[0, 2])  # the grey one
    assert not torch.equal(raw.inputs[1, 0], raw.inputs[1, 2])


def test_cinic10_folder(tmp_path: Path) -> None:
    official.cinic10(tmp_path, n_each=3)
    raw = read_cinic10(tmp_path)
    assert raw.inputs.shape == (90, 3, 32, 32)
    assert raw.is_test is not None
    assert raw.is_validation is not None
    assert (int(raw.is_test.sum()), int(raw.is_validation.sum())) == (30, 30)
    assert not (raw.is_test & raw.is_validation).any()
    pixels, labels = official.blobs(np.random.default_rng(0), 30, 10, (32, 32, 3))
    first_of_class_7 = pixels[labels == 7][0].transpose(2, 0, 1)
    assert np.array_equal(raw.inputs[7 * 3].numpy(), first_of_class_7)  # PNG loses nothing


def test_clothing1m_folder(tmp_path: Path) -> None:
    official.clothing1m(tmp_path, n_each=3)
    raw = read_clothing1m(tmp_path, per_class=2, side=28)
    assert raw.inputs.shape == (14 * (2 + 3 + 3), 3, 28, 28)
    assert raw.is_test is not None
    assert raw.is_validation is not None
    train = ~raw.is_test & ~raw.is_validation
    assert torch.equal(raw.targets[train].bincount(), torch.full((14,), 2))


def test_libsvm_text(tmp_path: Path) -> None:
    official.libsvm(tmp_path)
    raw = read_libsvm(tmp_path, "a1a")
    assert raw.inputs.tolist() == [
        [1, 0, 0.5, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 2, 0],
        [1, 0, 0, 0, 1],
        [0, 1, 0, 0, 0],
    ]
    assert raw.targets.tolist() == [0, 1, 0, 1, 0]
    assert raw.is_test is not None
    assert raw.is_test.tolist() == [False, False, False, True, True]


Reader = Callable[[Path], RawData]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def garble(path: Path) -> None:
    path.write_bytes(b"\x07" * 50 + path.read_bytes()[50:])


def relabel_cifar(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[0] = 11
    path.write_bytes(bytes(raw))


def forget_user(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["user_data"][content["users"][0]]
    path.write_text(json.dumps(content))


def miscount(path: Path) -> None:
    content = json.loads(path.read_text())
    content["num_samples"][0] += 1
    path.write_text(json.dumps(content))


def shorten_window(path: Path) -> None:
    content = json.loads(path.read_text())
    content["user_data"][content["users"][0]]["x"][0] = "short"
    path.write_text(json.dumps(content))


def pixel_of_two(path: Path) -> None:
    content = json.loads(path.read_text())
    content["user_data"][content["users"][0]]["x"][0][0] = 2.0
    path.write_text(json.dumps(content))


def recompress_cut(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))


def unknown_key(path: Path) -> None:
    path.write_text(path.read_text() + "images/9/99/none.jpg\n")


def small_image(path: Path) -> None:
    official.save_image(path, np.zeros((16, 16, 3), np.uint8))


@pytest.mark.parametrize(
    ("make", "read", "file", "damage", "message"),
    [
        (official.cifar10, read_cifar10, "cifar-10-batches-bin/data_batch_2.bin", cut, "not a multiple of 3073"),
        (
            official.cifar10,
            read_cifar10,
            "cifar-10-batches-bin/test_batch.bin",
            relabel_cifar,
            "labels must be 0..9, found 11",
        ),
        (
            official.cifar10,
            read_cifar10,
            "cifar-10-batches-bin/data_batch_4.bin",
            Path.unlink,
            "holds none of: data_batch_4.bin",
        ),
        (official.cifar10_python, read_cifar10, "cifar-10-batches-py/data_batch_2", cut, "python version"),
        (official.cifar10_python, read_cifar10, "cifar-10-batches-py/data_batch_2", garble, "data_batch_2"),
        (official.cifar100, read_cifar100, "cifar-100-binary/train.bin", cut, "not a multiple of 3074"),
        (official.mnist, read_mnist, "train-images-idx3-ubyte.gz", cut, "not a whole gzip file"),
        (official.mnist, read_mnist, "train-images-idx3-ubyte.gz", garble, "not a whole gzip file"),
        (
            official.mnist,
            read_mnist,
            "t10k-labels-idx1-ubyte.gz",
            recompress_cut,
            "promises 20 values, 28 bytes, but has 23",
        ),
        (official.mnist, read_mnist, "t10k-labels-idx1-ubyte.gz", Path.unlink, "t10k-labels-idx1-ubyte.gz"),
        (
            official.emnist,
            read_emnist,
            "gzip/emnist-byclass-test-images-idx3-ubyte.gz",
            recompress_cut,
            "promises 124 x 28 x 28",
        ),
        (official.mnist_by_writer, read_mnist_by_writer, "mnist_by_writer.npz", cut, "plain arrays x, y and client"),
        (official.qmnist, read_mnist_by_writer, "qmnist-train-labels-idx2-int.gz", recompress_cut, "promises 120 x 8"),
        (official.femnist, read_femnist, "train/all_data_0_niid_0_keep_0_train_9.json", cut, "not a whole LEAF file"),
        (
            official.femnist,
            read_femnist,
            "train/all_data_0_niid_0_keep_0_train_9.json",
            forget_user,
            "holds no data of theirs",
        ),
        (
            official.femnist,
            read_femnist,
            "train/all_data_1_niid_0_keep_0_train_9.json",
            miscount,
            "should have 21 samples",
        ),
        (
            official.femnist,
            read_femnist,
            "test/all_data_0_niid_0_keep_0_test_9.json",
            pixel_of_two,
            "784 numbers in 0..1",
        ),
        (official.shakespeare, read_shakespeare, "all_data.json", shorten_window, "a window of 80 characters"),
        (official.shakespeare, read_shakespeare, "all_data.json", Path.unlink, "neither LEAF's JSON"),
        (
            official.tinyimagenet,
            read_tinyimagenet,
            "tiny-imagenet-200/train/n1001/images/n1001_1.JPEG",
            cut,
            "not a whole image",
        ),
        (
            official.tinyimagenet,
            read_tinyimagenet,
            "tiny-imagenet-200/train/n1001/images/n1001_1.JPEG",
            small_image,
            "has 16x16 pixels",
        ),
        (official.cinic10, read_cinic10, "valid/dog/n00000005.png", garble, "not a whole image"),
        (official.clothing1m, read_clothing1m, "clean_test_key_list.txt", unknown_key, "which has no label"),
        (official.clothing1m, read_clothing1m, "noisy_label_kv.txt", unknown_key, "expected 'image class'"),
        (
            official.libsvm,
            lambda folder: read_libsvm(folder, "a1a"),
            "a1a",
            lambda p: p.write_text("+1 0:1\n"),
            "LIBSVM text",
        ),
        (
            official.libsvm,
            lambda folder: read_libsvm(folder, "a1a"),
            "a1a",
            lambda p: p.write_text("+1 a:1\n"),
            "LIBSVM text",
        ),
        (
            official.libsvm,
            lambda folder: read_libsvm(folder, "a1a"),
            "a1a",
            lambda p: p.write_text(""),
            "holds no examples",
        ),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, make: Callable[[Path], None], read: Reader, file: str, damage: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "data"
    make(folder)
    damage(folder / file)
    with pytest.raises(DataError, match=message):
        read(folder)
