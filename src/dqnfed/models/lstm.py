"""Character LSTM written with plain tensor operations, so that it vectorises over clients (`nn.LSTM` does not)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LSTMSettings:
    vocabulary: int = 80  # number of symbols, see `dqnfed.data.alphabet`
    embedding: int = 8
    hidden: int = 256
    layers: int = 2  # 1 in Shakespeare setup 2


class LSTMCell(nn.Module):
    """One LSTM cell (Hochreiter & Schmidhuber, 1997), one bias a gate; gates in the order input, forget, cell,
    output.
    """

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight = nn.Parameter(torch.empty(4 * hidden, n_inputs + hidden).uniform_(-bound, bound))
        bias = torch.zeros(4 * hidden)
        bias[hidden : 2 * hidden] = 1.0  # remember at first, as the TensorFlow cell of the original experiments does
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor, state: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (torch.cat([x, state], dim=-1) @ self.weight.mT + self.bias).chunk(4, dim=-1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


class CharLSTM(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the last state: predicts the character after a window of text.

    All layers advance together through time, so that evaluation keeps one state a layer, not one a character.
    """

    def __init__(self, n_outputs: int, settings: LSTMSettings) -> None:
        super().__init__()
        self.hidden = settings.hidden
        self.embedding = nn.Embedding(settings.vocabulary, settings.embedding)
        widths = [settings.embedding] + [settings.hidden] * settings.layers
        self.layers = nn.ModuleList(LSTMCell(a, b) for a, b in pairwise(widths))
        self.output = nn.Linear(settings.hidden, n_outputs)

    def forward(self, characters: Tensor) -> Tensor:
        embedded = self.embedding(characters.long())
        start = embedded.new_zeros(len(characters), self.hidden)
        states = [(start, start) for _ in self.layers]
        for x in embedded.unbind(1):
            for k, layer in enumerate(self.layers):
                states[k] = layer(x, *states[k])
                x = states[k][0]
        logits: Tensor = self.output(states[-1][0])
        return logits


def lstm(input_shape: tuple[int, ...], n_outputs: int, settings: LSTMSettings) -> nn.Module:
    """Return the next-character model of LEAF and q-FFL: 817,872 parameters with two layers and 80 symbols."""
    if len(input_shape) != 1:
        raise ValueError(f"lstm needs windows of character codes [length], got inputs of shape {list(input_shape)}.")
    if settings.layers < 1:
        raise ValueError(f"lstm needs at least one layer, got {settings.layers}.")
    return CharLSTM(n_outputs, settings)
