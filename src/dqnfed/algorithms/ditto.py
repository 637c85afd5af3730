"""Ditto: FedAvg, and beside it a personal model on every client, held near the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgServer, FedAvgUpdate, client_weights
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Theta, check_choice, check_range, check_used
from dqnfed.core.kernels import Pull
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class DittoMemory(NamedTuple):
    personal: Tensor  # [n] the client's own model


@dataclass(frozen=True, kw_only=True)
class Ditto(LocalWork[FedAvgServer, DittoMemory, FedAvgUpdate]):
    r"""Personal models regularised towards the global one (Li et al., ICML 2021, Algorithm 1).

    Objective: for every client k, :math:`\min_v F_k(v) + \frac{\lambda}{2} \|v - \theta\|^2`, theta FedAvg's model.

    Client: `epochs` of SGD from theta, whose update it sends; and as many steps of its own model v towards its
    objective, with the round's theta as anchor: v = (v - lr grad F_k(v) + lr lam theta) / (1 + lr lam). Nothing about v
    leaves the client.

    Server: theta - server_lr * sum_k w_k delta_k: FedAvg, to the bit.

    State: client, its personal model (n floats), which starts at theta_0 and changes in its rounds alone;
    server, theta.

    Payload: n floats up, n down.

    Evaluation: the personal models, each on its own client; the global model beside them.

    Differences: the proximal step is implicit, which is stable for every lam; the explicit one (`proximal =
    "explicit"`, as the official code) needs personal_lr * (lam + curvature) < 2. The official code interleaves personal
    and global steps on the same mini-batches, counts iterations where we count epochs, and may choose lam per client on
    validation data; here the batches are the same too, and lam is one number. One client's loss is often more curved
    than the mean of all, so that an lr tuned for the global model may be too large for the personal ones: see
    `personal_lr`.

    Reference: Li, Hu, Beirami & Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
    """

    info: ClassVar[Info] = Info(
        server=FedAvgServer,
        memory=DittoMemory,
        replies=(FedAvgUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        personal=True,
    )

    lam: float = 1.0  # pull of the global model on the personal ones, >= 0; 0: purely local models
    personal_lr: float | None = None  # > 0, with lr's decay; None: lr
    proximal: str = "implicit"  # implicit | explicit: how the pull enters a personal step
    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lam", low=0.0)
        if self.personal_lr is not None:
            check_range(self, "personal_lr", low=0.0, open_low=True)
        check_choice(self, "proximal", ("implicit", "explicit"))
        check_used(self, "proximal", used=self.lam > 0, why="with lam = 0, where there is no pull")
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgServer:
        return FedAvgServer(problem.theta0.clone())

    def init_memory(self, problem: Problem, task: Task) -> DittoMemory:
        return DittoMemory(problem.theta0.clone())

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: DittoMemory
    ) -> tuple[FedAvgUpdate, DittoMemory]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return FedAvgUpdate(delta), DittoMemory(self._personal(problem, task, sent.theta, memory.personal))

    def _personal(self, problem: Problem, task: Task, anchor: Tensor, personal: Tensor) -> Tensor:
        if self.personal_lr is not None:
            task = task._replace(lr=task.lr * (self.personal_lr / self.lr))
        pull = Pull(anchor, self.lam, implicit=self.proximal == "implicit") if self.lam else None
        return self.local_sgd(problem, task, personal, pull=pull)

    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        step = replies.combine("delta", client_weights(self.weighting, cohort))
        return ServerStep(FedAvgServer(server.theta - self.server_lr * step))

    def models(self, server: FedAvgServer, memory: DittoMemory) -> dict[str, Tensor]:
        return {"personal": memory.personal, "global": server.theta}

    def passes(self, sent: Theta) -> float:
        return 2.0 * self.epochs
