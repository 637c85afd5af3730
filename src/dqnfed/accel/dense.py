"""Networks of dense layers: the gradient as a formula, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.accel.onednn import linear
from dqnfed.core.tensors import Layout

LossSlope = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs [N, c] -> the loss' derivative [N, c], the loss []
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
# By an activation's name: in place where nothing else reads its input, out of place under torch.func.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "": lambda h: h,
}
OUT_OF_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "": lambda h: h,
}
NO_OPS = (nn.Identity, nn.Dropout)  # layers that do nothing in evaluation mode
ROWS = 512  # of one client's examples at once on a CPU: the activations of more do not fit in its caches


class Layer(NamedTuple):
    """A dense layer inside theta and the activation behind it."""

    weight: int  # where it begins in theta
    bias: int | None
    n_outputs: int
    n_inputs: int
    activation: str  # relu | tanh | sigmoid | "" for none


class Weights(NamedTuple):
    """One layer's parameters, or a tensor for each of them: views of one long vector."""

    matrix: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]


@dataclass(frozen=True)
class DenseChain:
    """Layers without parameters, then dense layers with activations between them, the last one without."""

    preparation: tuple[nn.Module, ...]
    layers: tuple[Layer, ...]

    def features(self, inputs: Tensor) -> Tensor | None:
        """Return the inputs of the first dense layer [N, d], or None if they are no matrix."""
        for module in self.preparation:
            inputs = module(inputs)
        fits = inputs.dim() == 2 and inputs.shape[1] == self.layers[0].n_inputs
        return inputs if fits else None

    def views(self, vector: Tensor) -> list[Weights]:
        """Return the layers' parts of a vector that is as long as theta."""
        return [
            Weights(
                vector[at.weight : at.weight + at.n_outputs * at.n_inputs].view(at.n_outputs, at.n_inputs),
                None if at.bias is None else vector[at.bias : at.bias + at.n_outputs],
            )
            for at in self.layers
        ]

    def gradient(
        self, theta: Tensor, features: Tensor, slope: Callable[[Tensor, slice], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient in theta and the outputs, computed from some rows of the features at a time.

        `slope` gives the loss' derivative in the outputs of these rows.
        """
        weights, found = self.views(theta), torch.empty_like(theta)
        places, outputs = self.views(found), []
        for start in range(0, max(1, len(features)), ROWS):
            rows = slice(start, start + ROWS)
            activations = self._forward_in_place(weights, features[rows])
            outputs.append(activations[-1])
            delta = slope(activations[-1], rows)
            for k in reversed(range(len(weights))):
                matrix, bias = places[k]
                if start:
                    matrix.addmm_(delta.t(), activations[k])
                else:
                    torch.mm(delta.t(), activations[k], out=matrix)
                if bias is not None and start:
                    bias.add_(delta.sum(0))
                elif bias is not None:
                    torch.sum(delta, 0, out=bias)
                if k:
                    delta = activation_slope(self.layers[k - 1].activation, delta @ weights[k].matrix, activations[k])
        return found, outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def outputs(self, theta: Tensor, features: Tensor) -> Tensor:
        """Return the outputs."""
        return self._forward_in_place(self.views(theta), features)[-1]

    def vmappable_gradient(self, theta: Tensor, features: Tensor, loss_slope: LossSlope) -> tuple[Tensor, Tensor]:
        """Return the gradient and the loss, in operations that vmap takes and that can be differentiated again."""
        weights = self.views(theta)
        activations = self.forward(weights, features)
        delta, loss = loss_slope(activations[-1])
        return self.joined(self._backward(weights, activations, delta)), loss

    def layer_gradients(
        self, weights: Sequence[Weights], features: Tensor, slope: Callable[[Tensor], Tensor]
    ) -> list[Weights]:
        """Return the loss' derivative in every layer's parameters; nothing is done in place."""
        activations = self.forward(weights, features)
        return self._backward(weights, activations, slope(activations[-1]))

    def forward(self, weights: Sequence[Weights], features: Tensor) -> list[Tensor]:
        """Return every layer's inputs and, last, the outputs; nothing is done in place."""
        activations = [features]
        for layer, (matrix, bias) in zip(self.layers, weights, strict=True):
            h = activations[-1] @ matrix.t()
            activations.append(OUT_OF_PLACE[layer.activation](h if bias is None else h + bias))
        return activations

    def joined(self, weights: Sequence[Weights]) -> Tensor:
        """Return the vector that the layers' parts make up."""
        placed = {at.weight: part.matrix.reshape(-1) for at, part in zip(self.layers, weights, strict=True)}
        for at, part in zip(self.layers, weights, strict=True):
            if at.bias is not None and part.bias is not None:
                placed[at.bias] = part.bias
        return torch.cat([placed[start] for start in sorted(placed)])

    def _forward_in_place(self, weights: Sequence[Weights], features: Tensor) -> list[Tensor]:
        activations = [features]
        for layer, (matrix, bias) in zip(self.layers, weights, strict=True):
            activations.append(IN_PLACE[layer.activation](linear(activations[-1], matrix, bias)))
        return activations

    def _backward(self, weights: Sequence[Weights], activations: Sequence[Tensor], delta: Tensor) -> list[Weights]:
        """Return the derivative in every layer's parameters from that in the outputs."""
        found = []
        for k in reversed(range(len(weights))):
            found.append(Weights(delta.t() @ activations[k], None if weights[k].bias is None else delta.sum(0)))
            if k:
                delta = activation_slope(self.layers[k - 1].activation, delta @ weights[k].matrix, activations[k])
        return found[::-1]


def dense_chain(module: nn.Module, layout: Layout) -> DenseChain | None:
    """Return the module as a chain of dense layers, or None if it is something else."""
    starts, position = {}, 0
    for name, shape in layout:
        starts[name] = position
        position += shape.numel()
    preparation: list[nn.Module] = []
    layers: list[Layer] = []
    for path, part in _parts(module):
        if has_hooks(part):
            return None
        if type(part) is nn.Linear:
            if f"{path}weight" not in starts or (part.bias is not None and f"{path}bias" not in starts):
                return None  # shared with another layer
            bias = None if part.bias is None else starts[f"{path}bias"]
            layers.append(Layer(starts[f"{path}weight"], bias, part.out_features, part.in_features, ""))
        elif any(True for _ in part.parameters()):
            return None
        elif not layers:
            preparation.append(part)
        elif type(part) in ACTIVATIONS and not layers[-1].activation:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(part)])
        elif type(part) not in NO_OPS:
            return None
    if not layers or layers[-1].activation:
        return None
    used = sum(at.n_outputs * (at.n_inputs + (at.bias is not None)) for at in layers)
    return DenseChain(tuple(preparation), tuple(layers)) if used == position else None


