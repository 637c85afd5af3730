"""Numbers of some clients, at a cost that goes with these clients and not with all."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


class Known(NamedTuple):
    """A number of each of S clients; NaN of all others."""

    clients: Tensor  # [S] ascending
    values: Tensor  # [S] float64

    @classmethod
    def none(cls) -> Self:
        """Return the numbers of nobody."""
        return cls(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64))

    def at(self, clients: Tensor) -> Tensor:
        """Return the numbers of these clients."""
        if not len(self.clients):
            return torch.full((len(clients),), torch.nan, dtype=torch.float64)
        places = torch.searchsorted(self.clients, clients).clamp(max=len(self.clients) - 1)
        return torch.where(self.clients[places] == clients, self.values[places], torch.nan)

    def put(self, clients: Tensor, values: Tensor) -> Self:
        """Return the numbers with new ones of these clients."""
        stay = torch.from_numpy(~np.isin(self.clients.numpy(), clients.numpy()))
        both = torch.cat([self.clients[stay], clients])
        order = both.argsort()
        return type(self)(both[order], torch.cat([self.values[stay], values.double()])[order])
