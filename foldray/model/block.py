"""A block of the model: attention, then a feed-forward network or experts.

Legend: B sequences, s positions of this rank's piece, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from foldray.blueprint import AttentionSpec, Ownership
from foldray.comm import Groups
from foldray.kernels.autograd import Later
from foldray.model.attention import Attention, ContextMode, HeadAttention, LatentAttention, Place
from foldray.model.layers import FeedForward, MTPModule, Norm, WeighedFeedForward
from foldray.model.linear import LinearAttention
from foldray.model.states import Memory
from foldray.moe import Balance, MoeBackend, MoELayer
from foldray.moe.apart import ExpertHalf, TokenHalf


class Block(nn.Module):
    """Attention, then a dense feed-forward network (`ffn`) or MoE layer (`moe`), with norms before each, after each, or both.

    A block that predicts a further token begins with `mtp` (`Transformer.enter`).

    If the experts have ranks of their own, `moe` is one half of a layer, and on the ranks of experts there is nothing else.
    """

    moe: MoELayer | TokenHalf | ExpertHalf
    ffn: FeedForward
    mtp: MTPModule

    def __init__(self, ownership: Ownership, layer: int, groups: Groups, backend: MoeBackend, context: ContextMode, later: Later):
        super().__init__()
        model, share = ownership.model, ownership.share(layer)
        if not groups.owns_tokens:
            self.moe = ExpertHalf(ownership, layer, groups, backend.experts, backend.formats, later)
            return
        if share.mtp:
            self.mtp = MTPModule(model, later)
        before, after = model.norms != "after", model.norms != "before"
        self.attention_norm, self.ffn_norm = (Norm(model) if before else None for _ in range(2))
        self.attention_after, self.ffn_after = (Norm(model) if after else None for _ in range(2))
        self.attention = _attention_type(share.attention)(share.attention, model, groups, context, later)
        if share.dense:
            self.ffn = FeedForward(share.dense, model.hidden, groups.tensor, later, model.residual_scale)
        if share.moe:
            inner, network = share.moe.shared, WeighedFeedForward if share.moe.shared_gate else FeedForward
            shared = network(inner, model.hidden, groups.tensor, later, model.residual_scale) if inner else None
            if ownership.fold.disjoint:
                self.moe = TokenHalf(ownership, groups, backend.gate, shared)
            else:
                self.moe = MoELayer(ownership, layer, groups, backend, shared, later)

    def forward(
        self, x_BsH: torch.Tensor, place: Place, memory: Memory | None = None, expert_TK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Balance | None]:
        """Run the whole block in one autograd graph: [B, s, H] → [B, s, H], and the balance of a MoE block.

        Every schedule must give the same result. `expert_TK` is that of `TokenPiece`.
        """
        x_BsH = self.attend(x_BsH, place, memory)
        if not self.is_moe:
            return self.feed(x_BsH), None
        y_BsH, balance = self.moe(_normed(self.ffn_norm, x_BsH), expert_TK)
        return x_BsH + _normed(self.ffn_after, y_BsH), balance

    def attend(self, x_BsH: torch.Tensor, place: Place, memory: Memory | None = None) -> torch.Tensor:
        normed_BsH, x_BsH = (x_BsH, x_BsH) if self.attention_norm is None else self.attention_norm.beside(x_BsH)
        return x_BsH + _normed(self.attention_after, self.attention(normed_BsH, place, memory))

    def project(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what stays here of a slice, and what all members need of it (`Attention.project`)."""
        return self.attention.project(_normed(self.attention_norm, x_BsH), place)

    def attend_projected(self, stayed: torch.Tensor, place: Place, memory: Memory) -> torch.Tensor:
        """Return what attention of a slice adds to the residual stream (`Attention.attend`)."""
        return _normed(self.attention_after, self.attention.attend(stayed, place, memory))

    def feed(self, x_BsH: torch.Tensor) -> torch.Tensor:
        normed_BsH, x_BsH = (x_BsH, x_BsH) if self.ffn_norm is None else self.ffn_norm.beside(x_BsH)
        return x_BsH + _normed(self.ffn_after, self.ffn(normed_BsH))

    def routed(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """Return what the router and the experts take."""
        return _normed(self.ffn_norm, x_BsH)

    @property
    def is_moe(self) -> bool:
        return hasattr(self, "moe")


def _attention_type(spec: AttentionSpec) -> type[Attention]:
    if spec.linear:
        return LinearAttention
    return LatentAttention if spec.latent else HeadAttention


def _normed(norm: Norm | None, x_BsH: torch.Tensor) -> torch.Tensor:
    return x_BsH if norm is None else norm(x_BsH)
