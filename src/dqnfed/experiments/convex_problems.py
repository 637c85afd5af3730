"""The convex benchmark of second-order federated learning: ridge logistic regression, split as the field splits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.curvature import (
    LinearProblem,
    client_gradient,
    client_hessian,
    least_squares_problem,
    logistic_problem,
)
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Task
from dqnfed.data.catalogue import dataset_called
from dqnfed.data.load import folder_of, missing
from dqnfed.data.raw import DataError
from dqnfed.data.readers.files import MissingFiles, find
from dqnfed.data.readers.libsvm import parsed_file
from dqnfed.maths.gramian import gramian
from dqnfed.maths.solvers import min_norm_weights
from dqnfed.maths.symmetric import positive_solution

RIDGE = 1e-3
MAX_NEWTON_STEPS = 60
RESOLVED = 1e-13  # a Newton decrement that the rounding of a loss still shows


class Split(NamedTuple):
    """How a set is used: its first rows, in file order, dealt out in equal contiguous parts."""

    n_rows: int
    n_clients: int
    n_features: int


SPLITS = {
    "a1a": Split(1600, 16, 123),
    "a9a": Split(32560, 80, 123),
    "w8a": Split(49700, 142, 300),
    "phishing": Split(11000, 100, 68),
    "mushrooms": Split(8000, 80, 112),
}
SYNTHETIC = "synthetic"
INTERPOLATION = "interpolation"
NAMES = (*SPLITS, SYNTHETIC, INTERPOLATION)


@dataclass(frozen=True)
class ConvexProblem:
    """A federation of linear models, f = mean_k f_k with the ridge in every f_k, and its optimum."""

    name: str
    problem: LinearProblem
    federation: Federation
    theta_best: Tensor  # [n]
    best_loss: float

    @property
    def tasks(self) -> Task:
        """The stacked tasks of all clients."""
        return stacked_tasks(self.federation, self.problem)


def convex_problem(name: str, data_dir: Path | None = None, *, ridge: float = RIDGE) -> ConvexProblem:
    """Return the named benchmark problem; a LIBSVM set is read from `data_dir/libsvm` (by default the data folder).

    One that is not on this machine is an error: another problem would give another table.
    """
    if name == INTERPOLATION:
        return interpolation_problem()
    if name == SYNTHETIC:
        return solved(SYNTHETIC, *synthetic_rows(), ridge=ridge)
    return solved(name, *libsvm_rows(name, data_dir), ridge=ridge)


def libsvm_rows(name: str, data_dir: Path | None = None) -> tuple[Tensor, Tensor, int]:
    """Return features in float64, labels -1 / +1 and the number of clients of a LIBSVM set."""
    if name not in SPLITS:
        raise ValueError(f"a convex problem is one of {', '.join(NAMES)}, not '{name}'.")
    split, dataset = SPLITS[name], dataset_called(name)
    folder = folder_of(dataset, data_dir)
    if not folder.is_dir():
        raise DataError(missing(dataset, folder))
    try:
        path = find(folder, name, f"{name}.txt")
    except MissingFiles as error:
        raise DataError(f"{error} {missing(dataset, folder)}") from error
    features, labels = parsed_file(path, np.float64)
    if len(labels) < split.n_rows or features.shape[1] > split.n_features:
        raise DataError(
            f"{name} should have at least {split.n_rows} rows of at most {split.n_features} features, but {folder} has "
            f"{len(labels)} of {features.shape[1]}; the file is another one, or was cut."
        )
    inputs = np.zeros((split.n_rows, split.n_features))
    inputs[:, : features.shape[1]] = features[: split.n_rows]
    signs = np.where(labels[: split.n_rows] == labels.max(), 1.0, -1.0)
    return torch.from_numpy(inputs), torch.from_numpy(signs), split.n_clients


def synthetic_rows(
    *, n_clients: int = 8, n_each: int = 50, n_features: int = 20, shift: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor, int]:
    """Return a small logistic problem whose clients differ: features of unequal scale, a centre and a truth of its own.

    Drawn by NumPy's PCG64, so that it is the same on every machine.
    """
    generator = np.random.default_rng(seed)
    scales = np.logspace(0.0, -1.5, n_features)
    truth = generator.standard_normal(n_features) / scales**0.5
    rows, labels = [], []
    for _ in range(n_clients):
        centre = shift * generator.standard_normal(n_features)
        own_truth = truth + shift * generator.standard_normal(n_features)
        A = (generator.standard_normal((n_each, n_features)) + centre) * scales
        chance = 1.0 / (1.0 + np.exp(-A @ own_truth))
        rows.append(A)
        labels.append(np.where(generator.random(n_each) < chance, 1.0, -1.0))
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(labels)), n_clients


def interpolation_problem(
    *, n_clients: int = 5, n_each: int = 12, n_features: int = 10, condition: float = 10.0, seed: int = 0
) -> ConvexProblem:
    """Return least squares in which one theta fits every client exactly: f* = 0, and all gradients vanish there."""
    generator = np.random.default_rng(seed)
    truth = generator.standard_normal(n_features)
    scales = np.logspace(0.0, -0.5 * np.log10(condition), n_features)
    inputs = generator.standard_normal((n_clients * n_each, n_features)) * scales
    examples = Examples(
        torch.from_numpy(inputs), torch.from_numpy(inputs @ truth), torch.arange(0, len(inputs) + 1, n_each)
    )
    federation = Federation(examples, examples)
    return ConvexProblem(INTERPOLATION, least_squares_problem(n_features), federation, torch.from_numpy(truth), 0.0)


def solved(name: str, inputs: Tensor, targets: Tensor, n_clients: int, *, ridge: float = RIDGE) -> ConvexProblem:
    """Return the problem of these rows, dealt out in equal contiguous parts, with its optimum found by Newton."""
    n_each = len(targets) // n_clients
    kept = n_each * n_clients
    examples = Examples(inputs[:kept], targets[:kept], torch.arange(0, kept + 1, n_each))
    federation = Federation(examples, examples)
    problem = logistic_problem(inputs.shape[1], ridge=ridge)
    theta = weighted_minimiser(problem, federation, problem.theta0)
    return ConvexProblem(name, problem, federation, theta, float(client_losses(problem, federation, theta).mean()))


def client_losses(problem: LinearProblem, federation: Federation, theta: Tensor) -> Tensor:
    """Return every client's training loss [K] at theta, in one matrix product."""
    train = federation.train
    losses = problem.losses(problem.predict(theta, train.inputs), train.targets)
    means = torch.segment_reduce(losses, "mean", lengths=train.sizes)
    return means + 0.5 * problem.ridge * theta.square().sum()


