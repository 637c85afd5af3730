"""Conjugate gradients for positive definite systems: one solve, or one iteration at a time for a server."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class CG(NamedTuple):
    """Where a solve of A x = b stands."""

    solution: Tensor  # [n] x
    product: Tensor  # [n] A x
    residual: Tensor  # [n] b - A x
    direction: Tensor  # [n] conjugate to those before
    energy: Tensor  # [] residual' P^-1 residual


def cg_start(b: Tensor, precondition: Callable[[Tensor], Tensor] | None = None) -> CG:
    """Return the solve before its first iteration, at x = 0."""
    z = b if precondition is None else precondition(b)
    return CG(torch.zeros_like(b), torch.zeros_like(b), b, z, b @ z)


def cg_next(state: CG, Ap: Tensor, precondition: Callable[[Tensor], Tensor] | None = None) -> CG:
    """Return the solve after one iteration, Ap the product of A with `state.direction` (Hestenes & Stiefel 1952).

    Where p'Ap is not positive (A is not positive definite, or the solve is done) the state does not change; no branch
    looks at a value, so it vectorises.
    """
    curvature = state.direction @ Ap
    goes_on = (curvature > 0) & (state.energy > 0)
    length = state.energy / torch.where(goes_on, curvature, torch.ones_like(curvature))
    residual = state.residual - length * Ap
    z = residual if precondition is None else precondition(residual)
    energy = residual @ z
    ratio = energy / torch.where(goes_on, state.energy, torch.ones_like(energy))
    moved = CG(
        state.solution + length * state.direction,
        state.product + length * Ap,
        residual,
        z + ratio * state.direction,
        energy,
    )
    return CG(*(torch.where(goes_on, new, old) for new, old in zip(moved, state, strict=True)))


def cg_solution(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    n_iterations: int,
    start: Tensor | None = None,
    rtol: float = 0.0,
) -> Tensor:
    """Return x with product(x) ~ b after at most n_iterations; stops moving once the residual is below rtol ||b||."""
    shifted = b if start is None else b - product(start)
    state = cg_start(shifted)
    enough = rtol * torch.linalg.vector_norm(b)
    for _ in range(n_iterations):
        moved = cg_next(state, product(state.direction))
        is_done = torch.linalg.vector_norm(state.residual) <= enough
        state = CG(*(torch.where(is_done, old, new) for new, old in zip(moved, state, strict=True)))
    return state.solution if start is None else start + state.solution
