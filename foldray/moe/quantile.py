"""Quantile balancing: the selection bias with which every expert would have had its even share of a step's assignments.

A token takes an expert as soon as the expert's score and bias reach the token's threshold. So an expert needs, for each token, a
bias of threshold less score, its *margin*. With the K/E quantile of its margins over all tokens of a step as its bias, it would
have been taken by K/E of them, if the thresholds had stayed. (Su, kexue.fm/archives/11619; Kimi K3's technical report, section
2.3.3 and appendix D, has the rule as it stands here: the threshold is the next score after those that are chosen, and margins are
counted in a histogram, so that no rank keeps those of all tokens.)

Legend: T tokens, E experts, K experts per token, Q bins.
"""

from __future__ import annotations

import torch

BINS = 1000  # as in Kimi K3's report; margins within a bin are taken as even


def _span(bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest margin that scores from 0 to 1 can have: two scalars."""
    return bias_E.min() - 1, bias_E.max() + 1


def add_margins(count_EQ: torch.Tensor, score_TE: torch.Tensor, bias_E: torch.Tensor, topk: int) -> None:
    """Count the margins of some tokens.

    Args:
        count_EQ: number of margins in each bin so far, int32. It is changed.
        score_TE: scores from 0 to 1. Tokens with one that is not a number have no margins.
        topk: number of experts that a token takes, fewer than there are.
    """
    experts, bins = count_EQ.shape
    threshold_T1 = (score_TE + bias_E).topk(topk + 1, dim=-1).values[:, topk:]
    low, high = _span(bias_E)
    place_TE = (threshold_T1 - score_TE - low) * (bins / (high - low))
    known_T1 = place_TE.isfinite().all(-1, keepdim=True)
    bin_TE = torch.where(known_T1, place_TE, 0).long().clamp_(0, bins - 1)
    index_TE = bin_TE + bins * torch.arange(experts, device=bin_TE.device)
    count_EQ.view(-1).scatter_add_(0, index_TE.flatten(), known_T1.expand_as(bin_TE).flatten().to(count_EQ.dtype))


def balanced_bias(count_EQ: torch.Tensor, bias_E: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the bias that would have balanced a step, with a mean of 0: [E].

    Args:
        count_EQ: the margins of all ranks' tokens. Without any, the bias stays as it is.
        bias_E: the bias of the step.
    """
    experts, bins = count_EQ.shape
    low, high = _span(bias_E)
    until_EQ = count_EQ.cumsum(-1)
    share_E1 = until_EQ[:, -1:].double() * (topk / experts)
    bin_E1 = (until_EQ < share_E1).sum(-1, keepdim=True).clamp_max(bins - 1)
    inside_E1 = count_EQ.gather(1, bin_E1)
    before_E1 = until_EQ.gather(1, bin_E1) - inside_E1
    place_E = (bin_E1 + (share_E1 - before_E1) / inside_E1.clamp_min(1)).squeeze(1)
    margin_E = low + place_E * ((high - low) / bins)
    return torch.where(until_EQ[:, -1] > 0, (margin_E - margin_E.mean()).to(bias_E.dtype), bias_E)
