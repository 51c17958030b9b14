"""Tokens to their experts and back, in six stages, the network apart from the arithmetic.

The stages are those of Megatron-Core's token dispatcher (MoE Parallel Folding, section 3.3). Schedules, tests, backends and
the cost model attach between them. T tokens, H hidden, K experts per token, N rows = assignments that travel, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from foldray.comm import Groups, exchange
from foldray.moe.router import Routing


class Permutation(Protocol):
    """How a backend copies tokens into rows sorted by global expert, and sums rows back into tokens."""

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Rows sorted by expert, rows per expert (int64 [E]), and what `decode` needs."""

    def decode(self, y_NH: torch.Tensor, memory: Any) -> torch.Tensor:
        """Weighted sum of each token's rows: [N, H] → [T, H]."""


@dataclass(frozen=True)
class Plan:
    """One dispatch on its way.

    Args:
        memory: the permutation's own.
        sent_E: rows per global expert that leave this rank, int64.
        received_RE: rows per (source rank, local expert) that arrive, int64 on the host; None until counts are exchanged.
    """

    memory: Any
    sent_E: torch.Tensor
    received_RE: torch.Tensor | None = None

    def arrivals(self) -> torch.Tensor:
        if self.received_RE is None:
            raise RuntimeError("counts must be exchanged before tokens are")
        return self.received_RE

    @property
    def rows_per_expert(self) -> list[int]:
        """Rows of each local expert."""
        return self.arrivals().sum(0).tolist()


class Dispatcher:
    """The stages between the router and the sum, for experts split over an EP group."""

    def __init__(self, groups: Groups, permutation: Permutation):
        self.tokens, self.counts, self.permutation = groups.tokens, groups.counts, permutation

    def dispatch_preprocess(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Plan]:
        """Local: copy each token's row once per chosen expert, sorted by expert."""
        rows_NH, sent_E, memory = self.permutation.encode(x_TH, routing)
        return rows_NH, Plan(memory, sent_E)

    def exchange_counts(self, plan: Plan) -> Plan:
        """Network, on a communicator of its own so that it never waits behind tokens: who sends me how many rows."""
        ranks = self.counts.size
        received_E = self.counts.all_to_all(
            plan.sent_E, [plan.sent_E.numel() // ranks] * ranks, [plan.sent_E.numel() // ranks] * ranks
        )
        return replace(plan, sent_E=plan.sent_E.cpu(), received_RE=received_E.view(ranks, -1).cpu())

    def dispatch(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network only: rows to the ranks that own their experts."""
        return exchange(rows_NH, self.tokens, *self._splits(plan))

    def dispatch_postprocess(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: from (source rank, local expert) order to (local expert, source rank)."""
        return _regroup(rows_NH, plan.arrivals())

    def combine_preprocess(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: back to (source rank, local expert) order."""
        return _regroup(y_NH, plan.arrivals().T)

    def combine(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network only: results to the ranks that own their tokens."""
        received, sent = self._splits(plan)
        return exchange(y_NH, self.tokens, sent, received)

    def combine_postprocess(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: weighted sum of each token's rows."""
        return self.permutation.decode(y_NH, plan.memory)

    def _splits(self, plan: Plan) -> tuple[list[int], list[int]]:
        arrivals_RE = plan.arrivals()
        return arrivals_RE.sum(1).tolist(), plan.sent_E.view(arrivals_RE.shape).sum(1).tolist()


def _regroup(rows_NH: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    """Rows in blocks ordered (a, b), `counts_AB[a, b]` rows each, into blocks ordered (b, a)."""
    A, B = counts_AB.shape
    if A == 1 or B == 1:
        return rows_NH
    blocks = rows_NH.split(counts_AB.flatten().tolist())
    return torch.cat([blocks[a * B + b] for b in range(B) for a in range(A)])
