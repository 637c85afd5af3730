"""FedProx: FedAvg whose clients are held near the model they started from."""

from __future__ import annotations

from dataclasses import dataclass

from dqnfed.algorithms.fedavg import FedAvg, FedAvgUpdate
from dqnfed.core.algorithm import Empty, Theta, check_range, check_used
from dqnfed.core.kernels import Pull
from dqnfed.core.problem import Problem, Task


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    r"""Federated averaging with a proximal term on every client (Li et al., MLSys 2020).

    Objective: the mean loss over all examples, as FedAvg.

    Client: `epochs` of SGD from theta on :math:`F_k(v) + \frac{\mu}{2} \|v - \theta\|^2`; sends theta before minus v
    after.

    Server: theta - server_lr * sum_k w_k delta_k, as FedAvg.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: the paper lets every client stop at an accuracy of its own; here all make the same epochs. The proximal
    term is part of the gradient, so a step is stable only where lr * (mu + curvature) < 2. mu = 0 is FedAvg to the bit,
    and so is every mu with one full-batch step a round: the term has no gradient where that step is made.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, Federated Optimization in Heterogeneous Networks, MLSys
    2020.
    """

    mu: float = 0.01  # pull towards the round's model, >= 0; 0: FedAvg

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "mu", low=0.0)
        one_step = self.epochs == 1 and self.batch_size is None
        check_used(self, "mu", used=not one_step, why="with one full-batch step a round, which starts at the anchor")

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        pull = Pull(sent.theta, self.mu) if self.mu else None
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta, pull=pull)), memory
