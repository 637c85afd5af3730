"""Wrong labels on purpose: the promised shares, nothing but training labels, and a seed that decides everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dqnfed.core.federation import Examples, Federation
from dqnfed.data.label_noise import LabelNoise, class_noise, instance_noise, with_label_noise
from dqnfed.data.raw import DataError

KINDS = ("symmetric", "pairwise", "instance")


def labelled(n_clients: int = 6, n_each: int = 500, n_classes: int = 14, seed: int = 0) -> Federation:
    """Return clients whose inputs are all different; 14 classes, since noise must not believe that there are ten."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.arange(n_clients + 1) * n_each
    targets = torch.randint(n_classes, (n_clients * n_each,), generator=generator)
    inputs = torch.randn(len(targets), 20, generator=generator) + torch.nn.functional.one_hot(targets, 20)
    part = Examples(inputs, targets, starts)
    return Federation(part, part, part, n_classes=n_classes)


@pytest.mark.parametrize("kind", KINDS)
def test_only_training_labels_change_and_the_truth_is_kept(kind: str) -> None:
    given = labelled()
    federation, truth = with_label_noise(given, LabelNoise(kind=kind, level_low=0.5, level_high=0.5), seed=3)
    assert torch.equal(truth.targets, given.train.targets)
    assert torch.equal(federation.train.inputs, given.train.inputs)
    assert federation.validation is not None
    assert torch.equal(federation.test.targets, given.test.targets)
    assert torch.equal(federation.validation.targets, given.test.targets)
    changed = (federation.train.targets != given.train.targets).double().mean()
    assert 0.3 < changed < 0.7
    assert federation.train.targets.min() >= 0
    assert federation.train.targets.max() == 13
    assert federation.train.targets.dtype == given.train.targets.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_everything(kind: str) -> None:
    noise = LabelNoise(kind=kind, share=0.5, level_low=0.2)
    first, again, other = (with_label_noise(labelled(), noise, seed) for seed in (1, 1, 2))
    assert torch.equal(first.federation.train.targets, again.federation.train.targets)
    assert torch.equal(first.truth.levels, again.truth.levels)
    assert not torch.equal(first.federation.train.targets, other.federation.train.targets)


def test_clients_are_noisy_as_often_and_as_much_as_they_should_be() -> None:
    """Binomial and uniform: 2000 clients, 4 standard deviations."""
    n = 2000
    _, truth = with_label_noise(labelled(n, 2), LabelNoise(share=0.4, level_low=0.5), seed=0)
    levels = truth.levels[truth.levels > 0]
    assert abs(len(levels) / n - 0.4) < 4 * np.sqrt(0.4 * 0.6 / n)
    assert levels.min() >= 0.5
    assert levels.max() <= 1.0
    assert abs(levels.mean() - 0.75) < 4 * 0.5 / np.sqrt(12 * len(levels))


def test_clean_clients_keep_their_labels() -> None:
    given = labelled()
    federation, truth = with_label_noise(given, LabelNoise(share=0.5, level_low=0.5), seed=1)
    changed = (federation.train.targets != given.train.targets).view(6, 500)
    assert 0 < int((truth.levels > 0).sum()) < 6
    assert not changed[truth.levels == 0].any()
    nothing = with_label_noise(given, LabelNoise(share=0.0), seed=1).federation
    assert torch.equal(nothing.train.targets, given.train.targets)


@pytest.mark.parametrize("n_classes", [2, 10, 14])
def test_symmetric_noise_draws_any_class_the_right_one_too(n_classes: int) -> None:
    labels = np.zeros(40_000, dtype=np.int64)
    found = class_noise(labels, 0.6, n_classes, np.random.default_rng(0), pairwise=False)
    wrong = 0.6 * (n_classes - 1) / n_classes
    assert abs((found != 0).mean() - wrong) < 4 * np.sqrt(wrong * (1 - wrong) / len(labels))
    shares = np.bincount(found, minlength=n_classes)[1:] / len(labels)
    assert np.abs(shares - 0.6 / n_classes).max() < 4 * np.sqrt(0.6 / n_classes / len(labels))


def test_pairwise_noise_moves_to_the_next_class() -> None:
    labels = np.arange(14_000) % 14
    found = class_noise(labels, 0.3, 14, np.random.default_rng(0), pairwise=True)
    moved = found != labels
    assert np.array_equal(found[moved], (labels[moved] + 1) % 14)
    assert abs(moved.mean() - 0.3) < 4 * np.sqrt(0.21 / len(labels))


def test_instance_noise_depends_on_the_example() -> None:
    """Equal examples of one class get the same few wrong classes wherever they are; others get others."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 20, generator=generator).expand(4000, 20) for _ in range(2))
    labels = np.full(4000, 3)
    first, again, different = (
        instance_noise(labels, x, 0.5, 10, np.random.default_rng(chance), 0)
        for x, chance in ((one, 0), (one, 1), (other, 2))
    )
    shares = [np.bincount(found[found != 3], minlength=10) / (found != 3).sum() for found in (first, again, different)]
    assert np.abs(shares[0] - shares[1]).max() < 4 * np.sqrt(2 * 0.25 / 2000)
    assert np.abs(shares[0] - shares[2]).max() > 0.1
    assert abs((first != 3).mean() - 0.5) < 4 * np.sqrt(0.25 / 4000)


def test_what_has_no_classes_is_refused() -> None:
    given = labelled()
    floats = given.train._replace(targets=torch.randn(len(given.train.targets)))
    with pytest.raises(DataError, match=r"regression; leave data\.noise out"):
        with_label_noise(replace(given, train=floats, n_classes=None), LabelNoise(), 0)
    with pytest.raises(DataError, match="one of symmetric, pairwise, instance, but is 'random'"):
        LabelNoise(kind="random")
    with pytest.raises(DataError, match="level_low <= level_high"):
        LabelNoise(level_low=0.8, level_high=0.5)
    with pytest.raises(DataError, match=r"share .* in \[0, 1\], but is 1.5"):
        LabelNoise(share=1.5)
