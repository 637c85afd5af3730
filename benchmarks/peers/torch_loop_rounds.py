"""FedAvg as anybody would write it in torch: a loop over clients, an optimiser each."""

import sys

import numpy as np
import torch
from torch import nn
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples, torch_model


def main(name: str) -> None:
    pulse, workload = Pulse(), WORKLOADS[name]
    inputs, labels = (torch.from_numpy(a) for a in examples(workload))
    model, loss = torch_model(name), nn.CrossEntropyLoss()

    def play(round: int) -> None:
        start = [p.detach().clone() for p in model.parameters()]
        total = [torch.zeros_like(p) for p in start]
        for client in np.random.default_rng(round).choice(workload.n_clients, workload.cohort, replace=False):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
            optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for rows in torch.randperm(workload.n_examples).split(workload.batch_size):
                optimiser.zero_grad()
                loss(model(inputs[client][rows]), labels[client][rows]).backward()
                optimiser.step()
            with torch.no_grad():
                for sum_, parameter in zip(total, model.parameters(), strict=True):
                    sum_ += parameter / workload.cohort
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), total, strict=True):
                parameter.copy_(value)

    pulse.serve(play)


main(sys.argv[1])
