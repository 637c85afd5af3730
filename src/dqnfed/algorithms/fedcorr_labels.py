"""What a FedCorr client does with its own labels: score them, split them, replace them, train on mixtures of them."""

from __future__ import annotations

from typing import Any, NamedTuple

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
STARTS = 20  # places to cut the clients' scores at, from which the mixture over them is fitted
NARROWEST = 0.003  # of the variance of all scores: no group of clients is narrower


class Groups(NamedTuple):
    """Values split into a low and a high group."""

    is_high: BoolArray  # [N]
    gain: float  # by how much two Gaussians explain the values better than one, by the Bayesian criterion

    @property
    def prefers_two(self) -> bool:
        return self.gain > 0.0


def two_groups(values: FloatArray) -> Groups:
    """Return which values belong to the higher of two Gaussians, scikit-learn's mixture; none if all are the same."""
    from sklearn.mixture import GaussianMixture

    if _is_one_group(values):
        return _all_low(values)
    column = values[:, None]
    one, two = (GaussianMixture(n_components=n, random_state=0).fit(column) for n in (1, 2))
    return Groups(_is_high(two, values), float(one.bic(column) - two.bic(column)))


def two_groups_of_clients(values: FloatArray) -> Groups:
    """Return the two groups of the likeliest mixture whose higher Gaussian is no narrower than the lower one.

    Clean clients are alike and noisy ones differ in their level. Without a bound on the variances the likelihood is
    unbounded (Day, Biometrika 1969; Hathaway, Annals of Statistics 1985): a few close values, such as two noisy clients
    far above the others, are likeliest a group of their own. The best mixture under the bound has either a wider
    higher Gaussian or, at the bound, two of the same width, so that one client far above all others is found too; these
    are scikit-learn's covariance types `full` and `tied`, started from every place to cut the sorted values in two. On
    the bound or not, it is one model of five parameters. No Gaussian is narrower than `NARROWEST`.
    """
    from sklearn.mixture import GaussianMixture

    if _is_one_group(values):
        return _all_low(values)
    column, least = values[:, None], NARROWEST * float(np.var(values))
    one = GaussianMixture(n_components=1, random_state=0, reg_covar=least).fit(column)
    best, best_fit = -np.inf, None
    for kind in ("tied", "full"):
        for start in _starts(np.sort(values), STARTS, is_tied=kind == "tied"):
            fit = GaussianMixture(2, covariance_type=kind, random_state=0, reg_covar=least, **start).fit(column)
            lower, higher = np.argsort(fit.means_[:, 0])
            likelihood = float(fit.score(column))
            is_allowed = kind == "tied" or fit.covariances_[higher, 0, 0] >= fit.covariances_[lower, 0, 0]
            if is_allowed and likelihood > best:
                best, best_fit = likelihood, fit
    n = len(values)
    gain = 2.0 * n * (best - float(one.score(column))) - 3.0 * np.log(n)  # five parameters instead of two
    return Groups(_is_high(best_fit, values), float(gain))


def _is_one_group(values: FloatArray) -> bool:
    return len(values) < 2 or bool(np.std(values) < CONSTANT)


def _all_low(values: FloatArray) -> Groups:
    return Groups(np.zeros(len(values), dtype=np.bool_), -np.inf)


def _is_high(two: Any, values: FloatArray) -> BoolArray:
    """Return which values belong to the mixture's higher Gaussian.

    It may be so wide that values far below the lower one are likelier in it, and the reverse: a value below the lower
    mean is low and one above the higher mean is high, so that the two groups never interleave.
    """
    low, high = np.sort(two.means_[:, 0])
    likelier = two.predict(values[:, None]) == int(np.argmax(two.means_[:, 0]))
    is_high: BoolArray = (likelier | (values >= high)) & (values > low)
    return is_high


def _starts(ordered: FloatArray, n: int, *, is_tied: bool) -> list[dict[str, FloatArray]]:
    """Return the mixtures, as scikit-learn wants them, of the two parts at each of n places to cut the values."""
    least = 1e-3 * float(np.var(ordered))  # a part of one value has no spread of its own
    places = sorted({max(1, min(len(ordered) - 1, round(len(ordered) * k / (n + 1)))) for k in range(1, n + 1)})
    found = []
    for place in places:
        parts = ordered[:place], ordered[place:]
        weights = np.array([len(part) / len(ordered) for part in parts])
        variances = np.array([part.var() + least for part in parts])
        found.append(
            {
                "weights_init": weights,
                "means_init": np.array([[part.mean()] for part in parts]),
                "precisions_init": 1.0 / (weights @ variances).reshape(1, 1)
                if is_tied
                else 1.0 / variances[:, None, None],
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


class DoubtfulLabels(NamedTuple):
    """Which of a client's labels may be wrong."""

    level: float  # share of the labels whose loss is in the higher group
    rows: NDArray[np.int64]  # rows that may be relabelled, those of the largest losses


def doubtful_labels(losses: FloatArray, relabel_share: float) -> DoubtfulLabels:
    """Return the estimated noise level and the rows of the largest losses, `relabel_share` of the doubtful ones."""
    level = float(two_groups(losses).is_high.mean()) if len(losses) else 0.0
    n_rows = int(len(losses) * level * relabel_share)
    return DoubtfulLabels(level, np.argsort(-losses, kind="stable")[:n_rows])


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
    """Return the labels, those (of the given rows) replaced where the largest probability is above `confidence`."""
    probability, predicted = torch.softmax(outputs, dim=-1).max(dim=-1)
    chosen = probability > confidence
    if rows is not None:
        among = torch.zeros_like(chosen)
        among[rows.to(among.device)] = True
        chosen = chosen & among
    changed = labels.clone()
    n = len(outputs)
    changed[:n] = torch.where(chosen, predicted.to(labels.dtype), labels[:n])
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
