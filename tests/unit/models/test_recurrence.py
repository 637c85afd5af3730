"""The LSTM layer with a backward pass of its own is the unrolled layer: values and derivatives of both orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from dqnfed.models import build
from dqnfed.models.recurrence import lstm_layer, unrolled

T, B, N_INPUTS, H, K = 7, 3, 4, 5, 6
SHAPES = ((T, B, N_INPUTS), (4 * H, N_INPUTS + H), (4 * H,))
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = 1e-13  # T x H sums of numbers of order 1 in float64


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in SHAPES)
    return x, 0.5 * weight, bias


def objective(layer: Layer) -> Callable[..., Tensor]:
    """Return a function in which every state of every character counts, each differently."""
    weights = torch.linspace(-1, 1, T * B * H, dtype=torch.float64).view(T, B, H)
    return lambda *inputs: (layer(*inputs) * weights).square().sum()


def test_the_states_are_those_of_the_unrolled_layer() -> None:
    torch.testing.assert_close(lstm_layer(*given()), unrolled(*given()), rtol=0, atol=TOLERANCE)


def test_so_are_the_gradients_of_inputs_and_weights() -> None:
    for ours, theirs in zip(
        grad(objective(lstm_layer), (0, 1, 2))(*given()), grad(objective(unrolled), (0, 1, 2))(*given()), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, None), (0, None, 0), (2, 1, 0)])
def test_so_are_those_of_many_clients_at_once(dims: tuple[int | None, ...]) -> None:
    """With weights, inputs or both of their own; whichever dimension the clients are in."""
    by_client = [torch.stack(rows) for rows in zip(*(given(seed) for seed in range(K)), strict=True)]
    inputs = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(by_client, dims, strict=True)]
    ours = vmap(grad(objective(lstm_layer), (0, 1, 2)), in_dims=dims)(*inputs)
    theirs = vmap(grad(objective(unrolled), (0, 1, 2)), in_dims=dims)(*inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=TOLERANCE)


def reverse_over_reverse(slope: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    product: Tensor = grad(lambda w: (slope(w) * along).sum())(at)
    return product


def forward_over_reverse(slope: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    product: Tensor = jvp(slope, (at,), (along,))[1]
    return product


@pytest.mark.parametrize("product", [reverse_over_reverse, forward_over_reverse])
def test_curvature_products_are_those_of_the_unrolled_layer(product: Callable[..., Tensor]) -> None:
    x, weight, bias = given()
    weights = torch.stack([weight, weight.flip(0), -weight])
    along = torch.linspace(-1, 1, weight.numel(), dtype=torch.float64).view_as(weight)

    def products(layer: Layer) -> Tensor:
        slope = grad(lambda w: objective(layer)(x, w, bias))
        return vmap(lambda w: product(slope, w, along))(weights)

    torch.testing.assert_close(products(lstm_layer), products(unrolled), rtol=0, atol=10 * TOLERANCE)


def test_a_directional_derivative_is_that_of_the_unrolled_layer() -> None:
    inputs, tangents = given(0), given(1)
    ours, theirs = (jvp(objective(layer), inputs, tangents)[1] for layer in (lstm_layer, unrolled))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_training_and_evaluation_predict_the_same() -> None:
    """Training goes layer by layer, evaluation character by character."""
    settings = {"vocabulary": 11, "embedding": 3, "hidden": 6, "layers": 2}
    model = build("lstm", input_shape=(9,), n_outputs=11, settings=settings).double()
    text = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    trained = model(text)
    with torch.no_grad():
        torch.testing.assert_close(model(text), trained.detach(), rtol=0, atol=TOLERANCE)
