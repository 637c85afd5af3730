"""Scores of one client beside accuracy; all take (outputs [N, C], targets [N], mask [N]), vectorise, and are better
when higher.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dqnfed.core.problem import accuracy, negative_loss


def auc(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return 100 times the area under the ROC curve, one class against the rest, averaged over the classes present.

    The chance that an example of the class scores above one of the rest, ties counted half (Mann-Whitney). A class
    without both kinds of examples does not count; with none left the score is 50, what guessing gets.
    """
    values = outputs.softmax(-1) if outputs.shape[-1] > 1 else outputs
    first = 1 if outputs.shape[-1] == 2 else 0  # two classes: one curve, of the second
    real = mask > 0
    areas, counted = [], []
    for c in range(first, outputs.shape[-1]):
        score = values[:, c].contiguous()
        positive, negative = (targets == c) & real, (targets != c) & real
        rest = torch.where(negative, score, torch.inf).sort().values
        below = torch.searchsorted(rest, score)
        not_above = torch.minimum(torch.searchsorted(rest, score, right=True), negative.sum())
        wins = 0.5 * (below + not_above).to(score.dtype)
        pairs = (positive.sum() * negative.sum()).to(score.dtype)
        areas.append((wins * positive).sum() / pairs.clamp(min=1))
        counted.append((pairs > 0).to(score.dtype))
    area, count = torch.stack(areas), torch.stack(counted)
    mean = (area * count).sum() / count.sum().clamp(min=1)
    return 100.0 * torch.where(count.sum() > 0, mean, 0.5)


def macro_f1(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return 100 times F1, averaged over the classes that occur in the targets or the predictions."""
    n_classes = outputs.shape[-1]
    said = F.one_hot(outputs.argmax(-1), n_classes).to(mask.dtype) * mask[:, None]
    true = F.one_hot(targets, n_classes).to(mask.dtype) * mask[:, None]
    both = (said * true).sum(0)
    occurs = said.sum(0) + true.sum(0)
    f1 = 2.0 * both / occurs.clamp(min=1)
    present = (occurs > 0).to(mask.dtype)
    return 100.0 * (f1 * present).sum() / present.sum().clamp(min=1)


def negative_cross_entropy(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return minus the mean cross-entropy of the real examples."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return -(losses * mask).sum() / mask.sum().clamp(min=1)


Score = Callable[[Tensor, Tensor, Tensor], Tensor]

CLASSIFICATION_SCORES: dict[str, Score] = {
    "accuracy": accuracy,
    "auc": auc,
    "f1": macro_f1,
    "loss": negative_cross_entropy,
}
REGRESSION_SCORES: dict[str, Score] = {"loss": negative_loss}
