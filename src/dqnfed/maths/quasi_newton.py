"""BFGS: dense, limited-memory and compact forms of an inverse Hessian learnt from pairs (s, y).

s is a move of theta and y the change of one gradient along it, both on the same data. Functions of tensors hold for
one client and vectorise with `torch.func.vmap`: no branch looks at a value.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]


class Pairs(NamedTuple):
    """The newest m pairs, newest last; unused slots come first and hold zeros."""

    s: Tensor  # [m, n]
    y: Tensor  # [m, n]
    n_pairs: Tensor  # [] int64, how many slots are used; [0] where there are none


class CompactInverse(NamedTuple):
    """W^-1 = scale I + P' middle P with the memory's rows P = [S; Y]: nothing n-long."""

    scale: float
    middle: FloatArray  # [2m, 2m], symmetric


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a'b; vectorised over clients, a product of vectors would keep one processor of a GPU busy a client."""
    return (a * b).sum(-1)


def is_curved(s: Tensor, y: Tensor, *, min_curvature: float = 1e-8) -> Tensor:
    """Return whether s'y > min_curvature ||s|| ||y||, [] bool; false for a zero or non-finite pair."""
    lengths = torch.linalg.vector_norm(s) * torch.linalg.vector_norm(y)
    return torch.logical_and(torch.isfinite(lengths), dot(s, y) > min_curvature * lengths)


def hessian_bfgs_update(B: Tensor, s: Tensor, y: Tensor, *, min_curvature: float = 1e-8) -> Tensor:
    """Return the direct BFGS update of the Hessian B: symmetric, positive, and sending s to y. Keeps B if not curved.

    The recursion printed in the paper (Algorithm 1), which there stands for the inverse.
    """
    curved = is_curved(s, y, min_curvature=min_curvature)
    s, y = _kept(curved, s), _kept(curved, y)
    Bs = B @ s
    updated = B - torch.outer(Bs, Bs) / _divisor(curved, s @ Bs) + torch.outer(y, y) / _divisor(curved, s @ y)
    return torch.where(curved, updated, B)


def inverse_bfgs_update(H: Tensor, s: Tensor, y: Tensor, *, min_curvature: float = 1e-8) -> Tensor:
    """Return the BFGS update of the inverse Hessian H: symmetric, positive, and sending y to s. Keeps H if not curved.

    Exactly the inverse of `hessian_bfgs_update` when H is the inverse of B (Nocedal & Wright 2006, eq. 6.17).
    """
    curved = is_curved(s, y, min_curvature=min_curvature)
    s, y = _kept(curved, s), _kept(curved, y)
    rho = 1.0 / _divisor(curved, s @ y)
    V = torch.eye(len(s), dtype=s.dtype, device=s.device) - rho * torch.outer(s, y)
    return torch.where(curved, V @ H @ V.T + rho * torch.outer(s, s), H)


