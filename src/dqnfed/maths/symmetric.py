"""Symmetric matrices as their upper triangle, and systems with them: what second-order messages are made of.

A symmetric d x d matrix is packed as the vector of its T = d (d + 1) / 2 entries on and above the diagonal, row by row.
Functions of tensors hold for one matrix and vectorise with `torch.func.vmap`, unless they say "on the host".
"""

from functools import lru_cache

import torch
from torch import Tensor

JITTER = 1e-12  # share of the mean diagonal that is added before a factorisation


def n_packed(d: int) -> int:
    """Return how many entries the upper triangle of a d x d matrix has."""
    return d * (d + 1) // 2


@lru_cache(maxsize=16)
def _upper(d: int, device: torch.device) -> Tensor:
    rows, columns = torch.triu_indices(d, d, device=device)
    flat: Tensor = rows * d + columns
    return flat


@lru_cache(maxsize=16)
def _places(d: int, device: torch.device) -> Tensor:
    places = torch.zeros(d, d, dtype=torch.long, device=device)
    rows, columns = torch.triu_indices(d, d, device=device)
    numbers = torch.arange(len(rows), device=device)
    places[rows, columns] = numbers
    places[columns, rows] = numbers
    return places.reshape(-1)


@lru_cache(maxsize=16)
def _diagonal(d: int, device: torch.device) -> Tensor:
    i = torch.arange(d, device=device)
    return i * d - i * (i - 1) // 2


def packed(M: Tensor) -> Tensor:
    """Return the upper triangle [T] of M [d, d], which must be symmetric."""
    d = M.shape[-1]
    return M.reshape(-1)[_upper(d, M.device)]


def unpacked(v: Tensor, d: int) -> Tensor:
    """Return the symmetric matrix [d, d] whose upper triangle is v [T]."""
    return v[_places(d, v.device)].view(d, d)


def packed_norm(v: Tensor, d: int) -> Tensor:
    """Return the Frobenius norm of the symmetric matrix with upper triangle v: off-diagonal entries count twice."""
    squares = v.square()
    return (2.0 * squares.sum() - squares[_diagonal(d, v.device)].sum()).clamp(min=0.0).sqrt()


def glm_hessian(A: Tensor, weights: Tensor, ridge: float = 0.0) -> Tensor:
    """Return A' diag(weights) A + ridge I for rows A [N, d]: one matrix product, never a loop over examples."""
    H = A.T @ (weights[:, None] * A)
    torch.diagonal(H).add_(ridge)  # in place: the matrices of all clients are too large to copy for their diagonals
    return H


def damped_factor(H: Tensor, damping: float | Tensor = 0.0) -> Tensor:
    """Return the Cholesky factor L of H + damping I (plus a jitter of 1e-12 of its mean diagonal); NaN if not positive.

    No branch looks at a value: a client whose matrix is not positive definite sends NaN and is dropped, by name.
    """
    d = H.shape[-1]
    eye = torch.eye(d, dtype=H.dtype, device=H.device)
    shift = damping + JITTER * torch.diagonal(H).abs().mean()
    factor, info = torch.linalg.cholesky_ex(H + shift * eye)
    return torch.where(info == 0, factor, torch.full_like(factor, torch.nan))


def factored_solution(factor: Tensor, b: Tensor) -> Tensor:
    """Return x [d] with L L'x = b."""
    solution: Tensor = torch.cholesky_solve(b.unsqueeze(-1), factor)
    return solution.squeeze(-1)


def eigenpairs(M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues [..., d], ascending and NaN where M is not finite, and the eigenvectors [..., d, d].

    LAPACK gives up on a matrix with NaN, and with it on the whole batch; here only the client that sent it is lost.
    """
    is_finite = torch.isfinite(M.sum(dim=(-2, -1), keepdim=True))  # a sum is finite only if every entry is
    values, vectors = torch.linalg.eigh(torch.where(is_finite, M, M.new_zeros(())))
    return torch.where(is_finite[..., 0], values, values.new_full((), torch.nan)), vectors


def positive_solution(H: Tensor, b: Tensor) -> Tensor:
    """Return x with H x = b, on the host: by Cholesky, or, if H is not positive definite, by its clipped eigenvalues.

    Clipping is at 1e-12 of the largest |eigenvalue|, so the answer is finite and never goes uphill.
    """
    factor, info = torch.linalg.cholesky_ex(H)
    if int(info) == 0:
        return factored_solution(factor, b)
    values, vectors = torch.linalg.eigh(_symmetrised(H))
    floor = (JITTER * values.abs().max()).clamp(min=torch.finfo(H.dtype).tiny)
    solution: Tensor = vectors @ ((vectors.T @ b) / values.clamp(min=float(floor)))
    return solution


def projected_solution(H: Tensor, b: Tensor, mu: float) -> Tensor:
    """Return P_mu(H)^-1 b, on the host; P_mu raises the eigenvalues of H that are below mu > 0 to mu."""
    values, vectors = torch.linalg.eigh(_symmetrised(H))
    solution: Tensor = vectors @ ((vectors.T @ b) / values.clamp(min=mu))
    return solution


def _symmetrised(H: Tensor) -> Tensor:
    return (H + H.T) / 2.0
