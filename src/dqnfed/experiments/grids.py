"""The hyper-parameter grids of the paper's appendix, by method and field, for `dqnfed sweep`.

FedAvg, FedNL, FedNew and DQN-Fed have none there. The grid printed for "FedLF" is a grid of AFL's step for the mixture
weights (its related-work text describes AFL under that name); it is given to both, as the server's step for FedLF. The
values printed for "FedHEAL" are FedFa's: weights of accuracy and frequency, momentum of server and client.

FedAvgM and FedExP are not in that paper. FedAvgM's grid is that of Hsu et al. without 0, which is FedAvg; FedExP's runs
from the smallest to the largest eps in its authors' code. FedVARP, like FedAvg, has nothing to tune but its rates.
"""

from __future__ import annotations

PAPER_GRIDS: dict[str, dict[str, list[float]]] = {
    "qffl": {"q": [0.0, 0.001, 0.01, 0.1, 1.0, 2.0, 5.0, 10.0]},
    "term": {"t": [0.1, 0.5, 1.0, 2.0, 5.0]},
    "fedmgda-plus": {"eps": [0.01, 0.05, 0.1, 0.5, 1.0]},
    "ditto": {"lam": [0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0]},
    "fedlf": {"server_lr": [0.01, 0.05, 0.1, 0.5, 1.0]},
    "afl": {"lambda_lr": [0.01, 0.05, 0.1, 0.5, 1.0]},
    "fedavgm": {"beta": [0.7, 0.9, 0.97, 0.99, 0.997]},
    "fedexp": {"eps": [0.001, 0.00316, 0.01, 0.0316, 0.1]},
    "fedfa": {"beta": [0.5], "server_momentum": [0.5], "momentum": [0.9]},
}
