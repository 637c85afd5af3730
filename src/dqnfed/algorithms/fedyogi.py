"""FedYogi: Yogi on the server, whose second moment falls slowly where updates become small."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dqnfed.algorithms.fedadam import FedAdam


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    r"""Adaptive federated optimisation with Yogi on the server (Reddi et al., ICLR 2021, Algorithm 2).

    Objective: the mean loss over all examples, as FedAvg.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: with the weighted mean update D, m = beta1 m + (1 - beta1) D, v = v - (1 - beta2) D^2 sign(v - D^2), and
    then :math:`\theta - \text{server\_lr} \cdot m / (\sqrt{v} + \tau)`, coordinate by coordinate. v moves towards D^2
    by a share of D^2, where FedAdam's moves by a share of the difference: it falls slowly where updates become small.

    State: server, theta and the two moments; m starts at 0 and v at tau^2.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none. As in the paper the moments are not corrected for their start. Every coordinate moves by about
    server_lr a round, so server_lr is to be tuned, not lr alone.

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan, Adaptive Federated Optimization, ICLR
    2021.
    """

    def next_second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1.0 - self.beta2) * square * (before - square).sign()