def activation_slope(name: str, delta: Tensor, activated: Tensor) -> Tensor:
    """Return the derivative before an activation from that behind it and the activation's value."""
    match name:
        case "relu":
            found: Tensor = torch.ops.aten.threshold_backward.default(delta, activated, 0)
        case "tanh":
            found = torch.ops.aten.tanh_backward.default(delta, activated)
        case "sigmoid":
            found = torch.ops.aten.sigmoid_backward.default(delta, activated)
        case _:
            return delta
    return found


def activation_slope_(name: str, delta: Tensor, activated: Tensor) -> None:
    """Do as `activation_slope` does, in place."""
    match name:
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(delta, activated, 0, grad_input=delta)
        case "tanh":
            torch.ops.aten.tanh_backward.grad_input(delta, activated, grad_input=delta)
        case "sigmoid":
            torch.ops.aten.sigmoid_backward.grad_input(delta, activated, grad_input=delta)


def _parts(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a chain of `nn.Sequential` calls, in order, each with the prefix of its parameters."""
    if type(module) is not nn.Sequential or has_hooks(module):
        return [(path, module)]
    return [found for name, child in module.named_children() for found in _parts(child, f"{path}{name}.")]


def has_hooks(module: nn.Module) -> bool:
    """Return whether somebody watches or changes what the module computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
