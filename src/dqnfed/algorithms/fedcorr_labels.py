"""What a FedCorr client does with its own labels: score them, split them, replace them, train on mixtures of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.problem import Problem, Task
from dqnfed.maths.lid import local_dimensions

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
CONSTANT = 1e-8  # values that spread less than this are all the same
FEWEST = 3  # examples that a score needs


class Groups(NamedTuple):
    """Values split into a low and a high group."""

    is_high: BoolArray  # [N]
    prefers_two: bool  # whether two Gaussians explain the values better than one, by the Bayesian criterion


def two_groups(values: FloatArray, *, n_starts: int = 1) -> Groups:
    """Return which values belong to the higher of two Gaussians, scikit-learn's mixture; nobody if all are the same.

    Started once, from the two clusters of k-means, a single far value may become a group of its own although two wide
    groups explain all values better; with `n_starts` > 1 it starts from as many places at which the sorted values can
    be cut in two, and the likeliest end counts.

    The higher Gaussian may be so wide that it also claims values far below the lower one, and the reverse: a value
    below the lower mean is low and one above the higher mean is high, so that the two groups never interleave.
    """
    from sklearn.mixture import GaussianMixture

    if len(values) < 2 or np.std(values) < CONSTANT:
        return Groups(np.zeros(len(values), dtype=np.bool_), False)
    column = values[:, None]
    starts: list[dict[str, FloatArray]] = [{}] if n_starts == 1 else _cuts(np.sort(values), n_starts)
    fits = [GaussianMixture(n_components=2, random_state=0, **start).fit(column) for start in starts]
    two = max(fits, key=lambda fit: float(fit.lower_bound_))
    one = GaussianMixture(n_components=1, random_state=0).fit(column)
    low, high = np.sort(two.means_[:, 0])
    is_high = two.predict(column) == int(np.argmax(two.means_[:, 0]))
    is_high = (is_high | (values >= high)) & (values > low)
    return Groups(is_high, bool(two.bic(column) < one.bic(column)))


def _cuts(ordered: FloatArray, n: int) -> list[dict[str, FloatArray]]:
    """Return the mixtures, as scikit-learn wants them, of the two parts at each of n places to cut the values."""
    least = 1e-3 * float(np.var(ordered))  # a part of one value has no spread of its own
    places = sorted({max(1, min(len(ordered) - 1, round(len(ordered) * k / (n + 1)))) for k in range(1, n + 1)})
    found = []
    for place in places:
        parts = ordered[:place], ordered[place:]
        found.append(
            {
                "weights_init": np.array([len(part) / len(ordered) for part in parts]),
                "means_init": np.array([[part.mean()] for part in parts]),
                "precisions_init": np.array([[[1.0 / (part.var() + least)]] for part in parts]),
            }
        )
    return found


def dimension_score(probabilities: FloatArray, neighbours: int) -> float:
    """Return the mean local intrinsic dimension of a client's outputs [N, C]; NaN for fewer than three examples."""
    from sklearn.neighbors import NearestNeighbors

    n = len(probabilities)
    if n < FEWEST:
        return float("nan")
    k = min(neighbours, n - 1)
    distances, _ = NearestNeighbors(n_neighbors=k + 1).fit(probabilities).kneighbors(probabilities)
    return float(local_dimensions(distances[:, 1:]).mean())  # the nearest one is the point itself


class Suspects(NamedTuple):
    """Which of a client's labels may be wrong."""

    level: float  # share of the labels that the model does not believe
    candidates: NDArray[np.int64]  # rows to look at, the most doubtful ones


def suspected_rows(losses: FloatArray, relabel_share: float) -> Suspects:
    """Return the estimated noise level and the rows of the largest losses, `relabel_share` of the doubtful ones."""
    level = float(two_groups(losses).is_high.mean()) if len(losses) else 0.0
    n_candidates = int(len(losses) * level * relabel_share)
    return Suspects(level, np.argsort(-losses, kind="stable")[:n_candidates])


