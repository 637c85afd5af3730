"""The same rounds in pfl (Apple's simulator), whose callbacks give the pulse."""

import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples, torch_model


class Model(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.criterion = network, nn.CrossEntropyLoss()

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.network(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
        return {}


class Paced(TrainingProcessCallback):
    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def on_train_begin(self, *, model: object) -> Metrics:
        self._pulse.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: object, model: object, *, central_iteration: int) -> object:
        self._pulse.done()
        return not self._pulse.wait(), Metrics()


def trained(pulse: Pulse, network: nn.Module, users: FederatedDataset, *, cohort: int, batch_size: int) -> None:
    """Play rounds of FedAvg as they are asked for."""
    model = Model(network)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**6,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=batch_size),
        NNEvalHyperParams(local_batch_size=batch_size),
        [Paced(pulse)],
    )


def main(name: str) -> None:
    pulse, workload = Pulse(), WORKLOADS[name]
    inputs, labels = (torch.from_numpy(a) for a in examples(workload))

    def user(client: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((inputs[client], labels[client]), user_id=str(client))

    users = FederatedDataset(user, get_user_sampler("random", list(range(workload.n_clients))))
    trained(pulse, torch_model(name), users, cohort=workload.cohort, batch_size=workload.batch_size)


if __name__ == "__main__":
    main(sys.argv[1])
