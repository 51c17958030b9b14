"""Causal self-attention with grouped key/value heads and rotary positions.

B sequences, S positions, H hidden, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from foldray.spec import ModelSpec


class Attention(nn.Module):
    """[B, S, H] → [B, S, H]; queries, keys and values come from one product, `qkv` [H, (N + 2G)·D]."""

    def __init__(self, model: ModelSpec, device: torch.device | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_dim
        self.theta = model.rope_theta if model.positions == "rope" else None
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        self.qkv = nn.Parameter(torch.empty(model.hidden, width, device=device, dtype=dtype))
        self.out = nn.Parameter(torch.empty(model.heads * model.head_dim, model.hidden, device=device, dtype=dtype))

    def forward(self, x_BSH: torch.Tensor, segment_BS: torch.Tensor | None = None) -> torch.Tensor:
        """With `segment_BS` (document numbers) a position sees its own document only."""
        B, S, _ = x_BSH.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q_BSND, k_BSGD, v_BSGD = (x_BSH @ self.qkv).view(B, S, -1, self.head_dim).split(heads, dim=2)
        if self.theta is not None:
            angle_SD = rotary_angles(torch.arange(S, device=x_BSH.device), self.head_dim, self.theta)
            q_BSND, k_BSGD = rotate(q_BSND, angle_SD), rotate(k_BSGD, angle_SD)
        mask = None if segment_BS is None else document_mask(segment_BS)
        y_BNSD = F.scaled_dot_product_attention(
            q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2),
            attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return y_BNSD.transpose(1, 2).reshape(B, S, -1) @ self.out


def rotary_angles(position_S: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Angles [S, D/2] of rotary position embedding (RoFormer, section 3.2.2), float64: long positions lose digits in float32."""
    rate_D = theta ** (-torch.arange(0, head_dim, 2, device=position_S.device, dtype=torch.float64) / head_dim)
    return position_S.to(torch.float64).unsqueeze(1) * rate_D


def rotate(x_BSND: torch.Tensor, angle_SD: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of every head by the position's angles; in at least float32."""
    dtype = torch.promote_types(x_BSND.dtype, torch.float32)
    cos_S1D, sin_S1D = (f(angle_SD).to(dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
    a, b = x_BSND.to(dtype).chunk(2, dim=-1)
    return torch.cat((a * cos_S1D - b * sin_S1D, b * cos_S1D + a * sin_S1D), dim=-1).to(x_BSND.dtype)


def document_mask(segment_BS: torch.Tensor) -> torch.Tensor:
    """Bool [B, 1, S, S]: key is not later than the query and lies in its document."""
    S = segment_BS.shape[1]
    same_BSS = segment_BS.unsqueeze(2) == segment_BS.unsqueeze(1)
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=segment_BS.device).tril()
    return (same_BSS & causal_SS).unsqueeze(1)
