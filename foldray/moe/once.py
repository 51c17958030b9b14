"""Rows that travel once to every rank, however many of its experts a token has.

The weights travel with the rows, and the rank of the experts sums the results of its experts. So a token has at most one row
for each rank, in both directions (DisagMoE, section 4.2; MegaScale-Infer, section 4).

Legend: T tokens, K experts per token, R ranks of experts, N rows (pairs of a token and a rank, rank by rank), H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from foldray.kernels.permutation import combine, permute, sort_by_expert
from foldray.moe.experts import Experts
from foldray.moe.router import Routing


class Rows(NamedTuple):
    """The rows of one rank's tokens, sorted by the rank that they go to.

    Args:
        rows_NH: the tokens.
        weight_NK: the weights of a token's experts; 0 for those of other ranks.
        expert_NK: the numbers of the experts on the rank that the row goes to, int64; −1 for experts of other ranks.
        goes_TR: whether a token has a row for a rank, bool.
    """

    rows_NH: torch.Tensor
    weight_NK: torch.Tensor
    expert_NK: torch.Tensor
    goes_TR: torch.Tensor


def encode(x_TH: torch.Tensor, routing: Routing, experts: int, ranks: int) -> Rows:
    """Copy tokens to rows.

    Args:
        x_TH: the tokens.
        routing: their assignments. Dropped ones make no rows.
        experts: number of all experts, a multiple of `ranks`. Each rank has a run of them.
        ranks: R.
    """
    local = experts // ranks
    owner_TK = routing.expert_TK // local
    if routing.keep_TK is not None:
        owner_TK = owner_TK.masked_fill(~routing.keep_TK, ranks)
    goes_TR = owner_TK.new_zeros(len(x_TH), ranks + 1, dtype=torch.bool).scatter_(1, owner_TK, True)[:, :ranks]
    rank_N, token_N = goes_TR.T.nonzero(as_tuple=True)
    here_NK = owner_TK[token_N] == rank_N[:, None]
    expert_NK = torch.where(here_NK, routing.expert_TK[token_N] % local, -1)
    return Rows(permute(x_TH, token_N), routing.weight_TK[token_N] * here_NK, expert_NK, goes_TR)


def run_experts(experts: Experts, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each row's experts on this rank: [N, H] → [N, H]."""
    token_M, position_NK, count_E = sort_by_expert(expert_NK, expert_NK >= 0, len(experts.ids))
    y_MH = experts.compute(permute(rows_NH, token_M, position_NK), count_E.tolist())
    return combine(y_MH, position_NK, weight_NK)


def decode(y_NH: torch.Tensor, goes_TR: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's rows: [N, H] → [T, H]. Its backward is `copy_to_ranks`."""
    position_TR = torch.where(goes_TR, goes_TR.T.flatten().cumsum(0).view(goes_TR.shape[1], -1).T - 1, -1)
    return combine(y_NH, position_TR, y_NH.new_ones(goes_TR.shape))


def copy_to_ranks(x_TH: torch.Tensor, goes_TR: torch.Tensor) -> torch.Tensor:
    """Copy tokens to their rows: [T, H] → [N, H]."""
    _, token_N = goes_TR.T.nonzero(as_tuple=True)
    return x_TH[token_N]
