"""TorchJD's weightings as federated methods: the clients' updates are the rows of the Jacobian (extra `torchjd`)."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgServer, FedAvgUpdate
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


@dataclass(frozen=True, kw_only=True)
class JacobianDescent(LocalWork[FedAvgServer, Empty, FedAvgUpdate]):
    """A method whose server combines the clients' updates with weights that TorchJD finds from their Gramian."""

    info: ClassVar[Info] = Info(server=FedAvgServer, replies=(FedAvgUpdate,), needs=("gram",), clip_fields=("delta",))

    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)

    @abstractmethod
    def weighting(self, aggregation: Any) -> Any:
        """Return the weighting, made from the module `torchjd.aggregation`."""

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        self.weighting(torchjd_aggregation())(torch.eye(2, dtype=torch.float64))  # its solver must be there too
        return self

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgServer:
        return FedAvgServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        M = torch.from_numpy(replies.gram("delta"))
        weights: Tensor = self.weighting(torchjd_aggregation())(M / M.diagonal().max().clamp(min=1e-300))
        diagnostics = {"smallest_weight": float(weights.min()), "largest_weight": float(weights.max())}
        step = replies.combine("delta", weights)
        return ServerStep(FedAvgServer(server.theta - self.server_lr * step), diagnostics=diagnostics)


def torchjd_aggregation() -> Any:
    """Return the module `torchjd.aggregation`, or say how to get it."""
    try:
        return importlib.import_module("torchjd.aggregation")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the methods jd-* need TorchJD, but '{missing.name}' is not installed; "
            "install the extra: pip install 'dqnfed[torchjd]'."
        ) from missing


@dataclass(frozen=True, kw_only=True)
class JDUPGrad(JacobianDescent):
    """Unconflicting projection of gradients (Quinton & Rey, 2024), from TorchJD.

    Objective: a step that conflicts with no client and is proportional to each of their updates.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: every update is projected on the cone of directions that oppose no client; theta - server_lr times the mean
    of the projections.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: clients count alike. The Gramian goes to TorchJD in float64, scaled to a largest diagonal of one.

    Reference: Quinton & Rey, Jacobian Descent for Multi-Objective Optimization, arXiv 2406.16232.
    """

    def weighting(self, aggregation: Any) -> Any:
        return aggregation.UPGradWeighting()


@dataclass(frozen=True, kw_only=True)
class JDDualProj(JacobianDescent):
    """Projection of the mean update on the dual cone (Lopez-Paz & Ranzato, NeurIPS 2017), from TorchJD.

    Objective: the mean of the clients' losses, by steps that conflict with no client.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: theta - server_lr times the mean update, projected on the cone of directions that oppose no client.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: clients count alike. The Gramian goes to TorchJD in float64, scaled to a largest diagonal of one.

    Reference: Lopez-Paz & Ranzato, Gradient Episodic Memory for Continual Learning, NeurIPS 2017.
    """

    def weighting(self, aggregation: Any) -> Any:
        return aggregation.DualProjWeighting()


@dataclass(frozen=True, kw_only=True)
class JDAlignedMTL(JacobianDescent):
    """Alignment of the principal components of the updates (Senushkin et al., CVPR 2023), from TorchJD.

    Objective: the mean of the clients' losses, by updates that were made orthogonal and equally long.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: the matrix of updates is replaced by the nearest one with equal singular values, the smallest of its own;
    theta - server_lr times the mean of its rows.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: clients count alike. The Gramian goes to TorchJD in float64, scaled to a largest diagonal of one.

    Reference: Senushkin, Patakin, Kuznetsov & Konushin, Independent Component Alignment for Multi-Task Learning, CVPR
    2023.
    """

    def weighting(self, aggregation: Any) -> Any:
        return aggregation.AlignedMTLWeighting()


@dataclass(frozen=True, kw_only=True)
class JDCAGrad(JacobianDescent):
    """Conflict-averse gradient descent (Liu et al., NeurIPS 2021), from TorchJD.

    Objective: the mean of the clients' losses, by steps that do well for the worst-off client.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: theta - server_lr times the vector within c times the mean update's length of the mean update that has the
    largest smallest inner product with a client's update.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: clients count alike. The Gramian goes to TorchJD in float64, scaled to a largest diagonal of one; the
    convex program is solved by Clarabel.

    Reference: Liu, Liu, Jin, Stone & Liu, Conflict-Averse Gradient Descent for Multi-task Learning, NeurIPS 2021.
    """

    c: float = 0.5  # radius around the mean update as a share of its length, >= 0; 0: the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "c", low=0.0)

    def weighting(self, aggregation: Any) -> Any:
        return aggregation.CAGradWeighting(self.c)


JD_METHODS: dict[str, type[JacobianDescent]] = {
    "jd-upgrad": JDUPGrad,
    "jd-dualproj": JDDualProj,
    "jd-aligned-mtl": JDAlignedMTL,
    "jd-cagrad": JDCAGrad,
}
