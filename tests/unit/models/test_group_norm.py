"""GroupNorm with channels last is GroupNorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dqnfed.models.group_norm import ImageGroupNorm, image_group_norm
from tests.helpers.bowls import normal


@pytest.mark.parametrize(("channels", "groups"), [(6, 3), (8, 8), (4, 1)])
def test_values_and_slopes_are_those_of_torch(channels: int, groups: int) -> None:
    x = (normal(3, channels, 5, 4, seed=1) + 0.5).float().requires_grad_()
    weight, bias = normal(2, channels, seed=2).float().requires_grad_().unbind()
    upstream = normal(3, channels, 5, 4, seed=3).float()
    mine = image_group_norm(x, weight, bias, groups, 1e-5)
    theirs = nn.functional.group_norm(x, groups, weight, bias, 1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    slopes = [torch.autograd.grad(y, (x, weight, bias), upstream) for y in (mine, theirs)]
    for found, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_half_precision_stays_half_and_is_right_to_its_digits() -> None:
    x = (normal(2, 8, 6, 6, seed=4) * 3.0 + 1.0).bfloat16()
    layer = ImageGroupNorm(4, 8)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), nn.functional.group_norm(x.float(), 4), rtol=1e-2, atol=1e-2)


def test_other_inputs_take_torchs_own_way() -> None:
    layer, x = ImageGroupNorm(2, 4).double(), normal(3, 4, 7, seed=5)
    assert torch.equal(layer(x), nn.functional.group_norm(x, 2, layer.weight, layer.bias))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_is_the_layer(dtype: torch.dtype) -> None:
    layer, x = ImageGroupNorm(2, 4), normal(3, 4, 5, 5, seed=6).to(dtype)
    found = torch.compile(layer, fullgraph=True)(x)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), nn.functional.group_norm(x.float(), 2), rtol=tolerance, atol=tolerance)
