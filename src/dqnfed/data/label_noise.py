"""Wrong labels on purpose: how many clients, how many of their labels, and which wrong class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.federation import Federation
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.data.raw import DataError

KINDS = ("symmetric", "pairwise", "instance")
SPREAD = 0.1  # standard deviation of the examples' own levels under instance-dependent noise


@dataclass(frozen=True, kw_only=True)
class LabelNoise:
    """Which training labels are replaced; those of validation and test stay as they are.

    Every client is noisy with probability `share`, its level drawn uniformly from [level_low, level_high], and each of
    its labels is replaced with that probability: FedCorr's model (Xu et al., CVPR 2022, Sec. 4.1).
    """

    kind: str = "symmetric"  # symmetric: any class | pairwise: the next class | instance: what the example resembles
    share: float = 1.0  # probability that a client is noisy, in [0, 1]
    level_low: float = 0.0  # smallest noise level of a noisy client, in [0, 1]
    level_high: float = 1.0  # largest one, in [level_low, 1]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"label noise must be one of {', '.join(KINDS)}, but is '{self.kind}'.")
        if not 0 <= self.share <= 1:
            raise DataError(f"the share of noisy clients must be in [0, 1], but is {self.share}.")
        if not 0 <= self.level_low <= self.level_high <= 1:
            raise DataError(
                "noise levels must be 0 <= level_low <= level_high <= 1, but they are "
                f"{self.level_low} and {self.level_high}."
            )


class Truth(NamedTuple):
    """What was done to the labels: for the report only, no method may see it."""

    noise: LabelNoise
    levels: Tensor  # [C] of every client, 0 where it is clean
    targets: Tensor  # [T] the training labels before


class NoisyData(NamedTuple):
    """A federation with wrong labels, and the truth about it."""

    federation: Federation
    truth: Truth


def with_label_noise(federation: Federation, noise: LabelNoise, seed: int) -> NoisyData:
    """Return the federation with training labels replaced as the noise says; the seed decides which."""
    n_classes = federation.n_classes
    if n_classes is None or n_classes < 2:
        raise DataError("label noise replaces a class by another, but this is a regression; leave data.noise out.")
    train = federation.train
    if train.targets.dim() != 1:
        raise DataError(
            f"label noise needs one class for each example, but targets have shape {tuple(train.targets.shape[1:])}."
        )
    chance = numpy_seed_for(seed, purpose="noisy clients")
    n_clients = federation.n_clients
    is_noisy = chance.random(n_clients) < noise.share
    levels = np.where(is_noisy, chance.uniform(noise.level_low, noise.level_high, n_clients), 0.0)
    labels = train.targets.clone()
    for c in np.flatnonzero(levels > 0):
        rows = slice(int(train.starts[c]), int(train.starts[c + 1]))
        own = numpy_seed_for(seed, client=int(c), purpose="label noise")
        found = train.targets[rows].cpu().numpy()
        wrong = (
            instance_noise(found, train.inputs[rows], levels[c], n_classes, own, seed)
            if noise.kind == "instance"
            else class_noise(found, levels[c], n_classes, own, pairwise=noise.kind == "pairwise")
        )
        labels[rows] = torch.from_numpy(wrong).to(labels)
    noisy = replace(federation, train=train._replace(targets=labels))
    return NoisyData(noisy, Truth(noise, torch.from_numpy(levels), train.targets))


def class_noise(
    labels: np.ndarray, level: float, n_classes: int, chance: np.random.Generator, *, pairwise: bool
) -> np.ndarray:
    """Return labels of which each is replaced with probability `level`: by the next class, or by any class at all.

    "Any" includes the right one, as in FedCorr, so that a share level (C - 1) / C of the labels is wrong.
    """
    is_hit = chance.random(len(labels)) < level
    other = (labels + 1) % n_classes if pairwise else chance.integers(n_classes, size=len(labels))
    return np.where(is_hit, other, labels)


def instance_noise(
    labels: np.ndarray, inputs: Tensor, level: float, n_classes: int, chance: np.random.Generator, seed: int
) -> np.ndarray:
    """Return labels that are wrong where the example looks like another class to a random linear map.

    Part-dependent label noise (Xia et al., NeurIPS 2020, Algorithm 2): the example's own level is normal around
    `level`, cut off at 0 and 1; its wrong class is drawn from the softmax of its input under a random map that belongs
    to its class, its own class left out. The maps are the same for all clients.
    """
    x = inputs.reshape(len(labels), -1).double().cpu().numpy()
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    from scipy.special import ndtr, ndtri

    low, high = ndtr((0.0 - level) / SPREAD), ndtr((1.0 - level) / SPREAD)
    own_level = level + SPREAD * ndtri(chance.uniform(low, high, len(labels)))
    outputs = np.empty((len(labels), n_classes))
    for c in range(n_classes):
        mine = labels == c
        maps = numpy_seed_for(seed, client=c, purpose="label noise maps")
        outputs[mine] = x[mine] @ maps.standard_normal((x.shape[1], n_classes)) * np.sqrt(n_classes)
    outputs[np.arange(len(labels)), labels] = -np.inf
    weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    sums = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    drawn = (sums < chance.random(len(labels))[:, None]).sum(axis=1).clip(max=n_classes - 1)
    drawn = np.where(drawn == labels, (drawn + 1) % n_classes, drawn)  # where rounding reached the class left out
    return np.where(chance.random(len(labels)) < own_level, drawn, labels)
