"""AgnosticFair: minimax over reweightings of the examples, here by group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import (
    Cohort,
    Empty,
    Info,
    ServerStep,
    Status,
    Theta,
    check_choice,
    check_range,
    check_used,
)
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task, cross_entropies, logistic_losses, squared_errors
from dqnfed.core.replies import Replies
from dqnfed.maths.solvers import simplex_projection


class AgnosticFairServer(NamedTuple):
    theta: Tensor  # [n]
    mixture: Tensor  # [B] weight of every group in the objective, summing to 1
    next_mixture: Tensor  # [B] after this round's ascent
    losses: Tensor  # [B] of every group when it was last measured; NaN: never
    alpha: Tensor  # [B] factor on the losses of a group's examples; [1] if the server does the weighting
    has_alpha: Tensor  # [] whether this round's alpha is computed and to be sent


class Reweighted(NamedTuple):
    """The model and the factors on the losses of each group's examples."""

    theta: Tensor  # [n]
    alpha: Tensor  # [B] or [1]


class GroupLosses(NamedTuple):
    loss_sums: Tensor  # [B] of the client's training examples at theta, by class; [] if it is in one group
    counts: Tensor  # [B] or []


class AgnosticFairUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work on the reweighted loss minus theta after it


@dataclass(frozen=True, kw_only=True)
class AgnosticFair(LocalWork[AgnosticFairServer, Empty, GroupLosses | AgnosticFairUpdate]):
    r"""Fairness-aware agnostic federated learning (Du et al., SDM 2021), with indicator kernels.

    Objective: minimise over theta the maximum over alpha of the mean of alpha(x) loss(x), where the factor alpha(x) =
    sum_b alpha_b K_b(x) is non-negative with mean 1 over the examples. K_b is the indicator of group b: a class, a
    client, or all examples. With q_b the group's share of the examples and lambda_b = alpha_b q_b this is the maximum
    of sum_b lambda_b L_b over the simplex, L_b the group's mean loss.

    Client: phase 1, the sum of its losses and the number of its examples in every group, at theta; phase 2, `epochs`
    of SGD from theta on its mean of alpha(x) loss(x), whose update it sends.

    Server: theta - sum_k p_k delta_k, p_k the client's share of the examples (for groups of clients sum_k lambda_k
    delta_k, as AFL); lambda becomes the projection of lambda + `mixture_lr` L on the simplex. Groups that the cohort
    does not have are left out of this round's alpha, and count with their last known loss in lambda.

    State: theta, and every group's lambda, which starts at 1 / B, and last known loss.

    Payload: n + 2B floats up in two phases, 2n + B down, B the number of classes; B = 1 for the other groups.

    Evaluation: the global model.

    Differences: no official code was found, and the objective is described from memory of the paper: Gaussian kernels
    on basis points, a bound on alpha, and a bound on the covariance of a sensitive attribute with the decision. Here
    kernels are indicators and there is no sensitive attribute, hence neither bound. Groups of clients are AFL step by
    step, evaluated at the last iterate; the constant kernel is FedAvg. A rare class may get a large alpha; with more
    than one local step a smaller lr is then needed.

    Reference: Du, Xu, Wu & Tong, Fairness-aware Agnostic Federated Learning, SDM 2021.
    """

    info: ClassVar[Info] = Info(
        server=AgnosticFairServer,
        messages=(Theta, Reweighted),
        replies=(GroupLosses, AgnosticFairUpdate),
        needs=("sum",),
        clip_fields=(),  # a client without a gradient still has losses, and a clipped one would unbalance the mixture
    )

    groups: str = "auto"  # class | client | constant | auto: class for the cross-entropy of a module, else client
    mixture_lr: float = 0.01  # step of the groups' weights, >= 0; 0 keeps them equal
    n_classes: int | None = None  # of groups = "class", >= 1; None: outputs of the model's last layer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "groups", ("auto", "class", "client", "constant"))
        check_range(self, "mixture_lr", low=0.0)
        if self.n_classes is not None:
            check_range(self, "n_classes", low=1)
        self._check_used(self.groups)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        groups = self.groups
        if groups == "auto":
            has_classes = problem.losses is cross_entropies and problem.module is not None
            groups = "class" if has_classes else "client"
        if groups == "class" and problem.losses in (squared_errors, logistic_losses):
            raise ValueError(
                "AgnosticFair: groups='class' needs targets that are class numbers, but the loss of this problem is "
                f"{problem.losses.__name__}; use the cross-entropy, groups='client' or groups='constant'."
            )
        self._check_used(groups)
        n_classes = (self.n_classes or problem.layout[-1][1][0]) if groups == "class" else None
        return replace(self, groups=groups, n_classes=n_classes)

    def _check_used(self, groups: str) -> None:
        check_used(self, "n_classes", used=groups in ("auto", "class"), why=f"with groups='{groups}'")
        check_used(self, "mixture_lr", used=groups != "constant", why="with groups='constant', which is one group")

    def init_server(self, problem: Problem, n_clients: int) -> AgnosticFairServer:
        n_groups = {"client": n_clients, "constant": 1}.get(self.groups, self.n_classes or 1)
        mixture = torch.full((n_groups,), 1.0 / n_groups, dtype=torch.float64)
        alpha = problem.theta0.new_ones(n_groups if self.groups == "class" else 1)
        unknown = torch.full_like(mixture, torch.nan)
        return AgnosticFairServer(problem.theta0.clone(), mixture, mixture.clone(), unknown, alpha, torch.tensor(False))

    def send(self, server: AgnosticFairServer) -> Theta | Reweighted:
        return Reweighted(server.theta, server.alpha) if bool(server.has_alpha) else Theta(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Reweighted, memory: Empty
    ) -> tuple[GroupLosses | AgnosticFairUpdate, Empty]:
        if isinstance(sent, Theta):
            return self._group_losses(problem, task, sent.theta), memory
        local = self.local_sgd(self._reweighted(problem, sent.alpha), task, sent.theta)
        return AgnosticFairUpdate(sent.theta - local), memory

    def _group_losses(self, problem: Problem, task: Task, theta: Tensor) -> GroupLosses:
        outputs = problem.predict(theta, task.inputs)
        self._check_classes(problem, outputs.shape[-1])
        losses = problem.losses(outputs, task.targets) + 0.5 * problem.ridge * theta.square().sum()
        if self.groups != "class":
            return GroupLosses((losses * task.mask).sum(), task.mask.sum())
        is_member = task.targets[:, None] == torch.arange(self.n_classes or 1, device=task.targets.device)
        members = is_member.to(losses.dtype) * task.mask[:, None]
        return GroupLosses(losses @ members, members.sum(0))

    def _check_classes(self, problem: Problem, n_outputs: int) -> None:
        """Refuse fewer groups than classes: examples of the others would have no weight."""
        if self.n_classes is not None and self.n_classes < n_outputs and problem.losses is cross_entropies:
            raise ValueError(
                f"AgnosticFair: `n_classes` must be at least the number of the model's outputs, {n_outputs}, but is "
                f"{self.n_classes}; every class is a group. Leave `n_classes` out, or use groups='client'."
            )

    def _reweighted(self, problem: Problem, alpha: Tensor) -> Problem:
        if self.groups != "class":
            return problem
        return replace(problem, losses=lambda outputs, targets: alpha[targets] * problem.losses(outputs, targets))

    def server_step(
        self, server: AgnosticFairServer, replies: Replies[GroupLosses | AgnosticFairUpdate], cohort: Cohort
    ) -> ServerStep[AgnosticFairServer]:
        if replies.kind is GroupLosses:
            return ServerStep(self._after_ascent(server, replies, cohort), Status.AGAIN)
        if self.groups == "client":
            present = server.mixture[cohort.clients]
            weights = present * min(cohort.n_clients / len(present), 1.0 / max(float(present.sum()), 1e-300))
        else:
            weights = cohort.n_examples.double() / cohort.n_examples.sum()
        moved = server._replace(
            theta=server.theta - replies.combine("delta", weights),
            mixture=server.next_mixture,
            has_alpha=torch.tensor(False),
        )
        return ServerStep(moved, diagnostics={"largest_mixture_weight": float(moved.mixture.max())})

    def _after_ascent(self, server: AgnosticFairServer, replies: Replies[Any], cohort: Cohort) -> AgnosticFairServer:
        """Return the state with this round's alpha and, for the next one, the mixture after the ascent."""
        alpha = server.alpha
        if self.groups == "client":
            means = torch.from_numpy(replies.scalars("loss_sums") / replies.scalars("counts"))
            losses = server.losses.index_copy(0, cohort.clients, means)
        else:
            sums, counts = self._totals(replies, "loss_sums"), self._totals(replies, "counts")
            present = counts > 0
            losses = torch.where(present, sums / counts.clamp(min=1.0), server.losses)
            here = torch.where(present, server.mixture, 0.0)
            here = here / here.sum() if float(here.sum()) > 0 else present / present.sum()
            alpha = torch.where(present, here * counts.sum() / counts.clamp(min=1.0), 0.0).to(alpha)
        raised = server.mixture + self.mixture_lr * torch.where(losses.isnan(), losses.nanmean(), losses)
        projected = torch.from_numpy(simplex_projection(raised.numpy()))
        return server._replace(next_mixture=projected, losses=losses, alpha=alpha, has_alpha=torch.tensor(True))

    def _totals(self, replies: Replies[Any], field: str) -> Tensor:
        """Return the field's sum over clients for every group [B], in float64 on the host."""
        if self.groups == "class":
            return replies.combine(field, torch.ones(len(replies), dtype=torch.float64)).double().cpu()
        return torch.tensor([replies.scalars(field).sum()])

    def passes(self, sent: Any) -> float:
        return 0.5 if isinstance(sent, Theta) else float(self.epochs)
