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


class LSTMLayer(nn.Module):
    """One LSTM layer (Hochreiter & Schmidhuber, 1997) with a single bias a gate; gates in the order input, forget,
    cell, output.
    """

    def __init__(self, n_inputs: int, hidden: int) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.hidden = hidden
        self.from_input = nn.Parameter(torch.empty(4 * hidden, n_inputs).uniform_(-bound, bound))
        self.from_state = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        bias = torch.zeros(4 * hidden)
        bias[hidden : 2 * hidden] = 1.0  # remember at first, as the TensorFlow cell of the original experiments does
        self.bias = nn.Parameter(bias)

    def forward(self, sequence: Tensor) -> Tensor:
        driven = sequence @ self.from_input.mT + self.bias  # [N, T, 4 H], all times in one product
        state = cell = torch.zeros_like(driven[:, 0, : self.hidden])
        states = []
        for drive in driven.unbind(1):
            i, f, g, o = (drive + state @ self.from_state.mT).chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, dim=1)


class CharLSTM(nn.Module):
    """Embedding, LSTM layers, and a dense layer on the last state: predicts the character after a window of text."""

    def __init__(self, n_outputs: int, settings: LSTMSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.embedding)
        widths = [settings.embedding] + [settings.hidden] * settings.layers
        self.layers = nn.ModuleList(LSTMLayer(a, b) for a, b in pairwise(widths))
        self.output = nn.Linear(settings.hidden, n_outputs)

    def forward(self, characters: Tensor) -> Tensor:
        sequence = self.embedding(characters.long())
        for layer in self.layers:
            sequence = layer(sequence)
        logits: Tensor = self.output(sequence[:, -1])
        return logits


def lstm(input_shape: tuple[int, ...], n_outputs: int, settings: LSTMSettings) -> nn.Module:
    """Return the next-character model of LEAF and q-FFL: 817,872 parameters with two layers and 80 symbols."""
    if len(input_shape) != 1:
        raise ValueError(f"lstm needs windows of character codes [length], got inputs of shape {list(input_shape)}.")
    if settings.layers < 1:
        raise ValueError(f"lstm needs at least one layer, got {settings.layers}.")
    return CharLSTM(n_outputs, settings)
