"""The router: which experts a token goes to, with which weights, and what it costs to be uneven.

Everything here runs in at least float32, and never below the precision of the model.
T = B·S tokens of B sequences, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from foldray.moe.capacity import capacity, keep_within
from foldray.spec import ModelSpec, RouterSpec

# Chooses experts from logits: (logits_TE, bias_E) -> (expert_TK, weight_TK).
Gate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Routing:
    """Where the tokens go.

    Args:
        expert_TK: chosen experts, int64, best first.
        weight_TK: factors on the experts' outputs; carries the router's gradient.
        keep_TK: assignments within capacity, bool; None when nothing can be dropped.
        capacity: rows that every expert is padded to; None for ragged rows.
        count_E: assignments per expert before dropping, int64.
        balance_loss, z_loss: scalars, not yet weighted.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    keep_TK: torch.Tensor | None
    capacity: int | None
    count_E: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor

    @property
    def dropped(self) -> torch.Tensor:
        """Number of assignments beyond capacity."""
        return self.count_E.new_zeros(()) if self.keep_TK is None else (~self.keep_TK).sum()


class Router(nn.Module):
    """Scores, top-k, dropping and balance terms of one MoE layer.

    `bias` is the selection bias of auxiliary-loss-free balancing (DeepSeek-V3): it changes who is chosen, not the weights,
    and is moved by `update_bias` once per optimizer step.
    """

    def __init__(
        self, model: ModelSpec, gate: Gate | None = None, device: torch.device | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        self.model, self.spec = model, model.router
        self.gate: Gate = gate or TopKGate(model)
        self.weight = nn.Parameter(torch.empty(model.hidden, model.experts, device=device, dtype=dtype))
        self.bias: torch.Tensor
        self.register_buffer("bias", torch.zeros(model.experts, device=device, dtype=_at_least_float32(dtype or torch.float32)))

    def forward(self, x_TH: torch.Tensor, sequences: int) -> Routing:
        dtype = _at_least_float32(x_TH.dtype)
        logits_TE = x_TH.to(dtype) @ self.weight.to(dtype)
        expert_TK, weight_TK = self.gate(logits_TE, self.bias)
        count_BE = _count(expert_TK, sequences, self.model.experts)
        keep_TK, limit = None, None
        if self.spec.capacity_factor is not None:
            limit = capacity(x_TH.shape[0] // sequences, self.model.topk, self.model.experts, self.spec.capacity_factor)
            keep_TK = keep_within(limit, expert_TK, weight_TK, sequences, self.model.experts, self.spec.drop)
        return Routing(
            expert_TK, weight_TK, keep_TK,
            capacity=limit * sequences if self.spec.pad and limit is not None else None,
            count_E=count_BE.sum(0),
            balance_loss=balance_loss(scores(logits_TE, self.spec), count_BE),
            z_loss=logits_TE.logsumexp(-1).square().mean(),
        )  # fmt: skip

    @torch.no_grad()
    def update_bias(self, count_E: torch.Tensor) -> None:
        """One step towards even use, from the assignments of a whole optimizer step over all ranks."""
        if self.spec.bias_rate:
            count_E = count_E.to(self.bias.dtype)
            self.bias += self.spec.bias_rate * torch.sign(count_E.mean() - count_E)


class TopKGate:
    """Top-k of softmax or sigmoid scores, in the order that the model's router names."""

    def __init__(self, model: ModelSpec):
        self.topk, self.spec = model.topk, model.router

    def __call__(self, logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        if spec.score == "softmax" and spec.softmax == "after_topk":
            top_TK, expert_TK = logits_TE.topk(self.topk, dim=-1)
            return expert_TK, top_TK.softmax(-1) * spec.scale
        score_TE = logits_TE.softmax(-1) if spec.score == "softmax" else logits_TE.sigmoid()
        expert_TK = (score_TE.detach() + bias_E).topk(self.topk, dim=-1).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        if spec.normalize:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp_min(1e-20)
        return expert_TK, weight_TK * spec.scale


def scores(logits_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Scores of all experts, summing to one per token: what the balance loss sees as probabilities."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    score_TE = logits_TE.sigmoid()
    return score_TE / score_TE.sum(-1, keepdim=True).clamp_min(1e-20)


def balance_loss(score_TE: torch.Tensor, count_BE: torch.Tensor) -> torch.Tensor:
    """Switch/GShard balance loss per sequence, averaged over sequences; 1 when every expert is used evenly.

    E · Σ_e f_e · P_e with f_e the share of a sequence's assignments and P_e its mean score (Switch Transformer, equation 4).
    """
    B, E = count_BE.shape
    share_BE = count_BE.to(score_TE.dtype) / count_BE.sum(-1, keepdim=True)
    mean_BE = score_TE.view(B, -1, E).mean(1)
    return E * (share_BE * mean_BE).sum(-1).mean()


def _count(expert_TK: torch.Tensor, sequences: int, experts: int) -> torch.Tensor:
    """Assignments per sequence and expert, int64 [B, E]."""
    chosen_BN = expert_TK.view(sequences, -1)
    return chosen_BN.new_zeros(sequences, experts).scatter_add_(1, chosen_BN, torch.ones_like(chosen_BN))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
