"""FedBN and models with BatchNorm: torch's own layers as the oracle, and layers that never leave their clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dqnfed import Federation, run
from dqnfed.algorithms import REFERENCES, REGISTRY
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedbn import FedBN, FedBNUpdate
from dqnfed.core.norm_training import with_statistics
from dqnfed.core.problem import Problem
from dqnfed.experiments.pipeline import dense_layers
from dqnfed.models import build
from dqnfed.secure.noise import Privacy
from dqnfed.sim.setup import set_up
from tests.helpers.bowls import federation_of, labelled_clients, network_bowl, normal, normed_bowl, task_of
from tests.helpers.play import play


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return 1.0 + normal(n, 1, 8, 8, seed=seed), torch.arange(n) % 3


def example(name: str, n: int = 11) -> tuple[Problem, tuple[Tensor, Tensor]]:
    """Return a model of the registry with BatchNorm, with random weights, and a client."""
    shape, settings = ((1, 8, 8), {"channels": [2, 3], "hidden": 5}) if name == "cnn" else ((4,), {"hidden": [5, 3]})
    module = build(name, input_shape=shape, n_outputs=3, settings={**settings, "norm": "batch"}).double()
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * normal(*parameter.shape, seed=k))
    client = images(n) if name == "cnn" else labelled_clients(n - 7, 4)[-1]
    return Problem.from_module(module), client


def torch_steps(problem: Problem, theta: Tensor, client: tuple[Tensor, Tensor], batches: list[list[int]]) -> nn.Module:
    """Return torch's module after SGD on the batches, with the statistics of all examples as biased variances."""
    inputs, targets = client
    module = problem.module_at(theta).train()
    parameters = list(module.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:  # SGD by hand: torch.optim takes seconds to import
        slopes = torch.autograd.grad(cross_entropy(module(inputs[batch]), targets[batch]), parameters)
        with torch.no_grad():
            for parameter, velocity, slope in zip(parameters, velocities, slopes, strict=True):
                velocity.mul_(0.5).add_(slope + 0.01 * parameter)
                parameter.sub_(0.2 * velocity)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = 1.0  # the next pass alone counts
            layer.register_forward_hook(_biased)
    with torch.no_grad():
        module(inputs)
    return module.eval()


def _biased(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
    count = inputs[0].numel() / inputs[0].shape[1]
    layer.get_buffer("running_var").mul_((count - 1) / count)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("batches", [[list(range(11))] * 2, [[0, 5, 2, 9], [1, 3, 10], [4, 6]]], ids=["full", "mini"])
def test_local_training_is_that_of_torch(name: str, batches: list[list[int]]) -> None:
    problem, client = example(name)
    is_full = len(batches[0]) == 11
    rows = torch.full((len(batches), 0 if is_full else 4), -1, dtype=torch.long)
    for k, batch in enumerate(batches):
        if not is_full:
            rows[k, : len(batch)] = torch.tensor(batch)
    inputs, targets = (torch.cat([t, t[:3]]) for t in client)  # three rows of padding
    task = task_of((inputs, targets), problem, batches=rows, lr=0.2)
    task = task._replace(mask=torch.cat([torch.ones(11), torch.zeros(3)]).double())
    theta = FedBN(lr=0.2, momentum=0.5, weight_decay=0.01).local_sgd(problem, task, problem.theta0)
    oracle = torch_steps(problem, problem.theta0, client, batches)
    mine = problem.module_at(theta)
    for (key, found), wanted in zip(mine.state_dict().items(), oracle.state_dict().values(), strict=True):
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(problem.predict(theta, client[0]), oracle(client[0]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_with_the_statistics_of_all_examples_the_loss_is_the_one_that_is_trained(name: str) -> None:
    problem, client = example(name)
    theta = with_statistics(problem, problem.theta0, task_of(client, problem))
    module = problem.module_at(theta).train()
    wanted = cross_entropy(module(client[0]), client[1])
    torch.testing.assert_close(problem.loss(theta, task_of(client, problem)), wanted, rtol=1e-10, atol=1e-12)


def test_the_common_part_is_the_weighted_mean_and_no_batch_norm_is_sent() -> None:
    case = normed_bowl(3)
    assert case.problem.norms is not None
    n_shared, n = case.problem.norms.n_shared, case.problem.n_parameters
    assert [name for name, _ in case.problem.layout[-4:]] == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert n == n_shared + 4 * 3
    played = play(FedBN(lr=0.3), *case[:2], rounds=1)
    clients = labelled_clients(3, 4)
    alone = [play(FedBN(lr=0.3), case.problem, federation_of([c]), rounds=1) for c in clients]
    sizes = torch.tensor([float(len(y)) for _, y in clients]).double()
    mean = (sizes / sizes.sum()) @ torch.stack([each.thetas[-1][:n_shared] for each in alone])
    torch.testing.assert_close(played.thetas[-1][:n_shared], mean, rtol=1e-12, atol=1e-13)
    assert torch.equal(played.thetas[-1][n_shared:], case.problem.theta0[n_shared:])
    for k, each in enumerate(alone):
        torch.testing.assert_close(played.memory(k).norms, each.memory(0).norms, rtol=1e-12, atol=1e-13)
    assert played.records[0]["bytes_up"] == played.records[0]["bytes_down"] == 3 * 8 * n_shared
    assert not torch.equal(played.memory(0).norms, played.memory(1).norms)


def test_equal_clients_train_as_one_of_them_alone() -> None:
    client, problem = labelled_clients(1, 4)[0], normed_bowl().problem
    played = play(FedBN(lr=0.3, epochs=2), problem, federation_of([client] * 3), rounds=4)
    alone: Any = REFERENCES["local-only"](lr=0.3, epochs=2)
    wanted = play(alone, problem, federation_of([client]), rounds=4).memory(0).personal
    (found,) = FedBN().models(played.servers[-1], played.memory(2)).values()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_with_one_batch_norm_for_all_it_is_fedavg_on_the_rest() -> None:
    """With a layer that changes nothing (statistics and affine of the identity, not trained) only the rest is left."""
    case = network_bowl()
    fedavg = play(FedAvg(lr=0.3), *case[:2], rounds=3).thetas[-1]

    class Still(FedBN):
        def client_step(self, problem: Problem, task: Any, sent: Any, memory: Any) -> Any:
            theta = torch.cat([sent.shared, problem.theta0[len(sent.shared) :]])
            slope = torch.func.grad(problem.loss)(theta, task)[: len(sent.shared)]
            return FedBNUpdate(task.lr * slope), memory

    module = normed_bowl().problem.module
    assert module is not None
    module[1].eps = 0.0  # type: ignore[index]
    played = play(Still(lr=0.3), Problem.from_module(module), case.federation, rounds=3)
    torch.testing.assert_close(played.thetas[-1][: len(fedavg)], fedavg, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"fedbn"}))
def test_other_methods_refuse_the_model_and_name_this_one(name: str) -> None:
    case = normed_bowl()
    with pytest.raises(ValueError, match=r"'1' of the model is a BatchNorm layer.*`fedbn`"):
        set_up(REGISTRY[name](), case.problem, case.federation, rounds=1)


def test_models_without_batch_norm_are_refused() -> None:
    case = network_bowl()
    with pytest.raises(ValueError, match=r"no BatchNorm layer.*FedAvg; use fedavg"):
        FedBN().prepare(case.problem, 6, 6)
    with pytest.raises(ValueError, match="nothing to share"):
        FedBN().prepare(Problem.from_module(nn.BatchNorm1d(3).double()), 6, 6)


def test_a_layer_that_is_used_twice_or_never_is_refused() -> None:
    norm, layer = nn.BatchNorm1d(3), nn.Linear(3, 3)
    federation = Federation.from_clients([(torch.randn(6, 3), torch.arange(6) % 3)] * 2)
    with pytest.raises(ValueError, match="used twice"):
        run(FedBN(), Problem.from_module(nn.Sequential(norm, layer, norm)), federation, rounds=1)

    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self[0](x)
            return found

    with pytest.raises(ValueError, match="not used in its forward pass"):
        run(FedBN(), Problem.from_module(Unused(layer, norm)), federation, rounds=1)


def test_what_needs_one_model_or_single_examples_is_refused() -> None:
    case = normed_bowl()
    result = run(FedBN(), case.problem, case.federation, rounds=1)
    with pytest.raises(ValueError, match="BatchNorm layers of its own, so there is no model for all"):
        result.model()
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, unit="record")
    with pytest.raises(ValueError, match=r"FedBN cannot be run with `privacy.unit` = 'record'"):
        run(FedBN(), case.problem, case.federation, rounds=1, privacy=privacy)


def test_the_description_of_an_export_lists_no_dense_chain() -> None:
    spec = {"name": "mlp", "settings": {"hidden": [5], "norm": "batch"}, "dtype": "float32"}
    problem, _ = example("mlp")
    assert dense_layers(spec, [name for name, _ in problem.layout]) == []
