"""Every dataset by name: how to read it, where it comes from, what it must contain."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.cifar import read_cifar10, read_cifar100
from dqnfed.data.readers.digits import read_digits
from dqnfed.data.readers.flamby import read_fed_heart, read_fed_isic, read_fed_tcga_brca
from dqnfed.data.readers.heart import read_heart
from dqnfed.data.readers.idx import read_emnist, read_fashion_mnist, read_mnist, read_mnist_by_writer
from dqnfed.data.readers.images import read_cinic10, read_clothing1m, read_tinyimagenet
from dqnfed.data.readers.leaf import read_femnist
from dqnfed.data.readers.libsvm import read_libsvm
from dqnfed.data.readers.shakespeare import read_shakespeare


@dataclass(frozen=True)
class Download:
    """A file at the official source."""

    url: str
    md5: str | None = None  # of the file, as its source or its usual loaders publish it; None: recorded at first use
    content_md5: str | None = None  # of the unpacked contents: the same bytes may be packed in several ways

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class HubSource:
    """The same data on the Hugging Face hub, for the optional extra `hub`."""

    repository: str
    inputs: str  # column names
    targets: str
    client: str | None = None
    test_split: str | None = "test"


@dataclass(frozen=True)
class Dataset:
    """What is known about a dataset before it is read."""

    name: str
    title: str
    read: Callable[[Path], RawData]
    folder: str  # under the data folder; empty: comes with a package
    watched: tuple[str, ...] = ()  # files or folders (globs) whose change makes the cache stale
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # how to get it where no download exists
    hub: HubSource | None = None
    mean: tuple[float, ...] = ()  # per channel, of the training images in 0..1
    std: tuple[float, ...] = ()
    n_examples: int | None = None  # training and test together, as published
    licence: str = ""
    cite: str = ""


def mnist_files(base: str, *checksums: tuple[str, str]) -> tuple[Download, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Download(f"{base}/{name}-ubyte.gz", md5, content or None)
        for name, (md5, content) in zip(names, checksums, strict=True)
    )


LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
FLAMBY = "github.com/owkin/FLamby"
CIFAR = "https://www.cs.toronto.edu/~kriz"


def libsvm(name: str, title: str, n_examples: int, *checksums: str | None) -> Dataset:
    """Return the entry of a set with one file or, where there are two checksums, with a test file too."""
    files = (name, f"{name}.t")[: len(checksums)]
    return Dataset(
        name=name,
        title=title,
        read=partial(read_libsvm, name=name),
        folder="libsvm",
        watched=files,
        downloads=tuple(Download(f"{LIBSVM}/{file}", md5) for file, md5 in zip(files, checksums, strict=True)),
        n_examples=n_examples,
        licence="no formal licence; cite the source",
        cite="Chang & Lin, LIBSVM, 2011",
    )


_ALL = [
    Dataset(
        name="digits",
        title="8x8 handwritten digits that come with scikit-learn",
        read=lambda _: read_digits(),
        folder="",
        n_examples=1797,
        licence="CC BY 4.0",
        cite="Alpaydin & Kaynak, UCI, 1998",
    ),
    Dataset(
        name="heart",
        title="UCI heart disease: 13 features of 920 patients, clients are four hospitals; comes with dqnfed",
        read=lambda _: read_heart(),
        folder="",
        n_examples=920,
        licence="CC BY 4.0",
        cite="Janosi et al., UCI, 1988; Detrano et al., 1989",
    ),
    Dataset(
        name="cifar10",
        title="CIFAR-10: 32x32 colour images of 10 classes",
        read=read_cifar10,
        folder="cifar10",
        watched=("cifar-10-batches-bin/*.bin", "cifar-10-batches-py/*_batch*"),
        downloads=(Download(f"{CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        hub=HubSource("uoft-cs/cifar10", "img", "label"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        n_examples=60_000,
        licence="no formal licence; cite the source",
        cite="Krizhevsky, 2009",
    ),
    Dataset(
        name="cifar100",
        title="CIFAR-100: 32x32 colour images of 100 classes",
        read=read_cifar100,
        folder="cifar100",
        watched=("cifar-100-binary/*.bin", "cifar-100-python/t*"),
        downloads=(Download(f"{CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
        hub=HubSource("uoft-cs/cifar100", "img", "fine_label"),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        n_examples=60_000,
        licence="no formal licence; cite the source",
        cite="Krizhevsky, 2009",
    ),
    Dataset(
        name="fashion_mnist",
        title="Fashion-MNIST: 28x28 grey images of clothes",
        read=read_fashion_mnist,
        folder="fashion_mnist",
        watched=("*-ubyte*",),
        downloads=mnist_files(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", ""),
            ("25c81989df183df01b3e8a0aad5dffbe", ""),
            ("bef4ecab320f06d8554ea6380940ec79", ""),
            ("bb300cfdad3c16e7a12a480ee83cd310", ""),
        ),
        hub=HubSource("zalando-datasets/fashion_mnist", "image", "label"),
        mean=(0.2860,),
        std=(0.3530,),
        n_examples=70_000,
        licence="MIT",
        cite="Xiao et al., 2017",
    ),
    Dataset(
        name="mnist",
        title="MNIST: 28x28 handwritten digits",
        read=read_mnist,
        folder="mnist",
        watched=("*-ubyte*",),
        downloads=mnist_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
            ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
            ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
            ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
        ),
        hub=HubSource("ylecun/mnist", "image", "label"),
        mean=(0.1307,),
        std=(0.3081,),
        n_examples=70_000,
        licence="CC BY-SA 3.0",
        cite="LeCun et al., 1998",
    ),
    Dataset(
        name="mnist_by_writer",
        title="MNIST's training digits by the person who wrote them (QMNIST's extended labels)",
        read=read_mnist_by_writer,
        folder="mnist_by_writer",
        watched=("*.npz", "*-ubyte*", "*-int*"),
        downloads=(
            Download(f"{QMNIST}/qmnist-train-images-idx3-ubyte.gz", "ed72d4157d28c017586c42bc6afe6370"),
            Download(f"{QMNIST}/qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
        ),
        mean=(0.1307,),
        std=(0.3081,),
        n_examples=60_000,
        licence="MNIST CC BY-SA 3.0, extended labels BSD style",
        cite="Yadav & Bottou, 2019",
    ),
    Dataset(
        name="femnist",
        title="FEMNIST: 28x28 handwritten characters of 3,550 writers, 62 classes",
        read=read_femnist,
        folder="femnist",
        watched=("**/*.json",),
        by_hand=(
            "LEAF publishes a script, not the files: in github.com/TalwalkarLab/leaf run data/femnist/preprocess.sh "
            "-s niid --sf 1.0 -k 0 -t sample, and put its folders data/train and data/test there; or use `--from hub`"
        ),
        hub=HubSource("flwrlabs/femnist", "image", "character", client="writer_id", test_split=None),
        mean=(0.9637,),
        std=(0.1597,),
        licence="NIST data, public domain; LEAF BSD 2-clause",
        cite="Caldas et al., LEAF, 2018",
    ),
    Dataset(
        name="emnist",
        title="EMNIST byclass: 28x28 handwritten characters, 62 classes",
        read=read_emnist,
        folder="emnist",
        watched=("gzip/emnist-byclass-*", "emnist-byclass-*"),
        downloads=(
            Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),
        ),
        mean=(0.1736,),
        std=(0.3317,),
        n_examples=814_255,
        licence="NIST data, public domain",
        cite="Cohen et al., 2017",
    ),
    Dataset(
        name="shakespeare",
        title="Shakespeare: 80 characters, which comes next? Clients are speaking roles",
        read=read_shakespeare,
        folder="shakespeare",
        watched=("*.json", "train/*.json", "test/*.json", "data/**/*.json", "*.txt"),
        downloads=(Download("https://www.gutenberg.org/files/100/old/1994-01-100.zip"),),
        licence="public domain",
        cite="McMahan et al., 2017; Caldas et al., LEAF, 2018",
    ),
    Dataset(
        name="tinyimagenet",
        title="Tiny ImageNet: 64x64 colour images of 200 classes",
        read=read_tinyimagenet,
        folder="tinyimagenet",
        watched=("tiny-imagenet-200/train", "tiny-imagenet-200/val/images", "train", "val/images"),
        downloads=(Download("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
        hub=HubSource("zh-plus/tiny-imagenet", "image", "label", test_split="valid"),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        n_examples=110_000,
        licence="ImageNet terms, non-commercial research",
        cite="Le & Yang, 2015",
    ),
    Dataset(
        name="cinic10",
        title="CINIC-10: 32x32 colour images of CIFAR-10's classes from CIFAR-10 and ImageNet",
        read=read_cinic10,
        folder="cinic10",
        watched=("CINIC-10/*/*", "train/*", "valid/*", "test/*"),
        downloads=(
            Download(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "6ee4d0c996905fe93221de577967a372",
            ),
        ),
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
        n_examples=270_000,
        licence="CC BY 4.0 (CIFAR-10 and ImageNet terms for the images)",
        cite="Darlow et al., 2018",
    ),
    Dataset(
        name="clothing1m",
        title="Clothing1M: photographs of clothes with noisy labels, 14 classes",
        read=read_clothing1m,
        folder="clothing1m",
        watched=("*_list.txt", "*_kv.txt"),
        by_hand=(
            "the authors send it on request (github.com/Cysu/noisy_label); put images/ and the key and label lists "
            "there"
        ),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        licence="research only, by agreement with the authors",
        cite="Xiao et al., CVPR 2015",
    ),
    Dataset(
        name="fed_heart",
        title="FLamby's Fed-Heart-Disease: 10 columns, clients are four hospitals",
        read=read_fed_heart,
        folder="fed_heart_disease",
        watched=("processed.*.data",),
        by_hand=f"put UCI's four processed.*.data files there, as FLamby's download script does ({FLAMBY})",
        licence="CC BY 4.0",
        cite="Ogier du Terrail et al., FLamby, NeurIPS 2022; Janosi et al., UCI, 1988",
    ),
    Dataset(
        name="fed_tcga_brca",
        title="FLamby's Fed-TCGA-BRCA: 39 features of breast cancer patients, clients are six regions",
        read=read_fed_tcga_brca,
        folder="fed_tcga_brca",
        watched=("brca.csv", "train_test_split.csv", "dataset_creation_scripts/train_test_split.csv"),
        by_hand=f"put brca.csv and dataset_creation_scripts/train_test_split.csv of FLamby's folder there ({FLAMBY})",
        licence="TCGA, open access",
        cite="Ogier du Terrail et al., FLamby, NeurIPS 2022; Liu et al., Cell 2018",
    ),
    Dataset(
        name="fed_isic",
        title="FLamby's Fed-ISIC2019: dermoscopy images of eight diagnoses, clients are six centres",
        read=read_fed_isic,
        folder="fed_isic2019",
        watched=("ISIC_2019_Training_Input_preprocessed", "train_test_split*", "*/train_test_split*"),
        by_hand=(
            "put ISIC_2019_Training_Input_preprocessed/, which FLamby's scripts make, and its file "
            f"dataset_creation_scripts/train_test_split there ({FLAMBY})"
        ),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        licence="CC BY-NC 4.0",
        cite="Ogier du Terrail et al., FLamby, NeurIPS 2022; Tschandl et al., 2018; Codella et al., 2017",
    ),
    libsvm(
        "a1a",
        "Adult, first subset: 123 binary features",
        32_561,
        "b62d93d768db2423dd06fadb24ea0c1f",
        "4408b51b14837fb378b236462c2e4a5c",
    ),
    libsvm(
        "a9a",
        "Adult: 123 binary features",
        48_842,
        "fb3596510d780aaf76a06dc721d49662",
        "f0bb16cf1ee3e80ff560e9d132ee647e",
    ),
    libsvm(
        "w8a",
        "Web pages: 300 binary features",
        64_700,
        "05cdbfad8de0af3887c0e6f42fddc32b",
        "938543adbdc198246247d5d2015f01e8",
    ),
    libsvm("phishing", "Phishing web sites: 68 features", 11_055, None),
    libsvm("mushrooms", "Mushrooms: 112 binary features", 8_124, "2a52251de564d72e772b25211a84f5f8"),
]

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}


def dataset_called(name: str) -> Dataset:
    """Return the catalogue entry; hyphens and capitals are forgiven."""
    key = name.lower().replace("-", "_")
    if key not in DATASETS:
        close = difflib.get_close_matches(key, DATASETS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise DataError(f"dataset {name!r} is unknown.{hint} There are: {', '.join(DATASETS)}.")
    return DATASETS[key]