def check_classes(problem: Problem, task: Task) -> None:
    """Refuse examples whose targets are not classes that the model has one output for."""
    outputs = problem.predict(problem.theta0, task.inputs[:1])
    if task.targets.is_floating_point() or task.targets.dim() != 1 or outputs.dim() != 2 or outputs.shape[1] < 2:
        raise ValueError(
            f"FedCorr: every example needs one class and the model one output a class, but targets are of type "
            f"{task.targets.dtype} and shape {tuple(task.targets.shape[1:])}, outputs of shape "
            f"{tuple(outputs.shape[1:])}; regression has no labels to correct."
        )


def outputs_of(problem: Problem, theta: Tensor, task: Task) -> Tensor:
    """Return the model's outputs [n, C] for the client's real examples."""
    with torch.no_grad():
        return problem.predict(theta, task.inputs[: n_real(task)])


def probabilities_of(outputs: Tensor) -> FloatArray:
    return np.asarray(torch.softmax(outputs.double(), dim=-1).cpu().numpy())


def n_real(task: Task) -> int:
    """Return how many of the task's rows are examples; padding stands behind them."""
    return int(task.mask.sum())


def corrected_labels(labels: Tensor, outputs: Tensor, confidence: float, rows: Tensor | None = None) -> Tensor:
    """Return the labels, those (of the given rows) replaced for which the model is more sure than `confidence`."""
    sure, believed = torch.softmax(outputs, dim=-1).max(dim=-1)
    chosen = sure > confidence
    if rows is not None:
        among = torch.zeros_like(chosen)
        among[rows.to(among.device)] = True
        chosen = chosen & among
    changed = labels.clone()
    n = len(outputs)
    changed[:n] = torch.where(chosen, believed.to(labels.dtype), labels[:n])
    return changed


def mixed_sgd(
    problem: Problem,
    task: Task,
    labels: Tensor,
    theta: Tensor,
    *,
    pull: float,
    mixup: float,
    momentum: float,
    weight_decay: float,
    seed: int,
) -> Tensor:
    """Return theta after the task's local steps on mixed examples, held back by `pull` times the distance from theta.

    Every batch is mixed with a shuffle of itself in the proportion lam ~ Beta(mixup, mixup) (Zhang et al., ICLR 2018);
    `mixup = 0` takes the examples as they are.
    """
    chance = np.random.default_rng(seed)
    here, velocity = theta, torch.zeros_like(theta)
    everything = torch.arange(n_real(task), device=task.inputs.device)
    inputs = as_floats(task.inputs, theta.dtype) if mixup else task.inputs

    def loss(theta: Tensor, rows: Tensor) -> Tensor:
        if not mixup:
            losses = problem.losses(problem.predict(theta, inputs[rows]), labels[rows])
            return losses.mean() + 0.5 * problem.ridge * theta.square().sum()
        share = float(chance.beta(mixup, mixup))
        partners = rows[torch.from_numpy(chance.permutation(len(rows))).to(rows.device)]
        outputs = problem.predict(theta, share * inputs[rows] + (1.0 - share) * inputs[partners])
        own, other = problem.losses(outputs, labels[rows]), problem.losses(outputs, labels[partners])
        mixed = (share * own + (1.0 - share) * other).mean()
        return mixed + 0.5 * problem.ridge * theta.square().sum()

    for batch in task.batches:
        rows = batch[batch >= 0] if batch.shape[-1] else everything
        if not len(rows):
            continue
        with torch.enable_grad():  # one client alone: cheaper than torch.func's
            leaf = theta.detach().requires_grad_()
            (slope,) = torch.autograd.grad(loss(leaf, rows), leaf)
        if weight_decay:
            slope = slope + weight_decay * theta
        if pull:
            slope = slope + pull * unit(theta - here)
        velocity = momentum * velocity + slope
        theta = theta - task.lr * velocity
    return theta


def unit(v: Tensor) -> Tensor:
    """Return v over its length, the gradient of the length; 0 at 0, where every short vector is one."""
    length: Tensor = torch.linalg.vector_norm(v)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)


def as_floats(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return inputs that can be mixed: images of bytes as floats in 0..1, which models take as the same images."""
    if inputs.dtype == torch.uint8:
        return inputs.to(dtype) / 255.0
    if not inputs.is_floating_point():
        raise ValueError(
            f"FedCorr: `mixup` mixes two examples into one, which has no meaning for inputs of type {inputs.dtype}, "
            "such as characters; set mixup = 0."
        )
    return inputs.to(dtype)
