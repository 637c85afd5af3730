"""Gradients, Hessians and their products for one client's loss: by formula where the model is linear, else by autograd.

Work is counted in gradient passes: a loss is a third of one, a product with the Hessian or the Gauss-Newton matrix is
two, and a full Hessian of n parameters is n / 2 (A'WA costs 2 N n^2 operations where a gradient costs 4 N n).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import RLock

import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from dqnfed.core.gradients import loss_gradient
from dqnfed.core.problem import Problem, Task, cross_entropies, sign_accuracy, squared_errors
from dqnfed.maths.symmetric import eigenpairs, glm_hessian, n_packed

logger = logging.getLogger("dqnfed")
LOSS_PASSES = 1.0 / 3.0
PRODUCT_PASSES = 2.0
FORWARD_MODE = RLock()  # torch counts the levels of forward-mode derivatives for all threads together
MAX_CURVATURE_BYTES = 8 * 2**30  # of all clients' matrices together; an exact method refuses more


@dataclass(frozen=True, kw_only=True)
class LinearProblem(Problem):
    """A problem whose model is linear in theta: outputs = inputs @ theta, one number per example.

    Its derivatives are matrix products, so that Hessians cost one GEMM; every method may use it as a plain `Problem`.
    """

    slopes: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> [N] first derivatives of the losses
    curvatures: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> [N] second derivatives

    def to(self, device: torch.device | str) -> LinearProblem:
        return replace(self, theta0=self.theta0.to(device))


def logistic_problem(
    n_features: int, *, ridge: float = 1e-3, theta0: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> LinearProblem:
    """Return ridge-regularised logistic regression without intercept; targets are -1 or +1.

    Every form is the overflow-free one: log(1 + e^-z) as logaddexp(0, -z), curvature as sigmoid(z) sigmoid(-z).
    """
    start = torch.zeros(n_features, dtype=dtype) if theta0 is None else theta0
    return LinearProblem(
        theta0=start,
        layout=(("weight", torch.Size([n_features])),),
        predict=_linear_outputs,
        losses=_logistic_losses,
        score=sign_accuracy,
        ridge=ridge,
        slopes=_logistic_slopes,
        curvatures=_logistic_curvatures,
    )


def least_squares_problem(
    n_features: int, *, ridge: float = 0.0, theta0: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> LinearProblem:
    """Return linear least squares, half the squared error of every example, with a ridge."""
    start = torch.zeros(n_features, dtype=dtype) if theta0 is None else theta0
    return LinearProblem(
        theta0=start,
        layout=(("weight", torch.Size([n_features])),),
        predict=_linear_outputs,
        losses=_half_squares,
        score=_negative_mean_square,
        score_name="negative squared error",
        ridge=ridge,
        slopes=torch.sub,
        curvatures=_ones,
    )


def client_gradient(problem: Problem, task: Task, theta: Tensor) -> Tensor:
    """Return the gradient of the client's training loss, ridge included."""
    if not isinstance(problem, LinearProblem):
        return loss_gradient(problem, theta, task)
    A, share = task.inputs.to(theta.dtype), _shares(task)
    return A.T @ (share * problem.slopes(A @ theta, task.targets)) + problem.ridge * theta


def client_hessian(problem: Problem, task: Task, theta: Tensor) -> Tensor:
    """Return the exact Hessian [n, n] of the client's training loss, ridge included."""
    if not isinstance(problem, LinearProblem):
        with FORWARD_MODE:
            found: Tensor = hessian(problem.loss)(theta, task)
        return (found + found.T) / 2.0
    A, share = task.inputs.to(theta.dtype), _shares(task)
    return glm_hessian(A, share * problem.curvatures(A @ theta, task.targets), problem.ridge)


def newton_direction(problem: Problem, task: Task, theta: Tensor, gradient: Tensor) -> Tensor:
    """Return H^-1 g with the client's exact Hessian; an n x n matrix, for small models."""
    direction: Tensor = torch.linalg.solve(client_hessian(problem, task, theta), gradient)
    return direction


def hessian_root(problem: Problem, task: Task, theta: Tensor) -> Tensor:
    """Return R [N, n], or [N C, n] for models of C outputs, with R'R = the Gauss-Newton matrix without its ridge.

    For models linear in theta that is the Hessian; rows of padding are zero.
    """
    share = _shares(task)
    if isinstance(problem, LinearProblem):
        A = task.inputs.to(theta.dtype)
        return (share * problem.curvatures(A @ theta, task.targets)).sqrt()[:, None] * A
    outputs = problem.predict(theta, task.inputs)
    jacobian: Tensor = jacrev(problem.predict)(theta, task.inputs).reshape(len(share), -1, len(theta))

    roots = _output_roots(problem, outputs, task.targets)
    rows: Tensor = ((share.sqrt()[:, None, None] * roots.transpose(1, 2)) @ jacobian).reshape(-1, len(theta))
    return rows


def hessian_product(problem: Problem, task: Task, theta: Tensor, v: Tensor) -> Tensor:
    """Return the product of the client's exact Hessian with v."""
    if not isinstance(problem, LinearProblem):
        with FORWARD_MODE:
            product: Tensor = jvp(lambda t: grad(problem.loss)(t, task), (theta,), (v,))[1]
        return product
    A, share = task.inputs.to(theta.dtype), _shares(task)
    weights = share * problem.curvatures(A @ theta, task.targets)
    return A.T @ (weights * (A @ v)) + problem.ridge * v


