"""AAggFF: weights of clients by online convex optimisation on their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, Reweighted, normalised
from dqnfed.core.algorithm import Cohort, Empty, Info, check_choice
from dqnfed.core.problem import Problem
from dqnfed.maths.simplex import quadratic_on_simplex

RESPONSES: dict[str, Callable[[Tensor], Tensor]] = {  # distribution functions of a client's loss over the mean loss
    "weibull": lambda x: 1.0 - torch.exp(-x.square()),
    "exponential": lambda x: 1.0 - torch.exp(-x),
    "frechet": lambda x: torch.exp(-1.0 / x),
    "normal": lambda x: torch.special.ndtr(x - 1.0),
    "gumbel": lambda x: torch.exp(-torch.exp(1.0 - x)),
    "logistic": lambda x: torch.sigmoid(x - 1.0),
}


class AAggFFServer(NamedTuple):
    theta: Tensor  # [n]
    client_weights: Tensor  # [n_clients] p, a point of the simplex; float64 on the host, as the two below
    slopes: Tensor  # [n_clients] sum of the gradients of the weights' objective
    squares: Tensor  # [n_clients, n_clients] alpha I and the sum of their outer products; [0, 0] in the device variant
    n_rounds: Tensor  # [] so far


@dataclass(frozen=True, kw_only=True)
class AAggFF(Reweighted[AAggFFServer, Empty, LossUpdate]):
    r"""Adaptive aggregation for fair federated learning (Hahn, Kim & Lee, ICML 2024).

    Objective: weights whose regret is small for the gains :math:`\log(1 + p^\top r)`, where the response r_k of a
    client grows with its loss over the mean loss of the cohort.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: r_k = Phi(F_k / mean F), Phi a distribution function (`response`), over the number of clients ("silo") or
    times the share C of those taking part ("device"). Silo, an online Newton step: with g = -r / (1 + p'r), G the sum
    of the g and H = 4 I + the sum of the gg', p minimises G'p + 2 ||p||^2 + N/8 p'Hp over the simplex. Device,
    follow the regularised leader: responses of the absent count as the mean m, those of the present as m + (r_k - m)/C,
    and p_k is proportional to exp(-G_k sqrt(ln N) / (sqrt(t + 1) (2 + C))) after t rounds. Then theta - server_lr *
    sum_k w_k delta_k, w the new weights of the cohort, scaled to the sum 1.

    State: theta, the weights and slopes of all clients, and in the silo variant an N x N matrix.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: the paper's formulas. The authors' code starts the weights at 1 instead of 1/N; its normal response
    uses erfc and falls with the loss; its estimate for present clients lacks the mean. The normal, Gumbel and logistic
    responses are centred at 1. A client whose reply is missing in the silo variant counts with the mean response.
    `weighting = "examples"` multiplies the weights by the clients' examples, which the paper does not.

    Reference: Hahn, Kim & Lee, Pursuing Overall Welfare in Federated Learning through Sequential Decision Making, ICML
    2024.
    """

    info: ClassVar[Info] = Info(server=AAggFFServer, replies=(LossUpdate,), needs=("sum",), clip_fields=("delta",))

    variant: str = "auto"  # silo | device | auto: silo if all clients take part in every round
    response: str = "weibull"  # weibull | exponential | frechet | normal | gumbel | logistic
    weighting: str = "uniform"  # uniform | examples: factors on the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "variant", ("auto", "silo", "device"))
        check_choice(self, "response", tuple(RESPONSES))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.variant == "silo" and cohort_size < n_clients:
            raise ValueError(
                f"AAggFF: `variant` is 'silo', where all clients take part in every round, but {cohort_size} of "
                f"{n_clients} do; use variant = 'device' or 'auto'."
            )
        auto = "silo" if cohort_size == n_clients else "device"
        return replace(self, variant=auto if self.variant == "auto" else self.variant)

    @property
    def mode(self) -> str:
        return f"variant {self.variant}"

    def init_server(self, problem: Problem, n_clients: int) -> AAggFFServer:
        squares = 4.0 * torch.eye(n_clients if self.variant == "silo" else 0, dtype=torch.float64)
        weights = torch.full((n_clients,), 1.0 / n_clients, dtype=torch.float64)
        return AAggFFServer(problem.theta0.clone(), weights, torch.zeros_like(weights), squares, torch.tensor(0))

    def weights(
        self, losses: Tensor, shares: Tensor, server: AAggFFServer, cohort: Cohort
    ) -> tuple[Tensor, AAggFFServer]:
        responses = RESPONSES[self.response](relative_losses(losses))
        kept = (
            self._silo(server, responses, cohort) if self.variant == "silo" else self._device(server, responses, cohort)
        )
        here = kept.client_weights[cohort.clients] * shares * len(shares)
        return normalised(here, shares), kept._replace(n_rounds=server.n_rounds + 1)

    def _silo(self, server: AAggFFServer, responses: Tensor, cohort: Cohort) -> AAggFFServer:
        n = cohort.n_clients
        everyone = torch.full((n,), float(responses.mean()), dtype=torch.float64)
        r = everyone.index_copy(0, cohort.clients, responses) / n
        g = -r / (1.0 + server.client_weights @ r)
        slopes, squares = server.slopes + g, server.squares + torch.outer(g, g)
        p = torch.from_numpy(quadratic_on_simplex(slopes.numpy(), (4.0 * torch.eye(n) + n / 4.0 * squares).numpy()))
        return server._replace(client_weights=p, slopes=slopes, squares=squares)

    def _device(self, server: AAggFFServer, responses: Tensor, cohort: Cohort) -> AAggFFServer:
        n, share = cohort.n_clients, len(responses) / cohort.n_clients
        r = share * responses
        mean = float(r.mean())
        estimate = torch.full((n,), mean, dtype=torch.float64)
        estimate = estimate.index_copy(0, cohort.clients, mean + (r - mean) / share)
        off = float(server.client_weights @ (estimate - mean))
        slopes = server.slopes - estimate / (1.0 + mean) + mean * off / (1.0 + mean) ** 2
        rate = sqrt(log(n)) / (sqrt(float(server.n_rounds) + 1.0) * (2.0 + share))
        return server._replace(client_weights=torch.softmax(-rate * slopes, dim=0), slopes=slopes)


def relative_losses(losses: Tensor) -> Tensor:
    """Return the losses over their mean; ones where the mean is not positive."""
    mean = losses.mean()
    return losses / mean if bool(mean > 0) else torch.ones_like(losses)
