"""One LSTM layer over a whole window, with a backward pass of its own that vectorises over clients.

Left to automatic differentiation, every character costs some forty small operations, and under vmap each of them keeps
its results. Here the input's share of the gates is one product for all characters, a step is one product and a few
operations in place, and the weights' gradient is one product at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

Gradients = tuple[Tensor, Tensor, Tensor]


def unrolled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer's states [T, B, H] for inputs [T, B, I], character by character: the definition.

    Weight [4H, I + H] and bias [4H] hold the gates in the order input, forget, cell, output (Hochreiter & Schmidhuber,
    1997).
    """
    state = cell = x.new_zeros(x.shape[1], len(bias) // 4)
    states = []
    for now in x.unbind(0):
        state, cell = lstm_cell(now, state, cell, weight, bias)
        states.append(state)
    return torch.stack(states)


def lstm_cell(x: Tensor, state: Tensor, cell: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state and the cell after one character."""
    i, f, g, o = (torch.cat([x, state], dim=-1) @ weight.mT + bias).chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def lstm_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what `unrolled` returns, for training: fast gradients, also for many clients at once."""
    return _Layer.apply(x, weight, bias)[0]  # type: ignore[no-any-return, no-untyped-call]


class _Layer(torch.autograd.Function):
    """The states, and for the backward pass the cells and the gates."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states, cells, gates = _forward(x[:, None], weight[None], bias[None])
        return states[:, 0], cells[:, 0], gates[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        states, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        ctx.save_for_backward(*inputs, states, cells, gates)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return _Backward.apply(slopes[0], *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return jvp(unrolled, ctx.saved_tensors, tangents)[1], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        K = info.batch_size
        x, weight, bias = (_rows(t, dim, K) for t, dim in zip(inputs, in_dims, strict=True))
        return _forward(x.transpose(0, 1), weight, bias), (1, 1, 1)


class _Backward(torch.autograd.Function):
    """The gradient of x, weight and bias, given that of the states; its own derivatives are those of `unrolled`."""

    @staticmethod
    def forward(*given: Tensor) -> Gradients:
        slope, x, weight, _, states, cells, gates = given
        over_time = [t[:, None] for t in (slope, x, states, cells, gates)]
        dx, dweight, dbias = _backward(weight[None], *over_time)
        return dx[:, 0], dweight[0], dbias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return *vjp(_slopes, *ctx.saved_tensors)[1](slopes), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return jvp(_slopes, ctx.saved_tensors, tangents[:4])[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> Any:
        K = info.batch_size
        slope, x, weight, _, states, cells, gates = (_rows(t, dim, K) for t, dim in zip(given, in_dims, strict=True))
        over_time = [t.transpose(0, 1) for t in (slope, x, states, cells, gates)]
        return _backward(weight, *over_time), (1, 0, 0)


def _slopes(slope: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Gradients:
    """Return the gradient by the definition."""
    found: Gradients = vjp(unrolled, x, weight, bias)[1](slope)
    return found


def _rows(t: Tensor, dim: int | None, K: int) -> Tensor:
    """Return the tensor with the clients first."""
    return t.expand(K, *t.shape) if dim is None else t.movedim(dim, 0)


def _forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, cells [T, K, B, H] and gates [T, K, B, 4H] for inputs [T, K, B, I] and weights [K, 4H, I + H]."""
    n_inputs = x.shape[-1]
    H = weight.shape[1] // 4
    recurrent = weight[:, :, n_inputs:].mT.contiguous()
    gates = x @ weight[:, :, :n_inputs].mT
    gates += bias[:, None]
    states, cells = gates.new_empty(*gates.shape[:-1], H), gates.new_empty(*gates.shape[:-1], H)
    for t, gate in enumerate(gates):
        if t:
            gate.baddbmm_(states[t - 1], recurrent)
        gate[..., : 2 * H].sigmoid_()
        gate[..., 2 * H : 3 * H].tanh_()
        gate[..., 3 * H :].sigmoid_()
        i, f, g, o = gate.chunk(4, dim=-1)
        torch.mul(i, g, out=cells[t])
        if t:
            cells[t].addcmul_(f, cells[t - 1])
        torch.tanh(cells[t], out=states[t])
        states[t].mul_(o)
    return states, cells, gates


def _backward(weight: Tensor, slope: Tensor, x: Tensor, states: Tensor, cells: Tensor, gates: Tensor) -> Gradients:
    """Return the gradients of x [T, K, B, I], weight [K, 4H, I + H] and bias [K, 4H]."""
    n_inputs = x.shape[-1]
    of_input, recurrent = weight[:, :, :n_inputs].contiguous(), weight[:, :, n_inputs:].contiguous()
    dx, d_input, d_recurrent = torch.empty_like(x), torch.zeros_like(of_input), torch.zeros_like(recurrent)
    d_bias = weight.new_zeros(weight.shape[:2])
    d_gate, d_state = torch.empty_like(gates[0]), slope[-1]
    d_i, d_f, d_g, d_o = d_gate.chunk(4, dim=-1)
    d_cell = torch.zeros_like(d_state)
    for t in range(len(gates) - 1, -1, -1):
        i, f, g, o = gates[t].chunk(4, dim=-1)
        tanh_cell = cells[t].tanh()
        torch.mul(d_state, tanh_cell, out=d_o).mul_(o).mul_(1 - o)
        d_cell.addcmul_(d_state * o, 1 - tanh_cell.square_())
        torch.mul(d_cell, g, out=d_i).mul_(i).mul_(1 - i)
        torch.mul(d_cell, i, out=d_g).mul_(1 - g.square())
        if t:
            torch.mul(d_cell, cells[t - 1], out=d_f).mul_(f).mul_(1 - f)
            d_cell.mul_(f)
            d_recurrent.baddbmm_(d_gate.mT, states[t - 1])
            d_state = torch.baddbmm(slope[t - 1], d_gate, recurrent)
        else:
            d_f.zero_()  # there was no cell to forget
        torch.bmm(d_gate, of_input, out=dx[t])
        d_input.baddbmm_(d_gate.mT, x[t])
        d_bias += d_gate.sum(1)
    return dx, torch.cat([d_input, d_recurrent], dim=-1), d_bias