def gauss_newton_product(problem: Problem, task: Task, theta: Tensor, v: Tensor) -> Tensor:
    """Return the product of the Gauss-Newton matrix J'LJ (plus ridge) with v: positive semi-definite for convex losses.

    J is the Jacobian of the outputs, L the Hessian of the mean loss in the outputs (Schraudolph 2002).
    """
    share = _shares(task)

    def outputs(t: Tensor) -> Tensor:
        return problem.predict(t, task.inputs)

    def mean_loss(z: Tensor) -> Tensor:
        return (problem.losses(z, task.targets) * share).sum()

    z, pulled_back = vjp(outputs, theta)[:2]
    with FORWARD_MODE:
        pushed: Tensor = jvp(outputs, (theta,), (v,))[1]
        bent: Tensor = jvp(grad(mean_loss), (z,), (pushed,))[1]
    product: Tensor = pulled_back(bent)[0]
    return product + problem.ridge * v


def gauss_newton_rows(problem: Problem, task: Task, theta: Tensor, signs: Tensor) -> Tensor:
    """Return rows [s, n] whose Y'Y is the Gauss-Newton matrix (without ridge) in expectation: one backward pass a row.

    A row is J' (L^(1/2) e): the outputs' Jacobian transposed, on the loss curvature's root times random signs e,
    signs [s, N * outputs] with E signs'signs = I. Squared, a row is an unbiased, non-negative estimate of the diagonal.
    """
    share = _shares(task).sqrt()

    def outputs(t: Tensor) -> Tensor:
        return problem.predict(t, task.inputs)

    z, pulled_back = vjp(outputs, theta)[:2]
    roots = share[:, None, None] * _output_roots(problem, z, task.targets)

    def row(e: Tensor) -> Tensor:
        bent = (roots @ e.reshape(len(share), -1, 1)).reshape(z.shape)
        pulled: Tensor = pulled_back(bent)[0]
        return pulled

    rows: Tensor = vmap(row)(signs)
    return rows


def n_outputs(problem: Problem, task: Task) -> int:
    """Return how many outputs the model has for one example."""
    return problem.predict(problem.theta0, task.inputs[:1]).numel()


def _output_roots(problem: Problem, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return B [N, C, C] with BB' = the Hessian of every example's loss in its outputs; smooth, so without a sign."""
    n = len(targets)
    if problem.losses is cross_entropies and outputs.dim() == 2:
        p = torch.softmax(outputs, dim=1)  # diag(p) - pp' = BB' with B = diag(sqrt p) - p sqrt(p)'
        return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    flat = outputs.reshape(n, -1)
    if problem.losses is squared_errors:
        return torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device).expand(n, -1, -1)

    def one_loss(z: Tensor, target: Tensor) -> Tensor:
        return problem.losses(z.reshape(1, *outputs.shape[1:]), target[None])[0]

    with FORWARD_MODE:
        curvatures = vmap(hessian(one_loss))(flat, targets)
    values, vectors = eigenpairs(curvatures)
    positive = values > 1e-12 * values.amax(-1, keepdim=True)
    roots = torch.where(positive, values, torch.zeros_like(values)).sqrt()
    product: Tensor = (vectors * roots[:, None, :]) @ vectors.transpose(1, 2)
    return product


def hessian_passes(theta: Tensor) -> float:
    """Return what one full Hessian costs, in gradient passes."""
    return len(theta) / 2.0


def refuse_if_too_large(problem: Problem, n_clients: int, name: str, approximations: str) -> None:
    """Refuse an exact method whose client matrices would not fit in memory, and name what would."""
    n, size = problem.n_parameters, problem.theta0.element_size()
    each = n_packed(n) * size
    if each * n_clients > MAX_CURVATURE_BYTES:
        raise ValueError(
            f"{name} keeps an exact Hessian per client: {n:,} parameters make {n_packed(n):.3g} entries, "
            f"{_bytes(each)} a client and {_bytes(each * n_clients)} for {n_clients} clients. It is meant for convex "
            f"problems of a few hundred parameters; for networks use {approximations}."
        )


def log_full_participation(name: str, n_clients: int, cohort_size: int) -> None:
    """Warn that a method which is only defined with all clients will not sample them."""
    if cohort_size < n_clients:
        logger.warning(
            "%s is defined with every client in every round: all %d take part, not a sample of %d.",
            name,
            n_clients,
            cohort_size,
        )


def _shares(task: Task) -> Tensor:
    return task.mask / task.mask.sum().clamp(min=1)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _linear_outputs(theta: Tensor, inputs: Tensor) -> Tensor:
    return inputs.to(theta.dtype) @ theta


def _logistic_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.logaddexp(torch.zeros_like(outputs), -outputs * targets)


def _logistic_slopes(outputs: Tensor, targets: Tensor) -> Tensor:
    return -targets * torch.sigmoid(-outputs * targets)


def _logistic_curvatures(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.sigmoid(outputs) * torch.sigmoid(-outputs)


def _half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square()


def _negative_mean_square(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return -((outputs - targets).square() * mask).sum() / mask.sum().clamp(min=1)


def _ones(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.ones_like(outputs)
