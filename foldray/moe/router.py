"""The router: it chooses the experts of each token and their weights, drops tokens, and sums up terms of the balance losses.

Everything here runs in float32, or in the model's type if that is wider. The balance loss and full-sequence dropping need whole
sequences, of which each rank holds a piece (`Sequences`).

Legend: T = B·s tokens (s positions of each of B sequences), L positions of a whole sequence, H hidden, E experts, K experts per
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from foldray.blueprint import ModelSpec, RouterSpec, pattern_shares
from foldray.comm import Groups
from foldray.kernels import routing
from foldray.kernels.autograd import at_least_float32, wide_product
from foldray.kernels.capacity import capacity, keep_within
from foldray.moe.balance import Balance, Sequences, Tally, bias_change, frequencies
from foldray.moe.pattern import Pattern
from foldray.moe.quantile import BINS, add_margins, balanced_bias

# Chooses experts from logits: (logits_TE, bias_E) -> (expert_TK, weight_TK).
Gate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Routing:
    """The assignments of a piece.

    Args:
        expert_TK: chosen experts, int64, the best first.
        weight_TK: factors on the experts' outputs; they carry the router's gradient.
        keep_TK: whether an assignment is kept, bool; None if the model has no capacity.
        capacity: number of rows that every expert is padded to; None without padding.
        tally: the piece's share of the balance of its micro-batch; its scores and z carry gradients.
        replaced: number of given assignments that the gate would not have chosen, int64 scalar; None if none are given.
        places: number of places that rows can go to, if `expert_TK` has places; None if it has experts.
    """

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    keep_TK: torch.Tensor | None
    capacity: int | None
    tally: Tally
    replaced: torch.Tensor | None = None
    places: int | None = None

    @property
    def targets(self) -> int:
        """Number of what `expert_TK` counts: experts, or their places."""
        return self.tally.count_BE.shape[1] if self.places is None else self.places


class TokenPiece(NamedTuple):
    """The place of a piece in its micro-batch. It has T / B tokens of each sequence.

    Args:
        length: tokens of each sequence that this rank has in all pieces; None if it has only this piece.
        before: sum of the tallies of earlier pieces; None for the first piece.
        position_s: positions of the piece in the sequences, for a pattern; None if it has whole sequences.
        expert_TK: experts instead of those that the gate chooses, −1 for the gate's; None for the gate's everywhere.
    """

    sequences: int
    length: int | None = None
    before: Tally | None = None
    position_s: torch.Tensor | None = None
    expert_TK: torch.Tensor | None = None


class Router(nn.Module):
    """Scores, top-k, dropping and balance terms of one MoE layer.

    `bias` [E] is the selection bias of auxiliary-loss-free balancing (DeepSeek-V3, section 2.1.2). It changes which experts
    are chosen, but not their weights. `frequency` [E] is each expert's share of the assignments of the last optimizer step,
    before dropping; 1/E before the first step. `update` changes both once per optimizer step. `margin_EQ` counts margins of this
    rank's tokens since then, int32, for `bias_update: quantile` (`quantile.py`); other rules have no bins.

    Attributes:
        pattern: chooses the experts instead of the gate, for measurements; None for the gate.
    """

    def __init__(self, model: ModelSpec, groups: Groups, gate: Gate | None = None):
        super().__init__()
        self.model, self.spec, self.sequences = model, model.router, Sequences(groups)
        self.gate: Gate = gate or TopKGate(model)
        shares = pattern_shares(model)
        self.pattern = None if shares is None else Pattern(shares)
        self.weight = nn.Parameter(torch.empty(model.hidden, model.experts))
        self.logit_bias = nn.Parameter(self.weight.new_empty(model.experts)) if model.router.logit_bias else None
        self.bias: torch.Tensor
        self.frequency: torch.Tensor
        wide = at_least_float32(self.weight)
        self.register_buffer("bias", torch.zeros(model.experts, dtype=wide))
        self.register_buffer("frequency", torch.full_like(self.bias, 1 / model.experts))
        self.margin_EQ: torch.Tensor
        bins = BINS if model.router.bias_update == "quantile" else 0
        self.register_buffer("margin_EQ", torch.zeros(model.experts, bins, dtype=torch.int32), persistent=False)

    def forward(self, x_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        """Route one piece of a micro-batch. Pieces must come in the order of their tokens.

        With `drop_scope: sequence`, all ranks that share the sequences must call this.
        """
        sequences, length = piece.sequences, piece.length
        experts, logits_TE = self.model.experts, wide_product(x_TH, self.weight)
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias
        piece_length = x_TH.shape[0] // max(sequences, 1)
        length = piece_length if length is None else length
        decides = self.pattern is None and piece.expert_TK is None
        if self.margin_EQ.numel() and torch.is_grad_enabled():
            with torch.no_grad():
                add_margins(self.margin_EQ, values(logits_TE, self.spec), self.bias, self.model.topk)
        rule, replaced = self.gate.rule if decides and isinstance(self.gate, TopKGate) else None, None
        if rule is not None and routing.gates(logits_TE):
            expert_TK, weight_TK, count_BE, score_BE, z = routing.gate(logits_TE, self.bias, sequences, rule)
        else:
            expert_TK, weight_TK = self._choose(logits_TE, piece)
            if piece.expert_TK is not None:
                expert_TK, replaced = _given(piece.expert_TK, expert_TK)
                weight_TK = weights(values(logits_TE, self.spec), expert_TK, self.spec)
            count_BE = _count(expert_TK, sequences, experts)
            score_BE = _by_sequence(scores(logits_TE, self.spec), sequences).sum(1)
            z = logits_TE.logsumexp(-1).square().sum()
        if self.model.residual_scale != 1:
            weight_TK = weight_TK * self.model.residual_scale
        keep_TK, limit, competed_BE = self._keep(expert_TK, weight_TK.detach(), sequences, length, piece.before)
        dropped = count_BE.new_zeros(()) if keep_TK is None else (~keep_TK).sum()
        tally = Tally(count_BE, score_BE, z, dropped, competed_BE)
        return Routing(expert_TK, weight_TK, keep_TK, limit if self.spec.pad else None, tally, replaced)

    def _choose(self, logits_TE: torch.Tensor, piece: TokenPiece) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, and their weights."""
        if self.pattern is None:
            return self.gate(logits_TE, self.bias)
        position_s = piece.position_s
        if position_s is None:
            position_s = torch.arange(logits_TE.shape[0] // max(piece.sequences, 1), device=logits_TE.device)
        expert_TK = self.pattern.choose(position_s, piece.sequences)
        return expert_TK, weights(values(logits_TE, self.spec), expert_TK, self.spec)

    def whole(self, x_TH: torch.Tensor, sequences: int) -> tuple[Routing, Balance]:
        """Route a micro-batch in one piece. The balance carries gradients."""
        routing = self(x_TH, TokenPiece(sequences))
        return routing, self.balance(routing.tally, x_TH.shape[0] // max(sequences, 1))

    def balance(self, tally: Tally, tokens: int) -> Balance:
        """Return the balance of a micro-batch whose tally has all pieces: `tokens` of each sequence on this rank.

        All ranks that `frequencies` names must call this.
        """
        share_BE = frequencies(tally, self.sequences, self.spec.balance_scope, self.frequency)
        return Balance(tally, share_BE, tokens * self.sequences.ranks)

    def _keep(
        self, expert_TK: torch.Tensor, score_TK: torch.Tensor, sequences: int, length: int, before: Tally | None
    ) -> tuple[torch.Tensor | None, int | None, torch.Tensor | None]:
        """Return keep_TK, the most rows that an expert can get from this rank's piece, and competed_BE (see `Tally`)."""
        factor, experts, drop = self.spec.capacity_factor, self.model.experts, self.spec.drop
        if factor is None:
            return None, None, None
        piece_length = expert_TK.shape[0] // max(sequences, 1)
        shared = self.spec.drop_scope == "sequence" and self.sequences.ranks > 1
        ranks = self.sequences.ranks if shared else 1
        # "probability" chooses within a piece. "position" chooses within all pieces, and needs the counts of earlier pieces.
        tokens = (piece_length if drop == "probability" else length) * ranks
        limit = capacity(tokens, expert_TK.shape[1], experts, factor)
        if shared:
            expert_BLK, score_BLK = (self.sequences.whole(_by_sequence(x, sequences)) for x in (expert_TK, score_TK))
            expert_TK, score_TK = expert_BLK.flatten(0, 1), score_BLK.flatten(0, 1)
        competed_BE = None if drop == "probability" else _count(expert_TK, sequences, experts)
        before_BE = None if before is None else before.competed_BE
        keep_TK = keep_within(limit, expert_TK, score_TK, sequences, experts, drop, before_BE)
        if shared:
            keep_TK = self.sequences.own(keep_TK.view_as(expert_BLK)).flatten(0, 1)
        return keep_TK, min(limit, piece_length) * sequences, competed_BE

    @torch.no_grad()
    def update(self, count_E: torch.Tensor) -> None:
        """Take the assignments of an optimizer step on all ranks, before dropping. A step without any leaves no frequencies.

        With `bias_update: quantile`, `margin_EQ` must have the margins of all ranks. It begins anew.
        """
        count_E = count_E.to(self.bias)
        if self.spec.balance_scope == "global_batch":
            self.frequency.copy_(count_E / count_E.sum().clamp_min(1))
        if self.spec.bias_rate:
            self.update_bias(count_E)
        self.margin_EQ.zero_()

    def update_bias(self, count_E: torch.Tensor) -> None:
        """Move the bias towards an even use of the experts, by its rate and rule."""
        if self.spec.bias_update == "quantile":
            change_E = balanced_bias(self.margin_EQ, self.bias, self.model.topk) - self.bias
        else:
            change_E = bias_change(count_E, self.spec.bias_update)
        self.bias += self.spec.bias_rate * change_E


class TopKGate:
    """Top-k of softmax or sigmoid scores. `RouterSpec.softmax` says whether a softmax runs before or after top-k."""

    def __init__(self, model: ModelSpec):
        self.topk, self.spec = model.topk, model.router

    @property
    def rule(self) -> routing.GateRule | None:
        """What a kernel for GPUs needs to do the same (`routing.gate`); None if it cannot, with groups of experts."""
        spec = self.spec
        if spec.groups > 1:
            return None
        return routing.GateRule(self.topk, spec.score == "sigmoid", _softmax_is_last(spec), spec.normalize, spec.scale)

    def __call__(self, logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value_TE = values(logits_TE, self.spec)
        ranked_TE = value_TE.detach() if _softmax_is_last(self.spec) else self._of_best_groups(value_TE.detach() + bias_E)
        expert_TK = ranked_TE.topk(self.topk, dim=-1).indices
        return expert_TK, weights(value_TE, expert_TK, self.spec)

    def _of_best_groups(self, score_TE: torch.Tensor) -> torch.Tensor:
        """Return scores of −inf for the experts of all but a token's best groups (DeepSeek-V3, section 2.1.2)."""
        spec = self.spec
        if spec.groups == 1:
            return score_TE
        grouped_TGE = score_TE.unflatten(-1, (spec.groups, score_TE.shape[-1] // spec.groups))
        deciding = min(2 if spec.score == "sigmoid" else 1, grouped_TGE.shape[-1])
        best_TG = grouped_TGE.topk(deciding, dim=-1).values.sum(-1).topk(spec.topk_groups, dim=-1).indices
        out_TG = torch.ones_like(grouped_TGE[..., 0], dtype=torch.bool).scatter_(-1, best_TG, False)
        return grouped_TGE.masked_fill(out_TG.unsqueeze(-1), -math.inf).flatten(-2)


def values(logits_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return what top-k compares: the logits if the softmax comes after it, else the scores."""
    if _softmax_is_last(spec):
        return logits_TE
    return logits_TE.softmax(-1) if spec.score == "softmax" else logits_TE.sigmoid()


def weights(value_TE: torch.Tensor, expert_TK: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return the weights of chosen experts [T, K], from `values`."""
    weight_TK = value_TE.gather(-1, expert_TK)
    if _softmax_is_last(spec):
        weight_TK = weight_TK.softmax(-1)
    if spec.normalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp_min(1e-20)
    return weight_TK * spec.scale


def _softmax_is_last(spec: RouterSpec) -> bool:
    return spec.score == "softmax" and spec.softmax == "after_topk"


def scores(logits_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Return the scores [T, E] that the balance loss takes as probabilities. The scores of a token sum to 1."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    score_TE = logits_TE.sigmoid()
    return score_TE / score_TE.sum(-1, keepdim=True).clamp_min(1e-20)


def _given(given_TK: torch.Tensor, own_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts that are given, or the gate's own for −1, and how many of them are not the gate's own."""
    expert_TK = torch.where(given_TK < 0, own_TK, given_TK.to(own_TK.dtype))
    return expert_TK, (expert_TK.unsqueeze(2) != own_TK.unsqueeze(1)).all(2).sum()


def _by_sequence(x_TX: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return the rows of tokens by sequence: [T, X] → [B, T / B, X]. There may be no sequence."""
    return x_TX.unflatten(0, (sequences, x_TX.shape[0] // max(sequences, 1)))


def _count(expert_TK: torch.Tensor, sequences: int, experts: int) -> torch.Tensor:
    chosen_BN = _by_sequence(expert_TK, sequences).flatten(1)
    return chosen_BN.new_zeros(sequences, experts).scatter_add_(1, chosen_BN, torch.ones_like(chosen_BN))
