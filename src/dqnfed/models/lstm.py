"""Character LSTM written with plain tensor operations, so that it vectorises over clients (`nn.LSTM` does not)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from dqnfed.models.recurrence import lstm_cell, lstm_layer


@dataclass(frozen=True)
class LSTMSettings:
    vocabulary: int = 80  # number of symbols, see `dqnfed.data.alphabet`
    embedding: int = 8
    hidden: int = 256
    layers: int = 2  # 1 in Shakespeare setup 2


class LSTMWeights(nn.Module):
    """The parameters of one LSTM layer, one bias a gate; gates in the order input, forget, cell, output."""

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight = nn.Parameter(torch.empty(4 * hidden, n_inputs + hidden).uniform_(-bound, bound))
        bias = torch.zeros(4 * hidden)
        bias[hidden : 2 * hidden] = 1.0  # remember at first, as the TensorFlow cell of the original experiments does
        self.bias = nn.Parameter(bias)


class CharLSTM(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the last state: predicts the character after a window of text."""

    def __init__(self, n_outputs: int, settings: LSTMSettings) -> None:
        super().__init__()
        self.hidden = settings.hidden
        self.embedding = nn.Embedding(settings.vocabulary, settings.embedding)
        widths = [settings.embedding] + [settings.hidden] * settings.layers
        self.layers = nn.ModuleList(LSTMWeights(a, b) for a, b in pairwise(widths))
        self.output = nn.Linear(settings.hidden, n_outputs)

    def forward(self, characters: Tensor) -> Tensor:
        embedded = self.embedding(characters.long()).movedim(-2, 0)  # time first
        last = self._layer_by_layer(embedded) if torch.is_grad_enabled() else self._step_by_step(embedded)
        logits: Tensor = self.output(last)
        return logits

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        for layer in self._weights():
            x = lstm_layer(x, layer.weight, layer.bias)
        return x[-1]

    def _step_by_step(self, embedded: Tensor) -> Tensor:
        """All layers advance together through time, so that evaluation keeps one state a layer, not one a character."""
        start = embedded.new_zeros(embedded.shape[1], self.hidden)
        states = [(start, start) for _ in self.layers]
        for x in embedded.unbind(0):
            for k, layer in enumerate(self._weights()):
                states[k] = lstm_cell(x, *states[k], layer.weight, layer.bias)
                x = states[k][0]
        return states[-1][0]

    def _weights(self) -> Iterator[LSTMWeights]:
        return (layer for layer in self.layers if isinstance(layer, LSTMWeights))


def lstm(input_shape: tuple[int, ...], n_outputs: int, settings: LSTMSettings) -> nn.Module:
    """Return the next-character model of LEAF and q-FFL: 817,872 parameters with two layers and 80 symbols."""
    if len(input_shape) != 1:
        raise ValueError(f"lstm needs windows of character codes [length], got inputs of shape {list(input_shape)}.")
    if settings.layers < 1:
        raise ValueError(f"lstm needs at least one layer, got {settings.layers}.")
    return CharLSTM(n_outputs, settings)
