"""Saves memory: backward computes cheap results again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def keeping_inputs(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `compute(*inputs)`, and keep only the inputs for backward. Backward calls `compute` again first."""
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
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            result = ctx.compute(*inputs)
        gradients = iter(torch.autograd.grad(result, [tensor for tensor in inputs if tensor.requires_grad], gradient))
        return None, *(next(gradients) if needs else None for needs in needed)
