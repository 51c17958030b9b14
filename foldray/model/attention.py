"""Causal self-attention with grouped key/value heads and rotary positions, cut over heads (TP) and positions (CP).

B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), L of the whole sequence,
H hidden, N query heads, G key/value heads (those of this rank), D head size.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from foldray.blueprint import ModelSpec
from foldray.blueprint.parts import Parts, columns
from foldray.comm import Groups, gather_sequence, scatter_sequence
from foldray.model.context import context_attention
from foldray.model.slices import KeysAndValues, Sight, slice_attention

ContextMode = Literal["ring", "all_gather"]


class Place(NamedTuple):
    """Where the tokens at hand stand in their sequences.

    Shapes: position_S, the positions of the context-parallel shard; segment_BL, document numbers of the whole sequences, or None
    for attention that passes over document boundaries. sight: of a slice, what its queries see; None for whole sequences.
    """

    position_S: torch.Tensor
    segment_BL: torch.Tensor | None
    sight: Sight | None = None


class Attention(nn.Module):
    """[B, s, H] → [B, s, H]; queries, keys and values of this rank's heads come from one product, `qkv` [H, (N + 2G)·D].

    Args:
        context: how keys and values reach the other context-parallel ranks: around a ring, or gathered at once.
    """

    def __init__(
        self,
        model: ModelSpec,
        groups: Groups,
        context: ContextMode = "ring",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.tensor, self.ring, self.context = groups.tensor, groups.context, context
        self.heads, self.kv_heads = model.heads // self.tensor.size, model.kv_heads // self.tensor.size
        self.head_dim = model.head_dim
        self.theta = model.rope_theta if model.positions == "rope" else None
        width = (self.heads + 2 * self.kv_heads) * model.head_dim
        self.qkv = nn.Parameter(torch.empty(model.hidden, width, device=device, dtype=dtype))
        self.out = nn.Parameter(torch.empty(self.heads * model.head_dim, model.hidden, device=device, dtype=dtype))

    def forward(self, x_BsH: torch.Tensor, place: Place, memory: KeysAndValues | None = None) -> torch.Tensor:
        """Attend within whole sequences, or from a slice of them to all of `memory`, which then holds the slice too."""
        x_BSH = gather_sequence(x_BsH, self.tensor)
        B, S, _ = x_BSH.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q_BSND, k_BSGD, v_BSGD = (x_BSH @ self.qkv).view(B, S, -1, self.head_dim).split(heads, dim=2)
        if self.theta is not None:
            angle_SD = rotary_angles(place.position_S, self.head_dim, self.theta)
            # Values of their own: a view of the product would keep queries and keys as they were, too.
            q_BSND, k_BSGD, v_BSGD = rotate(q_BSND, angle_SD), rotate(k_BSGD, angle_SD), v_BSGD.contiguous()
        q_BNSD, k_BGSD, v_BGSD = q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
        if memory is None or place.sight is None:
            y_BNSD = self._attend(q_BNSD, k_BGSD, v_BGSD, place.segment_BL)
        else:
            y_BNSD = slice_attention(q_BNSD, k_BGSD, v_BGSD, memory, place.sight, self.ring)
        return scatter_sequence(y_BNSD.transpose(1, 2).reshape(B, S, -1) @ self.out, self.tensor)

    def parts(self) -> Parts:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"qkv": columns({"query": query, "key": key, "value": key}), "out": [("out", ())]}

    def _attend(
        self, q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, segment_BL: torch.Tensor | None
    ) -> torch.Tensor:
        if self.ring.size > 1:
            return context_attention(q_BNSD, k_BGSD, v_BGSD, self.ring, self.context, segment_BL)
        mask = None if segment_BL is None else document_mask(segment_BL)
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )


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
