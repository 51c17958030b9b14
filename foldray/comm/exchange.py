"""Differentiable collectives. The gradient of each collective is the collective in the opposite direction.

| function | forward | gradient |
|---|---|---|
| `mirrored`, `mirrored_together` | any exchange | the exchange that brings it back |
| `gather_rows` | all-gather-v | reduce-scatter-v |
| `scatter_rows` | reduce-scatter-v | all-gather-v |
| `gather_sequence` | all-gather along the sequence | reduce-scatter |
| `scatter_sequence` | reduce-scatter along the sequence | all-gather |
| `sum_over_members` | all-reduce | all-reduce |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foldray.comm.communicator import Communicator

Exchanged = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Sends tensors, and returns those that arrive."""


def mirrored(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Send a tensor one way, and its gradient the other way."""
    (out,) = mirrored_together([x], lambda tensors: (there(*tensors),), lambda gradients: (back(*gradients),))
    return out


def mirrored_together(tensors: Sequence[Tensor], there: Exchanged, back: Exchanged) -> tuple[Tensor, ...]:
    """Send tensors one way, and their gradients the other way. Whole numbers have no gradients."""
    return _Mirrored.apply(there, back, *tensors)


def gather_rows(x_NH: Tensor, communicator: Communicator, rows: Sequence[int]) -> Tensor:
    """Gather the rows of all members; member i has `rows[i]` of them (all-gather-v): [rows[index], H] → [Σ rows, H]."""
    if communicator.size == 1:
        return x_NH
    return mirrored(x_NH, lambda x: _gather_v(x, communicator, rows), lambda grad: _scatter_v(grad, communicator, rows))


def scatter_rows(x_NH: Tensor, communicator: Communicator, rows: Sequence[int]) -> Tensor:
    """Return this member's `rows[index]` rows of the sum over members (reduce-scatter-v): [Σ rows, H] → [rows[index], H]."""
    if communicator.size == 1:
        return x_NH
    return mirrored(x_NH, lambda x: _scatter_v(x, communicator, rows), lambda grad: _gather_v(grad, communicator, rows))


def gather_sequence(x_BSH: Tensor, communicator: Communicator) -> Tensor:
    """Gather the members' pieces of a sequence, one after another: [B, S, H] → [B, size · S, H]."""
    if communicator.size == 1:
        return x_BSH
    return mirrored(x_BSH, lambda x: _gather_s(x, communicator), lambda grad: _scatter_s(grad, communicator))


def scatter_sequence(x_BSH: Tensor, communicator: Communicator) -> Tensor:
    """Sum a sequence over the members, and return this member's piece: [B, size · S, H] → [B, S, H]."""
    if communicator.size == 1:
        return x_BSH
    return mirrored(x_BSH, lambda x: _scatter_s(x, communicator), lambda grad: _gather_s(grad, communicator))


def sum_over_members(x: Tensor, communicator: Communicator) -> Tensor:
    """Sum a tensor over the members. Each member may use the sum for something else, so its gradient is a sum, too."""
    if communicator.size == 1:
        return x
    return mirrored(x, *[lambda part: communicator.all_reduce(part.clone(memory_format=torch.contiguous_format))] * 2)


class _Mirrored(torch.autograd.Function):
    """A collective, with another collective as its gradient."""

    @staticmethod
    def forward(ctx: Any, there: Exchanged, back: Exchanged, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.have_gradients = back, [x.is_floating_point() for x in tensors]
        return tuple(there(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        returned = iter(ctx.back([gradient for gradient, has in zip(gradients, ctx.have_gradients, strict=True) if has]))
        return None, None, *(next(returned) if has else None for has in ctx.have_gradients)


def _gather_v(x_NH: Tensor, communicator: Communicator, rows: Sequence[int]) -> Tensor:
    # gloo has no uneven all-gather. An all-to-all that sends the same rows to every member moves the same bytes.
    size = communicator.size
    return communicator.all_to_all(x_NH.repeat(size, 1), rows, [x_NH.shape[0]] * size)


def _scatter_v(x_NH: Tensor, communicator: Communicator, rows: Sequence[int]) -> Tensor:
    # The sum runs here, in a fixed order and in at least float32, so the result does not depend on a library's ring.
    size, count = communicator.size, rows[communicator.index]
    parts_RNH = communicator.all_to_all(x_NH, [count] * size, rows).view(size, count, *x_NH.shape[1:])
    return parts_RNH.sum(0, dtype=torch.promote_types(x_NH.dtype, torch.float32)).to(x_NH.dtype)


def _gather_s(x_BSH: Tensor, communicator: Communicator) -> Tensor:
    pieces_RBSH = communicator.all_gather(x_BSH).view(communicator.size, *x_BSH.shape)
    return pieces_RBSH.movedim(0, 1).flatten(1, 2)


def _scatter_s(x_BSH: Tensor, communicator: Communicator) -> Tensor:
    B, S, size = x_BSH.shape[0], x_BSH.shape[1], communicator.size
    pieces_RBSH = x_BSH.view(B, size, S // size, *x_BSH.shape[2:]).movedim(1, 0)
    return communicator.reduce_scatter(pieces_RBSH.reshape(size * B, S // size, *x_BSH.shape[2:]))
