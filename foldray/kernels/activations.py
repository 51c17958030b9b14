"""The kernels of activations. Legend: N rows, W width of the first product (2F where gated, gate columns first), F inner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.activations import find_activation
from foldray.tables import imported


class Kernel(NamedTuple):
    """How an activation is computed.

    Args:
        plain: up_NW → h_NF, in ordinary autograd: the reference.
        forward: the same outside of autograd; may be quicker. Rows of zeros stay zero, which is what makes padding harmless.
        backward: (dh_NF, up_NW) → h_NF once more, and the gradient of up_NW; may overwrite dh_NF.
    """

    plain: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def kernel_of(name: str) -> Kernel:
    """The kernel of an activation, by the activation's name; of a plain function, autograd finds the backward."""
    found = imported("model.ffn", find_activation(name).kernel)
    return found if isinstance(found, Kernel) else Kernel(found, found, _by_autograd(found))


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
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return F.silu(gate_NF).mul_(value_NF)


def _gated_silu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    gate_NF, value_NF = up_NW.chunk(2, -1)
    dup_NW = torch.empty_like(up_NW)
    dgate_NF, dvalue_NF = dup_NW.chunk(2, -1)
    silu_NF = F.silu(gate_NF)
    torch.mul(dh_NF, silu_NF, out=dvalue_NF)
    torch.ops.aten.silu_backward.grad_input(dh_NF.mul_(value_NF), gate_NF, grad_input=dgate_NF)
    return silu_NF.mul_(value_NF), dup_NW


def _gelu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(up_NW), torch.ops.aten.gelu_backward(dh_NF, up_NW)


GATED_SILU = Kernel(_gated_silu, _gated_silu_forward, _gated_silu_backward)
GELU = Kernel(F.gelu, F.gelu, _gelu_backward)
