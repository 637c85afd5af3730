"""Networks of dense layers by hand: the gradient without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.core.tensors import Layout

ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
# By an activation's name; in place where nobody else looks at what came before it, and fresh under torch.func.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "": lambda h: h,
}
FRESH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "": lambda h: h,
}
SILENT = (nn.Identity, nn.Dropout)  # layers that do nothing in evaluation mode
ROWS = 512  # of one client's examples at once on a processor: what layers make of more falls out of its caches


class Layer(NamedTuple):
    """A dense layer inside theta and the activation behind it."""

    weight: int  # where it begins in theta
    bias: int | None
    n_outputs: int
    n_inputs: int
    activation: str  # relu | tanh | sigmoid | "" for none


class Weights(NamedTuple):
    """One layer's parameters, or what belongs to them: views of one long vector."""

    matrix: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]


@dataclass(frozen=True)
class DenseChain:
    """Layers without parameters, then dense layers with activations between them, the last one without."""

    preparation: tuple[nn.Module, ...]
    layers: tuple[Layer, ...]

    def features(self, inputs: Tensor) -> Tensor | None:
        """Return what the first dense layer sees [N, d], or None if that is no matrix."""
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

    def forward(self, weights: Sequence[Weights], features: Tensor) -> list[Tensor]:
        """Return every layer's inputs and, last, the outputs."""
        seen = [features]
        for layer, (matrix, bias) in zip(self.layers, weights, strict=True):
            h = torch.mm(seen[-1], matrix.t()) if bias is None else torch.addmm(bias, seen[-1], matrix.t())
            seen.append(IN_PLACE[layer.activation](h))
        return seen

    def gradient(
        self, theta: Tensor, features: Tensor, slope: Callable[[Tensor, slice], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient in theta and the outputs, from some rows of the features at a time.

        `slope` gives the loss' derivative in the outputs of these rows.
        """
        weights, found = self.views(theta), torch.empty_like(theta)
        places, outputs = self.views(found), []
        for start in range(0, max(1, len(features)), ROWS):
            rows = slice(start, start + ROWS)
            seen = self.forward(weights, features[rows])
            outputs.append(seen[-1])
            delta = slope(seen[-1], rows)
            for k in reversed(range(len(weights))):
                matrix, bias = places[k]
                if start:
                    matrix.addmm_(delta.t(), seen[k])
                else:
                    torch.mm(delta.t(), seen[k], out=matrix)
                if bias is not None and start:
                    bias.add_(delta.sum(0))
                elif bias is not None:
                    torch.sum(delta, 0, out=bias)
                if k:
                    delta = pulled_back(self.layers[k - 1].activation, delta @ weights[k].matrix, seen[k])
        return found, outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def formula(
        self, theta: Tensor, features: Tensor, judged: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient and the loss, in operations that vectorise over clients and can be differentiated again.

        `judged` gives the loss' derivative [N, c] in the outputs, and the loss.
        """
        weights = self.views(theta)
        seen = self.seen(weights, features)
        delta, loss = judged(seen[-1])
        return self.joined(self.traced_back(weights, seen, delta)), loss

    def changes(self, weights: Sequence[Weights], features: Tensor, slope: Callable[[Tensor], Tensor]) -> list[Weights]:
        """Return the loss' derivative in every layer's parameters; nothing is done in place."""
        seen = self.seen(weights, features)
        return self.traced_back(weights, seen, slope(seen[-1]))

    def seen(self, weights: Sequence[Weights], features: Tensor) -> list[Tensor]:
        """Return what `forward` does, with nothing done in place."""
        seen = [features]
        for layer, (matrix, bias) in zip(self.layers, weights, strict=True):
            h = seen[-1] @ matrix.t()
            seen.append(FRESH[layer.activation](h if bias is None else h + bias))
        return seen

    def traced_back(self, weights: Sequence[Weights], seen: Sequence[Tensor], delta: Tensor) -> list[Weights]:
        """Return the derivative in every layer's parameters from that in the outputs."""
        found = []
        for k in reversed(range(len(weights))):
            found.append(Weights(delta.t() @ seen[k], None if weights[k].bias is None else delta.sum(0)))
            if k:
                delta = pulled_back(self.layers[k - 1].activation, delta @ weights[k].matrix, seen[k])
        return found[::-1]

    def joined(self, weights: Sequence[Weights]) -> Tensor:
        """Return the vector that the layers' parts make up."""
        placed = {at.weight: part.matrix.reshape(-1) for at, part in zip(self.layers, weights, strict=True)}
        for at, part in zip(self.layers, weights, strict=True):
            if at.bias is not None and part.bias is not None:
                placed[at.bias] = part.bias
        return torch.cat([placed[start] for start in sorted(placed)])


def dense_chain(module: nn.Module, layout: Layout) -> DenseChain | None:
    """Return the module as a chain of dense layers, or None if it is something else."""
    starts, position = {}, 0
    for name, shape in layout:
        starts[name] = position
        position += shape.numel()
    preparation: list[nn.Module] = []
    layers: list[Layer] = []
    for path, part in _parts(module):
        if _is_hooked(part):
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
        elif type(part) not in SILENT:
            return None
    if not layers or layers[-1].activation:
        return None
    used = sum(at.n_outputs * (at.n_inputs + (at.bias is not None)) for at in layers)
    return DenseChain(tuple(preparation), tuple(layers)) if used == position else None


def pulled_back(name: str, delta: Tensor, activated: Tensor) -> Tensor:
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


def pull_back(name: str, delta: Tensor, activated: Tensor) -> None:
    """Do as `pulled_back` does, in place."""
    match name:
        case "relu":
            torch.ops.aten.threshold_backward.grad_input(delta, activated, 0, grad_input=delta)
        case "tanh":
            torch.ops.aten.tanh_backward.grad_input(delta, activated, grad_input=delta)
        case "sigmoid":
            torch.ops.aten.sigmoid_backward.grad_input(delta, activated, grad_input=delta)


def _parts(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a chain of `nn.Sequential` calls, in order, each with the prefix of its parameters."""
    if type(module) is not nn.Sequential or _is_hooked(module):
        return [(path, module)]
    return [found for name, child in module.named_children() for found in _parts(child, f"{path}{name}.")]


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
