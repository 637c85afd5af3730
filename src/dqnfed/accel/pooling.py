"""ReLU behind a max-pooling instead of before it: the same numbers to the bit, from a quarter of the work.

A maximum and a ReLU may change places, since both leave the order of numbers as it is. Gradients are the same too: a
pooling sends them to the first of the largest inputs, which are equal behind a ReLU at zero alone, where it stops them.
"""

from __future__ import annotations

import copy

from torch import nn

from dqnfed.accel.dense import has_hooks


def pooled_first(module: nn.Module) -> nn.Module:
    """Return a module of the same values whose ReLUs come after the max-poolings that follow them in a sequence.

    It is the module itself where there are none.
    """
    if not any(_places(chain) for chain in module.modules()):
        return module
    found = copy.deepcopy(module)
    for chain in found.modules():
        for k in _places(chain):
            assert isinstance(chain, nn.Sequential)
            chain[k], chain[k + 1] = chain[k + 1], chain[k]
    return found


def _places(chain: nn.Module) -> list[int]:
    """Return where a sequence has a ReLU that the next layer may change places with."""
    if type(chain) is not nn.Sequential or has_hooks(chain):
        return []
    parts = list(chain)
    return [k for k in range(len(parts) - 1) if _may_change_places(parts[k], parts[k + 1])]


def _may_change_places(relu: nn.Module, pool: nn.Module) -> bool:
    if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d or has_hooks(relu) or has_hooks(pool):
        return False
    return not pool.return_indices
