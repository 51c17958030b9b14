"""Gradients of weights that are computed later than those of inputs.

A product y = x @ W has two gradients. The op before waits for that of x. Nothing in a step waits for that of W before the sum
over ranks, so a schedule may compute it whenever a rank would be idle (ZB-H1 in Zero Bubble Pipeline Parallelism,
arXiv:2401.10241; Lancet, arXiv:2404.19429, puts it under all-to-alls).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Add = Callable[[Tensor], None]
"""Computes the gradient of a weight and adds it to a sum: a contiguous tensor of the weight's shape, at least float32."""

Leave = Callable[..., None]
"""Leaves the gradients of some weights for later. It takes an `Add` for each of them."""


class Task(NamedTuple):
    """The gradient of a weight, not computed yet. The task keeps what it is computed from in memory."""

    weight: nn.Parameter
    add: Add


class Later:
    """Says whether the products of a model leave gradients of weights for later. All modules of a model share one."""

    def __init__(self) -> None:
        self._tasks: list[Task] | None = None

    @contextmanager
    def collect(self, some: bool = True) -> Iterator[list[Task]]:
        """Have the products in this context leave the gradients of their weights, if `some` are to be left.

        Their backward appends them to the list.
        """
        left: list[Task] = []
        before, self._tasks = self._tasks, left if some else None
        try:
            yield left
        finally:
            self._tasks = before

    def leaver(self, *weights: nn.Parameter) -> Leave | None:
        """Return what leaves the gradients of these weights for later; None outside of `collect`."""
        if (tasks := self._tasks) is None:
            return None
        return lambda *adds: tasks.extend(map(Task, weights, map(torch.no_grad(), adds)))


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add a @ b to a sum. On a GPU the product itself adds, and rounds nothing to the type of a and b."""
    if a_MK.is_cuda and a_MK.dtype != sum_MN.dtype:
        torch.ops.aten.addmm.dtype_out(sum_MN, a_MK, b_KN, sum_MN.dtype, out=sum_MN)
    else:
        sum_MN += a_MK @ b_KN


def product(x: Tensor, weight: nn.Parameter, later: Later, transposed: bool = False) -> Tensor:
    """Return x @ weight, or x @ weight.T if `transposed`: [..., in] → [..., out]."""
    leave = later.leaver(weight)
    if leave is None:
        return x @ (weight.t() if transposed else weight)
    return _Product.apply(x, weight, leave, transposed)


class _Product(torch.autograd.Function):
    """A product whose backward leaves the gradient of the weight for later. Both gradients have the bits of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, leave: Leave, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leave, ctx.transposed = leave, transposed
        return x @ (weight.t() if transposed else weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (x, weight), transposed = ctx.saved_tensors, ctx.transposed
        x = x.detach()  # with its history, it would keep the whole graph of the op

        def add(total: Tensor) -> None:
            x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
            add_product(total, *((dy_TO.t(), x_TI) if transposed else (x_TI.t(), dy_TO)))

        ctx.leave(add)
        return dy @ (weight if transposed else weight.t()), None, None, None