def empty_pairs(m: int, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Pairs:
    """Return a memory for m pairs of length n with no pair in it."""
    if m < 1:
        raise ValueError(f"a limited memory holds at least one pair, but m is {m}; use the identity metric for none.")
    zeros = torch.zeros(m, n, dtype=dtype, device=device)
    return Pairs(zeros, zeros.clone(), torch.zeros((), dtype=torch.int64, device=device))


def push_pair(pairs: Pairs, s: Tensor, y: Tensor, *, min_curvature: float = 1e-8) -> Pairs:
    """Return the memory with (s, y) as its newest pair and the oldest dropped; unchanged if the pair is not curved."""
    curved = is_curved(s, y, min_curvature=min_curvature)
    return Pairs(
        torch.where(curved, torch.cat([pairs.s[1:], s.unsqueeze(0)]), pairs.s),
        torch.where(curved, torch.cat([pairs.y[1:], y.unsqueeze(0)]), pairs.y),
        torch.where(curved, (pairs.n_pairs + 1).clamp(max=pairs.s.shape[0]), pairs.n_pairs),
    )


def scale(pairs: Pairs) -> Tensor:
    """Return gam = s'y / y'y of the newest pair: the inverse Hessian where no pair has looked; 1 if there is none."""
    used = pairs.n_pairs > 0
    s, y = pairs.s[-1], pairs.y[-1]
    return torch.where(used, dot(s, y) / _divisor(used, dot(y, y)), torch.ones_like(s[0]))


def damped(s: Tensor, y: Tensor, gam: Tensor, has_pair: Tensor, *, threshold: float = 0.1) -> Tensor:
    """Return y pulled towards s/gam just as far as s'y >= threshold s's/gam needs (Powell 1978).

    Measured against H0 = gam I, the newest stored pair's scale; without a pair (has_pair false) y is returned as is.
    """
    model = dot(s, s) / gam  # s'B0 s
    sy = dot(s, y)
    too_flat = has_pair & (sy < threshold * model)
    phi = (1.0 - threshold) * model / _divisor(too_flat, model - sy)
    return torch.where(too_flat, phi * y + (1.0 - phi) * s / gam, y)


def remembered(pairs: Pairs, s: Tensor, y: Tensor) -> Pairs:
    """Return the memory with (s, y) added, y damped against the newest pair; an uncurved pair is skipped."""
    return push_pair(pairs, s, damped(s, y, scale(pairs), pairs.n_pairs > 0))


def server_remembered(pairs: Pairs, s: Tensor, y: Tensor, *, threshold: float = 0.1) -> Pairs:
    """Return what `remembered` does, for one memory outside vmap: a skipped pair costs no pass over the others."""
    ss, sy, m = float(s @ s), float(s @ y), pairs.s.shape[0]
    if int(pairs.n_pairs):
        gam = float(pairs.s[-1] @ pairs.y[-1]) / float(pairs.y[-1] @ pairs.y[-1])
        if sy < threshold * ss / gam:  # damped towards s / gam (Powell 1978)
            phi = (1.0 - threshold) * (ss / gam) / (ss / gam - sy)
            y = phi * y + ((1.0 - phi) / gam) * s
            sy = float(s @ y)
    if not 1e-8 * math.sqrt(ss * float(y @ y)) < sy < math.inf:  # NaN is not
        return pairs
    n_pairs = (pairs.n_pairs + 1).clamp(max=m)
    return Pairs(torch.cat([pairs.s[1:], s[None]]), torch.cat([pairs.y[1:], y[None]]), n_pairs)


def no_pairs(theta: Tensor) -> Pairs:
    """Return the memory that holds nothing and takes no room: the identity metric."""
    empty = theta.new_zeros(0, len(theta))
    return Pairs(empty, empty.clone(), theta.new_zeros(0, dtype=torch.int64))


def lbfgs_rate(pairs: Pairs, g: Tensor) -> Tensor:
    """Return g'Hg, H the limited-memory inverse BFGS matrix with H0 = gam I: positive for every g but zero.

    One backward loop of dot products; ||g||^2 when the memory is empty. Equal to g @ `lbfgs_inverse_product`(pairs, g).
    """
    total = torch.zeros_like(g[0])
    for s, y in zip(reversed(pairs.s.unbind()), reversed(pairs.y.unbind()), strict=True):
        sy = dot(s, y)
        a = dot(s, g) / _divisor(sy > 0, sy)  # an unused slot is zero and adds nothing
        g = g - a * y
        total = total + sy * a.square()
    return scale(pairs) * dot(g, g) + total


class OnePairRate(NamedTuple):
    """What a client that remembers one pair asks for, and what it remembers of the pair."""

    rate: Tensor  # []   NaN: there never was a pair
    scale: Tensor  # []  s'y / y'y of the newest pair; 0: there is none


def one_pair_rate(s: Tensor, y: Tensor, g: Tensor, gam: Tensor, *, threshold: float = 0.1) -> OnePairRate:
    """Return g'Hg with H of the pair alone: what `remembered` and `lbfgs_rate` give with a memory of one pair.

    It takes six products of three vectors, and of the pair before it no more than its scale gam, against which y is
    damped: nothing n-long is kept. A pair without curvature is skipped; then H = gam I. Nothing keeps the unused branch
    finite, since no derivative is taken of it; comparisons with NaN are false.
    """
    ss, sy, yy, gg, sg, yg = ((a * b).sum(-1) for a, b in ((s, s), (s, y), (y, y), (g, g), (s, g), (y, g)))
    inverse_scale = gam.reciprocal().nan_to_num(posinf=0.0)
    model = ss * inverse_scale
    reach = (1.0 - threshold) * model
    phi = (reach / torch.maximum(model - sy, reach)).nan_to_num(nan=1.0)  # 0 / 0: no pair before to damp against
    share = torch.addcmul(inverse_scale, phi, inverse_scale, value=-1.0)  # of s in the damped y = phi y + share s
    damped_sy = torch.addcmul(phi * sy, share, ss)
    yy = torch.addcmul(share * damped_sy, phi, torch.addcmul(phi * yy, share, sy))
    yg = torch.addcmul(phi * yg, share, sg)
    curved = damped_sy > 1e-8 * (ss * yy).sqrt()
    a = sg / damped_sy
    rest = torch.addcmul(gg, a, torch.sub(a * yy, yg, alpha=2.0)).clamp(min=0.0)  # the square of g - a y
    scale = damped_sy / yy
    unlearnt = gam * gg * (gam / gam)  # NaN where there never was a pair
    return OnePairRate(
        torch.where(curved, torch.addcmul(sg * a, scale, rest), unlearnt), torch.where(curved, scale, gam)
    )


def lbfgs_inverse_product(pairs: Pairs, v: Tensor) -> Tensor:
    """Return H v for v [n], or the rows v_k H for v [K, n], by the two-loop recursion (Nocedal 1980)."""
    n_pairs = int(pairs.n_pairs)
    if not n_pairs:
        return v
    used = [(s, y, s @ y) for s, y in zip(pairs.s[-n_pairs:], pairs.y[-n_pairs:], strict=True)]
    coefficients = []
    for s, y, sy in reversed(used):
        coefficients.append((v @ s) / sy)
        v = v - coefficients[-1].unsqueeze(-1) * y
    _, y, sy = used[-1]
    v = (sy / (y @ y)) * v
    for (s, y, sy), a in zip(used, reversed(coefficients), strict=True):
        v = v + (a - (v @ y) / sy).unsqueeze(-1) * s
    return v


def lbfgs_direct_rate(pairs: Pairs, g: Tensor, *, beta: float = 1.0) -> Tensor:
    """Return g'Bg, B the direct BFGS matrix of the pairs started at beta I (Byrd, Nocedal & Schnabel 1994, Thm 2.3).

    The paper's recursion read literally, without the n x n matrix.
    """
    S, Y = pairs.s, pairs.y
    SY = S @ Y.T
    D = torch.diagonal(SY)
    unused = torch.diag((D <= 0).to(g.dtype))  # keeps the rows of empty slots solvable; their right-hand side is zero
    L = torch.tril(SY, diagonal=-1)
    top = torch.cat([beta * (S @ S.T) + unused, L], dim=1)
    bottom = torch.cat([L.T, -torch.diag(D) - unused], dim=1)
    w = torch.cat([beta * (S @ g), Y @ g])
    found = torch.linalg.solve_ex(torch.cat([top, bottom]), w)  # of a singular system: no error, and a rate of NaN
    solution = torch.where(found.info == 0, found.result, torch.nan)
    return beta * (g @ g) - w @ solution


def secant_curvature(s: Tensor, y: Tensor) -> Tensor:
    """Return s'y / s's, the curvature of a loss along the move s; NaN where there was no move."""
    return (s * y).sum(-1) / (s * s).sum(-1)


def probe_length(theta: Tensor, g: Tensor, *, relative: float = 1e-4) -> Tensor:
    """Return the e at which a probing gradient at theta - e g shows curvature: `relative` (1 + ||theta||) / ||g||."""
    norm = torch.linalg.vector_norm(g)
    e: Tensor = relative * (1.0 + torch.linalg.vector_norm(theta)) / _divisor(norm > 0, norm)
    return e


def cauchy_rate(g: Tensor, g_probe: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cauchy decrement d = ||g||^2 / c and the curvature c = |g'(g - g_probe)| / (e ||g||^2) along g.

    g_probe is the gradient at theta - e g: one extra gradient replaces a learning rate when there is no pair yet.
    A zero gradient has rate 0; a loss without curvature along g, or a probe that is not finite, has rate and c NaN.
    """
    gg = dot(g, g)
    c = dot(g, g - g_probe).abs() / (e * _divisor(gg > 0, gg))
    curved = torch.logical_and(torch.isfinite(c), c > 0)
    c = torch.where(curved, c, torch.full_like(c, torch.nan))
    return torch.where(gg > 0, gg / c, torch.zeros_like(gg)), c


def compact_inverse(PP: FloatArray, n_pairs: int) -> CompactInverse:
    """Return the limited-memory inverse BFGS matrix in compact form (Byrd, Nocedal & Schnabel 1994, Thm 2.2).

    From the products PP of the memory's rows P = [S; Y] with each other, of which the newest `n_pairs` are used.
    """
    m = len(PP) // 2
    middle = np.zeros((2 * m, 2 * m))
    if n_pairs == 0:
        return CompactInverse(1.0, middle)
    first = np.arange(m)[m - n_pairs :]
    second = m + first
    YY, SY = PP[np.ix_(second, second)], PP[np.ix_(first, second)]
    gam = float(SY[-1, -1] / YY[-1, -1])
    R_inverse = np.linalg.inv(np.triu(SY))
    middle[np.ix_(first, first)] = R_inverse.T @ (np.diag(np.diag(SY)) + gam * YY) @ R_inverse
    middle[np.ix_(first, second)] = -gam * R_inverse.T
    middle[np.ix_(second, first)] = -gam * R_inverse
    return CompactInverse(gam, middle)


def metric_gramian(GG: FloatArray, GP: FloatArray, inverse: CompactInverse) -> FloatArray:
    """Return M = G W^-1 G' from G G' and G [S; Y]': the Gramian of the rows in the metric W."""
    if not GP.size:  # without a memory the metric is the identity
        return GG
    M = inverse.scale * GG + GP @ inverse.middle @ GP.T
    return np.asarray((M + M.T) / 2.0)


def _kept(keep: Tensor, v: Tensor) -> Tensor:
    return torch.where(keep, v, torch.zeros_like(v))


def _divisor(meant: Tensor, value: Tensor) -> Tensor:
    return torch.where(meant, value, torch.ones_like(value))  # the unused branch must stay finite
