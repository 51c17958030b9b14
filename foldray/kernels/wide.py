"""The type of sums, and the product of a router: its inputs are narrow, and its results are not rounded to their type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels.lean import keeping_inputs


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def wide_product(x_TH: Tensor, weight_HE: Tensor) -> Tensor:
    """Return x @ weight in float32, or in the inputs' type if that is wider: [T, H] → [T, E]. Only the inputs are kept."""
    if x_TH.is_cuda and x_TH.dtype == weight_HE.dtype == torch.bfloat16:
        return _WideProduct.apply(x_TH, weight_HE)
    dtype = at_least_float32(x_TH)
    return keeping_inputs(lambda x_TH, weight_HE: x_TH.to(dtype) @ weight_HE.to(dtype), x_TH, weight_HE)


class _WideProduct(torch.autograd.Function):
    """The product of bfloat16 tensors with float32 sums.

    On a GPU this is 5 to 14 times as fast as a product of float32 tensors (H100, 8192 tokens). The products of two bfloat16
    numbers are exact in float32, so only the order of the sums differs. The gradient is split into two bfloat16 numbers,
    which together have 16 digits.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_HE: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_HE)
        return torch.mm(x_TH, weight_HE, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor]:
        x_TH, weight_HE = ctx.saved_tensors
        high_TE = gradient_TE.bfloat16()
        both_TE = torch.cat((high_TE, (gradient_TE - high_TE).bfloat16()), dim=1)
        dx_TH = both_TE @ torch.cat((weight_HE, weight_HE), dim=1).t()
        high_HE, low_HE = torch.mm(x_TH.t(), both_TE, out_dtype=torch.float32).chunk(2, dim=1)
        return dx_TH, (high_HE + low_HE).to(weight_HE.dtype)
