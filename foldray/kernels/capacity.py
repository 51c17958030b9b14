"""The capacity of experts: how many tokens an expert takes, and which further tokens it drops.

Tokens compete for capacity within a sequence, or within the piece of a sequence that a rank holds (full- and sub-sequence
dropping, MoE Parallel Folding, section 3.3). So the choice does not depend on the other sequences of a micro-batch.

Legend: T = B·S tokens, K assignments per token, E experts, N = T·K assignments.
"""

from __future__ import annotations

import math
from typing import Literal

import torch


def capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Return the number of tokens that an expert takes of one sequence, by equation 4 of MoE Parallel Folding."""
    return min(tokens, math.ceil(factor * tokens * topk / experts))


def keep_within(
    limit: int,
    expert_TK: torch.Tensor,
    score_TK: torch.Tensor,
    sequences: int,
    experts: int,
    drop: Literal["probability", "position"],
    before_BE: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the assignments that stay if every expert takes at most `limit` tokens of each sequence: bool [T, K].

    Args:
        score_TK: the scores of the chosen experts; only "probability" uses them.
        drop: "probability" keeps the most probable assignments (on a tie the earlier one), "position" the earliest.
        before_BE: number of assignments to each expert in earlier pieces of each sequence, kept or dropped.
    """
    T, K = expert_TK.shape
    sequence_B11 = torch.arange(sequences, device=expert_TK.device).view(-1, 1, 1)
    bucket_N = (sequence_B11 * experts + expert_TK.view(sequences, T // max(sequences, 1), K)).flatten()
    if drop == "probability":
        by_score_N = torch.argsort(score_TK.detach().flatten(), descending=True, stable=True)
        order_N = by_score_N[torch.argsort(bucket_N[by_score_N], stable=True)]
    else:
        order_N = torch.argsort(bucket_N, stable=True)
    place_N = place_in_group(bucket_N[order_N])
    if before_BE is not None:
        place_N = place_N + before_BE.flatten()[bucket_N[order_N]]
    keep_N = torch.empty_like(bucket_N, dtype=torch.bool)
    keep_N[order_N] = place_N < limit
    return keep_N.view(T, K)


def place_in_group(sorted_N: torch.Tensor) -> torch.Tensor:
    """Return the index of each sorted key among its equals: [3, 3, 5, 5, 5] → [0, 1, 0, 1, 2]."""
    index_N = torch.arange(sorted_N.numel(), device=sorted_N.device)
    return index_N - torch.searchsorted(sorted_N, sorted_N)
