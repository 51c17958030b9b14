"""Computing again what is cheap, instead of keeping it for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def keeping_inputs(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`compute(*inputs)`, of which nothing but the inputs is kept; backward computes it again first."""
    return _KeepingInputs.apply(compute, *inputs)


class _KeepingInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [each.detach().requires_grad_(needs) for each, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            result = ctx.compute(*inputs)
        found = iter(torch.autograd.grad(result, [each for each in inputs if each.requires_grad], gradient))
        return None, *(next(found) if needs else None for needs in needed)
