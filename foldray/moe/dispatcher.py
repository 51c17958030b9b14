"""Tokens to their experts and back, in six stages, the network apart from the arithmetic.

The stages are those of Megatron-Core's token dispatcher (MoE Parallel Folding, section 3.3). Schedules, tests, backends and
the cost model attach between them. T tokens, H hidden, K experts per token, N rows = assignments that travel, E experts,
X expert-tensor-parallel ranks (ETP), R expert-parallel ranks (EP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from foldray.comm import Groups, Pending, exchange, gather_rows, scatter_rows
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
        received_XRE: rows per (ETP rank, EP rank that they come from, local expert) that arrive at this rank's ETP group, int64
            on the host; None until counts are exchanged.
    """

    memory: Any
    sent_E: torch.Tensor
    received_XRE: torch.Tensor | None = None

    def arrivals(self) -> torch.Tensor:
        if self.received_XRE is None:
            raise RuntimeError("counts must be exchanged before tokens are")
        return self.received_XRE

    @property
    def rows_per_expert(self) -> list[int]:
        """Rows of each local expert."""
        return self.arrivals().sum((0, 1)).tolist()


class Dispatcher:
    """The stages between the router and the sum, for experts split over an EP group, and each of them over an ETP group."""

    def __init__(self, groups: Groups, permutation: Permutation):
        self.tokens, self.slices, self.counts = groups.tokens, groups.expert_slices, groups.counts
        self.permutation = permutation
        places = [groups.fold.moe.coordinate(rank) for rank in self.counts.ranks]
        order = sorted(range(len(places)), key=lambda member: (places[member]["etp"], places[member]["ep"]))
        self._etp_then_ep = torch.tensor(order)

    def dispatch_preprocess(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Plan]:
        """Local: copy each token's row once per chosen expert, sorted by expert."""
        rows_NH, sent_E, memory = self.permutation.encode(x_TH, routing)
        return rows_NH, Plan(memory, sent_E)

    def start_counts(self, plan: Plan) -> Pending:
        """Network, on a communicator of its own so that it never waits behind tokens: who sends how many rows where."""
        return self.counts.start_all_gather(plan.sent_E)

    def finish_counts(self, plan: Plan, pending: Pending) -> Plan:
        """The plan with what arrives; the host waits for it."""
        (sent_NE,) = pending.wait()
        return self._with_arrivals(plan, sent_NE.cpu())

    def exchange_counts(self, plan: Plan) -> Plan:
        return self.finish_counts(plan, self.start_counts(plan))

    def fixed_counts(self, plan: Plan) -> Plan:
        """The plan when every rank sends what this one sends, as padding makes it: nobody needs to ask."""
        return self._with_arrivals(plan, plan.sent_E.cpu().repeat(self.counts.size))

    def _with_arrivals(self, plan: Plan, sent_NE: torch.Tensor) -> Plan:
        shape = (self.slices.size, self.tokens.size, self.tokens.size, -1)
        sent_XRRE = sent_NE.view(self.counts.size, -1)[self._etp_then_ep].view(shape)
        return replace(plan, sent_E=plan.sent_E.cpu(), received_XRE=sent_XRRE[:, :, self.tokens.index])

    def start_out(self, rows_NH: torch.Tensor, plan: Plan) -> Pending:
        """Network: rows start for the ranks that own their experts (all-to-all-v over EP). A combine's gradient goes this way."""
        return self.tokens.start_all_to_all(rows_NH, *self._splits(plan))

    def start_back(self, rows_NH: torch.Tensor, plan: Plan) -> Pending:
        """Network: rows start for the ranks that own their tokens. A dispatch's gradient goes this way."""
        received, sent = self._splits(plan)
        return self.tokens.start_all_to_all(rows_NH, sent, received)

    def gather(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network: an EP rank's rows to all that own a slice of its experts (all-gather-v over ETP)."""
        return gather_rows(rows_NH, self.slices, self._slices(plan))

    def scatter(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network: slices' results summed (reduce-scatter-v over ETP)."""
        return scatter_rows(y_NH, self.slices, self._slices(plan))

    def dispatch(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network only: rows out, then gathered, in one autograd graph."""
        return self.gather(exchange(rows_NH, self.tokens, *self._splits(plan)), plan)

    def dispatch_postprocess(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: from (ETP rank, source rank, local expert) order to (local expert, ETP rank, source rank)."""
        return _regroup(rows_NH, plan.arrivals().flatten(0, 1))

    def combine_preprocess(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: back to (ETP rank, source rank, local expert) order."""
        return _regroup(y_NH, plan.arrivals().flatten(0, 1).T)

    def combine(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Network only: scattered, then rows back, in one autograd graph."""
        received, sent = self._splits(plan)
        return exchange(self.scatter(y_NH, plan), self.tokens, sent, received)

    def combine_postprocess(self, y_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: weighted sum of each token's rows."""
        return self.permutation.decode(y_NH, plan.memory)

    def _splits(self, plan: Plan) -> tuple[list[int], list[int]]:
        """Rows received from and sent to each EP rank."""
        arrivals_RE = plan.arrivals()[self.slices.index]
        return arrivals_RE.sum(1).tolist(), plan.sent_E.view(arrivals_RE.shape).sum(1).tolist()

    def _slices(self, plan: Plan) -> list[int]:
        """Rows that each ETP rank has received."""
        return plan.arrivals().sum((1, 2)).tolist()


def _regroup(rows_NH: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    """Rows in blocks ordered (a, b), `counts_AB[a, b]` rows each, into blocks ordered (b, a)."""
    A, B = counts_AB.shape
    if A == 1 or B == 1:
        return rows_NH
    blocks = rows_NH.split(counts_AB.flatten().tolist())
    return torch.cat([blocks[a * B + b] for b in range(B) for a in range(A)])
