"""Norms and dense feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from foldray.moe.experts import reference_ffn
from foldray.spec import ModelSpec


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, computed in at least float32."""

    def __init__(self, model: ModelSpec, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if model.norm == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        shape, weight = self.weight.shape, self.weight.to(dtype)
        if self.bias is None:
            return F.rms_norm(x.to(dtype), shape, weight, self.eps).to(x.dtype)
        return F.layer_norm(x.to(dtype), shape, weight, self.bias.to(dtype), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """A dense feed-forward layer of any inner width: [..., H] → [..., H]."""

    def __init__(self, model: ModelSpec, inner: int, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.ffn = model.ffn
        width = 2 * inner if model.ffn == "gated_silu" else inner
        self.up = nn.Parameter(torch.empty(model.hidden, width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(inner, model.hidden, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reference_ffn(x, self.up, self.down, self.ffn)
