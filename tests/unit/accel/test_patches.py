"""Convolutions as products of matrices: the values and gradients of torch's own, for all clients at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dqnfed.accel import automatic, patches
from dqnfed.accel.kernels import FastKernels
from dqnfed.accel.patches import in_patches
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.runners import looped
from dqnfed.models import build
from dqnfed.sim.accelerate import graphed
from dqnfed.sim.engine import run
from dqnfed.sim.tasks import rounded_up
from tests.helpers.bowls import normal


def slopes(module: nn.Module, parameters: dict[str, Tensor], images: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Return every client's gradient of a smooth function of the outputs, at its own parameters."""

    def value(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, own, (x,))
        return (outputs.tanh() * y).sum()

    return dict(vmap(grad(value))(parameters, images, wanted))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kernel_size": 3}, {"kernel_size": 2}),
        ({"kernel_size": 5, "padding": 2}, {"kernel_size": 3, "padding": "same", "bias": False}),
        ({"kernel_size": 4, "padding": 1}, {"kernel_size": 1, "padding": "valid"}),
        ({"kernel_size": 3, "padding": 2}, {"kernel_size": 2, "padding": 1}),
    ],
)
def test_products_have_the_gradients_of_convolutions_for_every_client(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, **first), nn.Tanh(), nn.Conv2d(3, 4, **second)).double()
    products = in_patches(module)
    assert products is not None
    parameters = {name: normal(5, *part.shape, seed=i) for i, (name, part) in enumerate(module.named_parameters())}
    images = normal(5, 6, 2, 7, 6, seed=8)
    one = {name: part[0] for name, part in parameters.items()}
    expected: Tensor = functional_call(module, one, (images[0],))
    torch.testing.assert_close(functional_call(products, one, (images[0],)), expected, rtol=0, atol=1e-12)
    wanted = normal(5, *expected.shape, seed=9)
    torch.testing.assert_close(
        slopes(products, parameters, images, wanted), slopes(module, parameters, images, wanted), rtol=0, atol=1e-10
    )


def test_no_gradient_in_the_images_is_computed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = patches.patches

    def counted(images: Tensor, size: int, padding: int) -> Tensor:
        seen.append(images.shape[1])
        return original(images, size, padding)

    monkeypatch.setattr(patches, "patches", counted)
    products = in_patches(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 2)).double())
    assert products is not None
    parameters = {name: normal(2, *part.shape, seed=1) for name, part in products.named_parameters()}
    slopes(products, parameters, normal(2, 6, 1, 5, 5, seed=2), normal(2, 6, 4, 2, 2, seed=3))
    assert seen == [1, 3, 4]  # forwards, and the second layer's gradient in its images


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, stride=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, (3, 1)),
        nn.Conv2d(2, 2, 3, padding=(1, 0)),
        nn.Conv2d(2, 2, 3, padding=3),
        nn.Conv2d(2, 2, 2, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv1d(2, 2, 3),
        nn.Linear(2, 2),
    ],
    ids=str,
)
def test_other_layers_stay_as_they_are(layer: nn.Module) -> None:
    assert in_patches(nn.Sequential(nn.Identity(), layer)) is None


def images_bowl() -> tuple[Problem, Federation]:
    """Return a small network of two convolutions, and clients of different sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 3)
        ).double()
    sizes = (5, 9, 7, 12, 6)
    clients = [(normal(n, 1, 6, 6, seed=k), torch.arange(n) % 3) for k, n in enumerate(sizes)]
    return Problem.from_module(module, ridge=0.01), Federation.from_clients(clients)


def test_a_run_with_products_in_graphs_is_the_plain_run() -> None:
    problem, federation = images_bowl()
    fast = replace(problem, kernels=FastKernels(emulate_graphs=True))
    model = fast.kernels.model(fast)  # type: ignore[attr-defined]
    assert model.for_vmap(fast).predict is model.in_patches
    settings: dict[str, Any] = {"rounds": 4, "participation": 0.6, "seed": 2}
    method = FedAvg(lr=0.2, epochs=2, batch_size=4, momentum=0.5)
    plain = run(method, problem, federation, cohort=looped(), accelerate=False, **settings)
    found = run(method, fast, federation, cohort=graphed(emulate=True), accelerate=None, **settings)
    assert not torch.equal(found.theta, problem.theta0)
    torch.testing.assert_close(found.theta, plain.theta, rtol=0, atol=1e-10)


def test_small_images_are_computed_together_and_large_ones_apart() -> None:
    def apart(shape: tuple[int, int, int], **settings: Any) -> bool:
        module = build("cnn", input_shape=shape, n_outputs=10, settings={})
        federation = Federation.from_clients([(torch.randn(4, *shape), torch.arange(4)) for _ in range(2)])
        return automatic.on_streams(FedAvg(**settings), Problem.from_module(module), federation)

    assert not apart((1, 28, 28), batch_size=32)
    assert apart((1, 28, 28), batch_size=None)  # a full gradient takes the memory of all examples
    assert apart((3, 96, 96), batch_size=64)


def test_extents_are_few_and_hardly_larger() -> None:
    extents = [rounded_up(n) for n in range(1, 1025)]
    assert extents[:8] == list(range(1, 9))
    assert all(n <= found < 1.25 * n for n, found in enumerate(extents, 1))
    assert len({n for n in extents if n > 512}) == 4