def stacked_tasks(federation: Federation, problem: LinearProblem) -> Task:
    """Return the tasks of all clients, padded to the largest."""
    everyone = torch.arange(federation.n_clients)
    rows, real = federation.train.padded_rows(everyone)
    nothing = torch.zeros(len(everyone), 0)
    return Task(
        federation.train.inputs[rows],
        federation.train.targets[rows],
        real.to(problem.theta0.dtype),
        torch.zeros(len(everyone), 1, 0, dtype=torch.long),
        nothing,
        torch.ones(len(everyone), dtype=problem.theta0.dtype),
    )


def client_gradients(problem: LinearProblem, federation: Federation, theta: Tensor) -> Tensor:
    """Return every client's gradient [K, n] at theta."""
    found: Tensor = vmap(lambda task: client_gradient(problem, task, theta))(stacked_tasks(federation, problem))
    return found


def weighted_minimiser(
    problem: LinearProblem, federation: Federation, start: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the minimiser of sum_k weights_k f_k (by default the mean) by damped Newton, to rounding."""
    tasks = stacked_tasks(federation, problem)
    n_clients = federation.n_clients
    w = torch.full((n_clients,), 1.0 / n_clients, dtype=start.dtype) if weights is None else weights
    theta = start.clone()
    loss = w @ client_losses(problem, federation, theta)
    for _ in range(MAX_NEWTON_STEPS):

        def slope_and_bend(task: Task, at: Tensor = theta) -> tuple[Tensor, Tensor]:
            return client_gradient(problem, task, at), client_hessian(problem, task, at)

        gradients, hessians = vmap(slope_and_bend)(tasks)
        gradient = w @ gradients
        step = positive_solution(torch.einsum("k,kij->ij", w, hessians), gradient)
        decrement = float(gradient @ step)
        length, trial = 1.0, w @ client_losses(problem, federation, theta - step)
        while decrement > RESOLVED and trial > loss and length > 1e-10:  # below, losses cannot tell two steps apart
            length /= 2.0
            trial = w @ client_losses(problem, federation, theta - length * step)
        theta, loss = theta - length * step, trial
        if decrement < 1e-28:
            break
    return theta


def pareto_distance(convex: ConvexProblem, theta: Tensor) -> float:
    """Return how far theta is from a Pareto-optimal point: the minimiser of the weighted loss flattest at theta.

    The weights are those of the shortest vector in the convex hull of the clients' gradients. With strongly convex
    losses their minimiser is Pareto-optimal, so this bounds the distance to the Pareto set from above, zero on it.
    """
    G = client_gradients(convex.problem, convex.federation, theta)
    weights = torch.from_numpy(min_norm_weights(gramian(G).numpy()))
    nearest = weighted_minimiser(convex.problem, convex.federation, theta, weights.to(theta))
    return float(torch.linalg.vector_norm(theta - nearest))
