"""The same rounds in Flower's simulation, two Ray actors with a core each; the strategy gives the pulse."""

import os
import sys

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from workloads import LEARNING_RATE, WORKLOADS, Pulse, shared_examples, torch_model

NAME = sys.argv[1]
WORKLOAD = WORKLOADS[NAME]


class Client(NumPyClient):
    def __init__(self, client: int) -> None:
        torch.set_num_threads(1)
        self._client, self._model = client, torch_model(NAME)

    def fit(self, parameters: list[np.ndarray], config: object) -> tuple[list[np.ndarray], int, dict[str, object]]:
        with torch.no_grad():
            for place, value in zip(self._model.parameters(), parameters, strict=True):
                place.copy_(torch.from_numpy(value))
        inputs, labels = (torch.from_numpy(a[self._client]) for a in shared_examples(NAME))
        optimiser, loss = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
        for rows in torch.randperm(WORKLOAD.n_examples).split(WORKLOAD.batch_size):
            optimiser.zero_grad()
            loss(self._model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        return [p.detach().numpy() for p in self._model.parameters()], WORKLOAD.n_examples, {}


class Paced(FedAvg):
    def __init__(self, pulse: Pulse, **settings: object) -> None:
        super().__init__(**settings)
        self._pulse = pulse

    def configure_fit(self, *arguments: object, **named: object) -> object:
        if not self._pulse.wait():
            os._exit(0)
        return super().configure_fit(*arguments, **named)

    def aggregate_fit(self, *arguments: object, **named: object) -> object:
        found = super().aggregate_fit(*arguments, **named)
        self._pulse.done()
        return found


def client_fn(context: Context) -> object:
    return Client(int(context.node_config["partition-id"])).to_client()


def main() -> None:
    pulse = Pulse()
    start = ndarrays_to_parameters([p.detach().numpy() for p in torch_model(NAME).parameters()])

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = Paced(
            pulse,
            fraction_fit=WORKLOAD.cohort / WORKLOAD.n_clients,
            fraction_evaluate=0.0,
            min_available_clients=WORKLOAD.n_clients,
            initial_parameters=start,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=10**6))

    run_simulation(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=client_fn),
        num_supernodes=WORKLOAD.n_clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )


main()
