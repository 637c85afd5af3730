"""GroupNorm for images in half precision, with as few passes over memory as separate kernels allow.

torch's own GroupNorm wants channels first and, under autocast, float32: around every convolution in bfloat16 the images
are then turned and widened, and back. This one takes them with channels last, in the precision in which they come; sums
are in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ImageGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, by a shorter way for images in half precision outside torch.func's transforms."""

    def forward(self, x: Tensor) -> Tensor:
        is_half_image = x.dtype in (torch.bfloat16, torch.float16) and x.dim() == 4
        if is_half_image and torch.compiler.is_compiling():  # which writes kernels of its own
            return super().forward(x).to(x.dtype)
        if is_half_image and self.affine and torch._C._functorch.peek_interpreter_stack() is None:
            return image_group_norm(x, self.weight, self.bias, self.num_groups, self.eps)
        return super().forward(x)


def image_group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Return what `nn.functional.group_norm` does for images [N, channels, height, width], with channels last."""
    normed: Tensor = _LastGroupNorm.apply(x, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return normed


class _LastGroupNorm(torch.autograd.Function):
    """y = x a + b with a, b per image and channel; its backward pass has the same form in x and the slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        n, channels, height, width = x.shape
        grouped = x.permute(0, 2, 3, 1).reshape(n, height * width, groups, channels // groups)
        count = grouped.shape[1] * grouped.shape[3]
        mean = grouped.sum((1, 3), dtype=torch.float32) / count
        square = torch.linalg.vector_norm(grouped, dim=(1, 3), dtype=torch.float32).square() / count
        spread = (square - mean.square()).clamp(min=0.0).add(eps).rsqrt()
        a = _per_channel(spread, channels) * weight.float()
        b = bias.float() - _per_channel(mean, channels) * a
        y = torch.empty_like(x)
        torch.addcmul(b[:, :, None, None], x, a[:, :, None, None], out=y)
        ctx.save_for_backward(x, weight, mean, spread, a)
        ctx.groups, ctx.count = groups, count
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, spread, a = ctx.saved_tensors
        n, channels = x.shape[:2]
        slope = slopes[0].to(x.dtype).contiguous(memory_format=torch.channels_last)
        total = slope.sum((2, 3), dtype=torch.float32)
        along = (slope * x).sum((2, 3), dtype=torch.float32)
        centred = (along - _per_channel(mean, channels) * total) * _per_channel(spread, channels)
        weight_slope, bias_slope = centred.sum(0), total.sum(0)

        def per_group(values: Tensor) -> Tensor:
            summed: Tensor = (values * weight.float()).view(n, ctx.groups, -1).sum(2)
            per: Tensor = summed / ctx.count
            return per

        on_x = -spread.square() * per_group(centred)
        constant = -spread * per_group(total) - on_x * mean
        found, x_slope = torch.empty_like(x), torch.empty_like(x)
        on_x, constant = (_per_channel(values, channels)[:, :, None, None] for values in (on_x, constant))
        torch.addcmul(constant, x, on_x, out=found)
        torch.addcmul(found, slope, a[:, :, None, None], out=x_slope)
        return x_slope, weight_slope.to(weight.dtype), bias_slope.to(weight.dtype), None, None


def _per_channel(values: Tensor, channels: int) -> Tensor:
    """Return per-group values [N, groups] for each channel, [N, channels]."""
    n, groups = values.shape
    return values[:, :, None].expand(n, groups, channels // groups).reshape(n, channels)
