"""The default backend: torch copies and sums rows."""

from __future__ import annotations

import torch

from foldray.kernels.permutation import combine, permute, sort_by_expert
from foldray.moe.contracts import Sent
from foldray.moe.router import Routing


class TorchPermutation:
    """Rows sorted by expert. With `Routing.capacity`, every expert gets that many rows, and the empty ones are zero.

    `Sent.memory` is position_TK: the row of each assignment, int64 [T, K], −1 if the assignment was dropped.
    """

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        experts = routing.tally.count_BE.shape[1]
        token_N, position_TK, count_E = sort_by_expert(routing.expert_TK, routing.keep_TK, experts)
        if routing.capacity is None:
            return permute(x_TH, token_N, position_TK), Sent(count_E, position_TK)
        first_E = count_E.cumsum(0) - count_E
        shift_E = torch.arange(experts, device=x_TH.device) * routing.capacity - first_E
        padded_TK = torch.where(position_TK < 0, position_TK, position_TK + shift_E[routing.expert_TK])
        place_N = torch.arange(token_N.numel(), device=x_TH.device) + shift_E.repeat_interleave(count_E)
        rows_NH = x_TH.new_zeros(experts * routing.capacity, x_TH.shape[1])
        rows_NH = rows_NH.index_copy(0, place_N, permute(x_TH, token_N, position_TK))
        return rows_NH, Sent(torch.full_like(count_E, routing.capacity), padded_TK)

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        return combine(y_NH, sent.memory, weight_TK)
