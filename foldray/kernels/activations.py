"""The kernels of activations.

Legend: N rows, W width of the first product (2F with a gate, gate columns first), F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.activations import find_activation
from foldray.kernels import fused
from foldray.tables import imported


class Kernel(NamedTuple):
    """The functions that compute an activation.

    Args:
        plain: up_NW → h_NF in ordinary autograd. This is the reference.
        forward: the same without autograd; it may be faster. It must keep rows of zeros at zero, because padding adds such
            rows.
        backward: (dh_NF, up_NW) → h_NF again, and the gradient of up_NW. It may overwrite dh_NF.
    """

    plain: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def kernel_of(name: str) -> Kernel:
    """Return the kernel of an activation. If the activation is a plain function, autograd computes its backward."""
    kernel = imported("model.ffn", find_activation(name).kernel)
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel, kernel, _by_autograd(kernel))


def _by_autograd(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            up_NW = up_NW.detach().requires_grad_()
            h_NF = plain(up_NW)
        (dup_NW,) = torch.autograd.grad(h_NF, up_NW, dh_NF)
        return h_NF.detach(), dup_NW

    return backward


def _gated_silu(up_NW: Tensor) -> Tensor:
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return F.silu(gate_NF) * value_NF


def _gated_silu_forward(up_NW: Tensor) -> Tensor:
    if fused.fits(up_NW):
        return fused.gated_silu(up_NW)
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return F.silu(gate_NF).mul_(value_NF)


def _gated_silu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    if fused.fits(dh_NF, up_NW):
        return fused.gated_silu_backward(dh_NF, up_NW)
    gate_NF, value_NF = up_NW.chunk(2, -1)
    dup_NW = torch.empty_like(up_NW)
    dgate_NF, dvalue_NF = dup_NW.chunk(2, -1)
    silu_NF = F.silu(gate_NF)
    torch.mul(dh_NF, silu_NF, out=dvalue_NF)
    torch.ops.aten.silu_backward.grad_input(dh_NF.mul_(value_NF), gate_NF, grad_input=dgate_NF)
    return silu_NF.mul_(value_NF), dup_NW


_SLOPE, _LIMIT = 1.702, 7.0  # of GPT-OSS's activation


def _gated_clamped(up_NW: Tensor) -> Tensor:
    gate_NF, value_NF = up_NW.chunk(2, -1)
    gate_NF, value_NF = gate_NF.clamp(max=_LIMIT), value_NF.clamp(-_LIMIT, _LIMIT)
    return gate_NF * torch.sigmoid(_SLOPE * gate_NF) * (value_NF + 1)


def _gated_clamped_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    gate_NF, value_NF = up_NW.chunk(2, -1)
    dup_NW = torch.empty_like(up_NW)
    dgate_NF, dvalue_NF = dup_NW.chunk(2, -1)
    slope_NF = torch.clamp(gate_NF, max=_LIMIT, out=dgate_NF)  # the place of the result is free until then
    more_NF = (_SLOPE * slope_NF).sigmoid_()
    h_NF = slope_NF * more_NF
    torch.mul(dh_NF, h_NF, out=dvalue_NF).masked_fill_(value_NF > _LIMIT, 0).masked_fill_(value_NF < -_LIMIT, 0)
    torch.mul(h_NF, more_NF, out=slope_NF).neg_().add_(h_NF).mul_(_SLOPE).add_(more_NF)  # of gate · sigmoid
    torch.clamp(value_NF, -_LIMIT, _LIMIT, out=more_NF).add_(1)
    dgate_NF.mul_(dh_NF.mul_(more_NF)).masked_fill_(gate_NF > _LIMIT, 0)
    return h_NF.mul_(more_NF), dup_NW


def _gelu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(up_NW), torch.ops.aten.gelu_backward(dh_NF, up_NW)


GATED_SILU = Kernel(_gated_silu, _gated_silu_forward, _gated_silu_backward)
GATED_CLAMPED = Kernel(_gated_clamped, _gated_clamped, _gated_clamped_backward)
GELU = Kernel(F.gelu, F.gelu, _gelu_backward)
