"""Norms of the residual stream, and of queries and keys.

They compute in at least float32, and keep only their inputs for backward.

Legend: B sequences, S positions, N query heads and G key/value heads of this rank, D width of a head's queries and keys.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foldray.blueprint import AttentionSpec, ModelSpec
from foldray.comm import Communicator, sum_over_members
from foldray.kernels.lean import keeping_inputs
from foldray.kernels.wide import at_least_float32


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, model: ModelSpec):
        super().__init__()
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        if x.is_cuda:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return keeping_inputs(self._centred, x, self.weight, self.bias)

    def _centred(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias.to(dtype), self.eps).to(x.dtype)


class HeadNorms(nn.Module):
    """RMSNorm of queries and keys: of each head by itself, or of all heads of a token, which TP cuts."""

    def __init__(self, share: AttentionSpec, eps: float, tensor: Communicator):
        super().__init__()
        self.share, self.eps, self.tensor = share, eps, tensor
        widths = (share.key_dim, share.key_dim) if share.norm == "head" else (share.queries, share.keys)
        self.query, self.key = (nn.Parameter(torch.empty(width)) for width in widths)

    def forward(self, q_BSND: Tensor, k_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries [B, S, N, D] and keys [B, S, G, D]."""
        if self.share.norm == "head":
            return rms_norm(q_BSND, self.query, self.eps), rms_norm(k_BSGD, self.key, self.eps)
        wide = q_BSND.flatten(2), k_BSGD.flatten(2)
        if self.tensor.size == 1:
            q_BSW, k_BSW = (rms_norm(x, weight, self.eps) for x, weight in zip(wide, (self.query, self.key), strict=True))
        else:
            squares_BS2 = sum_over_members(keeping_inputs(_squares, *wide), self.tensor)
            q_BSW, k_BSW = (
                keeping_inputs(partial(_scaled, width=self.tensor.size * x.shape[-1], eps=self.eps), x, square, weight)
                for x, square, weight in zip(wide, squares_BS2.split(1, dim=-1), (self.query, self.key), strict=True)
            )
        return q_BSW.view_as(q_BSND), k_BSW.view_as(k_BSGD)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last axis, in at least float32. It keeps only its inputs for backward."""
    if x.is_cuda:  # one kernel, which computes in float32 and keeps only its input and a number per row
        return F.rms_norm(x, weight.shape, weight, eps)
    return keeping_inputs(partial(_normed, eps=eps), x, weight)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = at_least_float32(x)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


def _squares(q_BSW: Tensor, k_BSW: Tensor) -> Tensor:
    return torch.stack([x.to(at_least_float32(x)).square().sum(-1) for x in (q_BSW, k_BSW)], dim=-1)


def _scaled(x_BSW: Tensor, square_BS1: Tensor, weight_W: Tensor, width: int, eps: float) -> Tensor:
    """Return this rank's part of RMSNorm, from the sum of squares and the width of all ranks' parts."""
    dtype = square_BS1.dtype
    scale_BS1 = (square_BS1 / width + eps).rsqrt()
    return (x_BSW.to(dtype) * scale_BS1 * weight_W.to(dtype)).to(x_BSW.dtype)
