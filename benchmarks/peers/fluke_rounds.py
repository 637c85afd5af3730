# ruff: noqa: E402
"""The same rounds in fluke: its own clients, server and loop; the loop's events give the pulse."""

import os
import sys

import torch

# A torchvision built for another torch has no operators, which fluke never calls, but it stops at their registration.
VISION = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    VISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from torch import nn
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples, torch_model


class Paced(CentralizedFL):
    """FedAvg that waits before each round."""

    pulse: Pulse

    def notify(self, event: str, **facts: object) -> None:
        if event == "end_round":
            self.pulse.done()
        if event == "start_round" and not self.pulse.wait():
            os._exit(0)
        super().notify(event, **facts)


def main(name: str) -> None:
    pulse, workload = Pulse(), WORKLOADS[name]
    inputs, labels = (torch.from_numpy(a) for a in examples(workload))
    settings = FlukeENV()
    settings.set_seed(0)
    settings.set_device("cpu")
    settings.set_inmemory(True)
    settings.set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)

    def loader(client: int) -> FastDataLoader:
        return FastDataLoader(
            inputs[client],
            labels[client],
            num_labels=workload.n_classes,
            batch_size=workload.batch_size,
            shuffle=True,
            percentage=1.0,
        )

    clients = [
        Client(
            c,
            loader(c),
            None,
            OptimizerConfigurator({"name": torch.optim.SGD, "lr": LEARNING_RATE}),
            nn.CrossEntropyLoss(),
            local_epochs=1,
        )
        for c in range(workload.n_clients)
    ]
    server = Server(torch_model(name), None, clients)
    algorithm = Paced(workload.n_clients, None, {}, clients=clients, server=server)
    algorithm.pulse = pulse
    algorithm.run(10**6, workload.cohort / workload.n_clients)


main(sys.argv[1])
