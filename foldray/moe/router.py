"""The router: which experts a token goes to, with which weights, and what it costs to be uneven.

Everything here runs in at least float32, and never below the precision of the model.
T = B·s tokens: this rank's pieces, s positions each, of B sequences. H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from foldray.blueprint import ModelSpec, RouterSpec
from foldray.comm import Groups
from foldray.kernels.capacity import capacity, keep_within
from foldray.kernels.lean import keeping_inputs
from foldray.moe.balance import Balance, Tally
from foldray.moe.sequence import Sequences

# Chooses experts from logits: (logits_TE, bias_E) -> (expert_TK, weight_TK).
Gate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a piece go.

    Args:
        expert_TK: chosen experts, int64, best first.
        weight_TK: factors on the experts' outputs; carries the router's gradient.
        keep_TK: assignments within capacity, bool; None when nothing can be dropped.
        capacity: rows that every expert is padded to; None for ragged rows.
        tally: what the piece adds to the balance of its micro-batch; its scores and z carry gradients.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    keep_TK: torch.Tensor | None
    capacity: int | None
    tally: Tally


class Router(nn.Module):
    """Scores, top-k, dropping and balance terms of one MoE layer.

    `bias` is the selection bias of auxiliary-loss-free balancing (DeepSeek-V3): it changes who is chosen, not the weights,
    and is moved by `update_bias` once per optimizer step.
    """

    def __init__(
        self,
        model: ModelSpec,
        groups: Groups,
        gate: Gate | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.model, self.spec, self.sequences = model, model.router, Sequences(groups)
        self.gate: Gate = gate or TopKGate(model)
        self.weight = nn.Parameter(torch.empty(model.hidden, model.experts, device=device, dtype=dtype))
        self.bias: torch.Tensor
        self.register_buffer("bias", torch.zeros(model.experts, device=device, dtype=_at_least_float32(dtype or torch.float32)))

    def forward(self, x_TH: torch.Tensor, sequences: int, length: int | None = None, before: Tally | None = None) -> Routing:
        """Route one piece of a micro-batch; pieces come in the order of their tokens.

        Args:
            sequences: B, of which the piece has T / B tokens each.
            length: tokens of each sequence that this rank has in all pieces; None if this piece is all of them.
            before: sum over the pieces before this one.
        """
        dtype, experts = _at_least_float32(x_TH.dtype), self.model.experts
        logits_TE = keeping_inputs(lambda x_TH, weight_HE: x_TH.to(dtype) @ weight_HE.to(dtype), x_TH, self.weight)
        expert_TK, weight_TK = self.gate(logits_TE, self.bias)
        length = x_TH.shape[0] // sequences if length is None else length
        keep_TK, limit, competed_BE = self._keep(expert_TK, weight_TK.detach(), sequences, length, before)
        count_BE = _count(expert_TK, sequences, experts)
        tally = Tally(
            count_BE,
            score_BE=scores(logits_TE, self.spec).view(sequences, -1, experts).sum(1),
            z=logits_TE.logsumexp(-1).square().sum(),
            dropped=count_BE.new_zeros(()) if keep_TK is None else (~keep_TK).sum(),
            competed_BE=competed_BE,
        )
        return Routing(expert_TK, weight_TK, keep_TK, limit if self.spec.pad else None, tally)

    def whole(self, x_TH: torch.Tensor, sequences: int) -> tuple[Routing, Balance]:
        """Route a micro-batch in one piece; its balance carries gradients."""
        routing = self(x_TH, sequences)
        return routing, routing.tally.balance(self.sequences, x_TH.shape[0] // sequences)

    def _keep(
        self, expert_TK: torch.Tensor, score_TK: torch.Tensor, sequences: int, length: int, before: Tally | None
    ) -> tuple[torch.Tensor | None, int | None, torch.Tensor | None]:
        """Who stays within capacity, the most rows an expert can then get from this rank's piece, and who competed."""
        factor, experts, drop = self.spec.capacity_factor, self.model.experts, self.spec.drop
        if factor is None:
            return None, None, None
        own = expert_TK.shape[0] // sequences
        shared = self.spec.drop_scope == "sequence" and self.sequences.ranks > 1
        ranks = self.sequences.ranks if shared else 1
        # The most probable are chosen within a piece; the earliest, within all pieces, which counters carry from one to the next.
        tokens = (own if drop == "probability" else length) * ranks
        limit = capacity(tokens, expert_TK.shape[1], experts, factor)
        if shared:
            expert_BLK, score_BLK = (self.sequences.whole(x.view(sequences, own, -1)) for x in (expert_TK, score_TK))
            expert_TK, score_TK = expert_BLK.flatten(0, 1), score_BLK.flatten(0, 1)
        competed_BE = None if drop == "probability" else _count(expert_TK, sequences, experts)
        before_BE = None if before is None else before.competed_BE
        keep_TK = keep_within(limit, expert_TK, score_TK, sequences, experts, drop, before_BE)
        if shared:
            keep_TK = self.sequences.own(keep_TK.view_as(expert_BLK)).flatten(0, 1)
        return keep_TK, min(limit, own) * sequences, competed_BE

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


def _count(expert_TK: torch.Tensor, sequences: int, experts: int) -> torch.Tensor:
    """Assignments per sequence and expert, int64 [B, E]."""
    chosen_BN = expert_TK.view(sequences, -1)
    return chosen_BN.new_zeros(sequences, experts).scatter_add_(1, chosen_BN, torch.ones_like(chosen_BN))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
