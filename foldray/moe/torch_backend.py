"""The default backend: torch copies and sums rows."""

from __future__ import annotations

import torch

from foldray.kernels.permutation import combine, pad_by_expert, permute, sort_by_expert
from foldray.moe.contracts import Sent
from foldray.moe.router import Routing


class TorchPermutation:
    """Rows sorted by expert. With `Routing.capacity`, every expert gets that many rows, and the empty ones are zero.

    `Sent.memory` is position_TK, the row of each assignment, int64 [T, K], −1 if the assignment was dropped; and whether
    assignments may be dropped.
    """

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        experts, drops = routing.tally.count_BE.shape[1], routing.keep_TK is not None
        if routing.capacity is None:
            token_N, position_TK, count_E = sort_by_expert(routing.expert_TK, routing.keep_TK, experts)
            return permute(x_TH, token_N, position_TK, drops=drops), Sent(count_E, (position_TK, drops))
        token_N, position_TK = pad_by_expert(routing.expert_TK, routing.keep_TK, experts, routing.capacity)
        rows_NH = permute(x_TH, token_N, position_TK, drops=drops, gaps=True)
        rows_E = torch.full((experts,), routing.capacity, device=x_TH.device)
        return rows_NH, Sent(rows_E, (position_TK, drops), [routing.capacity] * experts)

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        position_TK, drops = sent.memory
        return combine(y_NH, position_TK, weight_TK, drops=drops)
