"""How many tokens an expert takes, and which ones it drops beyond that.

The scope is a sequence, or the piece of it that a rank holds (full- and sub-sequence dropping, MoE Parallel Folding section 3.3):
who is dropped does not depend on the micro-batch. T = B·S tokens, K assignments per token, E experts.
"""

from __future__ import annotations

import math
from typing import Literal

import torch


def capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Tokens of one sequence that an expert takes: ⌈factor · tokens · topk / experts⌉ (equation 4), at most all of them."""
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
    """Bool [T, K]: assignments that stay when every expert takes at most `limit` tokens of each sequence.

    "probability" keeps the most probable (ties: the earlier), "position" the earliest.

    Args:
        before_BE: tokens that each expert has been asked to take of each sequence before these.
    """
    T, K = expert_TK.shape
    sequence_T1 = torch.arange(sequences, device=expert_TK.device).repeat_interleave(T // sequences).unsqueeze(1)
    bucket_N = (sequence_T1 * experts + expert_TK).flatten()
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
    """For sorted keys, each element's place among the equal ones: [3, 3, 5, 5, 5] → [0, 1, 0, 1, 2]."""
    index_N = torch.arange(sorted_N.numel(), device=sorted_N.device)
    return index_N - torch.searchsorted(sorted_N, sorted_N)
