"""The contracts of a MoE layer: what its two sides keep, how rows travel between them, what a schedule's ops call.

A layer has two sides. The *sender* owns tokens: it routes them, and sums what comes back. The *receiver* owns experts. A rank is
one or the other, or both; nothing here asks which. The stages are those of Megatron-Core's token dispatcher (MoE Parallel
Folding, section 3.3); each runs on one side, and only an exchange runs on both.

    sender    route → dispatch_preprocess ─┐                                                   ┌─ combine_postprocess
    exchange                               └─ counts → out ─┐                          ┌─ back ┘
    receiver                                                └─ run_experts ────────────┘

Going backward, the gradient of what went out comes back, and the gradient of what came back goes out.

T tokens, H hidden, K experts per token, N rows = assignments that travel, E experts, X expert-tensor-parallel ranks (ETP),
R expert-parallel ranks (EP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from foldray.comm import Pending, mirrored
from foldray.moe.balance import Balance, Tally
from foldray.moe.router import Router, Routing

Expert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sent:
    """What a sender keeps of a dispatch.

    Args:
        rows_E: rows for every global expert, int64.
        memory: what the permutation needs to sum rows back into tokens.
    """

    rows_E: torch.Tensor
    memory: Any

    @cached_property
    def _host_E(self) -> torch.Tensor:
        return self.rows_E.cpu()  # the host waits for it

    def rows_by_rank(self, ranks: int) -> list[int]:
        """Rows for every EP rank."""
        return self._host_E.view(ranks, -1).sum(1).tolist()


@dataclass(frozen=True)
class Received:
    """What a receiver knows of a dispatch.

    Args:
        rows_XRE: rows per ETP rank of the receiver's group, EP rank that they come from, and local expert; int64, on the host.
        index: the receiver's place among the ETP ranks.
    """

    rows_XRE: torch.Tensor
    index: int = 0

    @cached_property
    def rows_by_rank(self) -> list[int]:
        """Rows from every EP rank."""
        return self.rows_XRE[self.index].sum(1).tolist()

    @cached_property
    def rows_by_slice(self) -> list[int]:
        """Rows that every ETP rank has received."""
        return self.rows_XRE.sum((1, 2)).tolist()

    @cached_property
    def rows_by_expert(self) -> list[int]:
        """Rows of each local expert, once they are gathered over ETP."""
        return self.rows_XRE.sum((0, 1)).tolist()


class Permutation(Protocol):
    """How a backend copies tokens into rows sorted by global expert, and sums rows back into tokens."""

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        """Rows [N, H] sorted by expert, and what is kept for `decode`."""

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, weighted: [N, H] → [T, H]."""


class Exchange(Protocol):
    """How rows travel. All ranks of the group call each method; what is on its way is waited for with `Pending.wait`."""

    def start_counts(self, sent: Sent) -> Pending:
        """Tell the receivers how many rows will come."""

    def finish_counts(self, pending: Pending) -> Received:
        """What will come; the host waits for it."""

    def equal_counts(self, sent: Sent) -> Received:
        """What will come when every rank sends as many rows as this one, as padding makes it: nobody needs to ask."""

    def start_out(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        """Rows start for the owners of their experts."""

    def start_back(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        """Rows start for the owners of their tokens."""


class Layer(Protocol):
    """What a schedule's ops call. The methods are local, but for sums inside of one side (over TP×CP, over ETP)."""

    @property
    def exchange(self) -> Exchange: ...

    @property
    def router(self) -> Router: ...

    @property
    def shared(self) -> Expert | None:
        """The expert that every token goes to: [B, s, H] → [B, s, H]."""

    def route(self, h_TH: torch.Tensor, sequences: int, length: int | None = None, before: Tally | None = None) -> Routing:
        """The experts of each token of a piece (`Router.forward`)."""

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        """Tokens → rows in the order in which they leave."""

    def run_experts(self, rows_NH: torch.Tensor, received: Received) -> torch.Tensor:
        """Rows as they arrive → results in the order in which they go back."""

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        """Results as they come back → tokens."""


def run_layer(layer: Layer, h_BSH: torch.Tensor) -> tuple[torch.Tensor, Balance]:
    """All stages one after another in one autograd graph: what every schedule must equal. [B, s, H] → [B, s, H]."""
    h_TH, exchange, sequences = h_BSH.flatten(0, 1), layer.exchange, h_BSH.shape[0]
    routing = layer.route(h_TH, sequences)
    rows_NH, sent = layer.dispatch_preprocess(h_TH, routing)
    received = exchange.finish_counts(exchange.start_counts(sent))
    y_NH = layer.run_experts(dispatch(exchange, rows_NH, sent, received), received)
    y_NH = combine(exchange, y_NH, sent, received)
    y_TH = layer.combine_postprocess(y_NH, sent, routing.weight_TK)
    y_BSH = y_TH.to(h_BSH.dtype).view_as(h_BSH)
    y_BSH = y_BSH if layer.shared is None else y_BSH + layer.shared(h_BSH)
    return y_BSH, routing.tally.balance(layer.router.sequences, h_BSH.shape[1])


def dispatch(exchange: Exchange, rows_NH: torch.Tensor, sent: Sent, received: Received) -> torch.Tensor:
    """Send rows to the owners of their experts, and their gradient back."""
    return mirrored(
        rows_NH,
        lambda rows_NH: exchange.start_out(rows_NH, sent, received).wait()[0],
        lambda gradient_NH: exchange.start_back(gradient_NH, sent, received).wait()[0],
    )


def combine(exchange: Exchange, y_NH: torch.Tensor, sent: Sent, received: Received) -> torch.Tensor:
    """Send results to the owners of their tokens, and their gradient back."""
    return mirrored(
        y_NH,
        lambda y_NH: exchange.start_back(y_NH, sent, received).wait()[0],
        lambda gradient_NH: exchange.start_out(gradient_NH, sent, received).wait()[0],
    )


class PlainExchange:
    """The exchange of a rank alone: everything is there."""

    def start_counts(self, sent: Sent) -> Pending:
        return Pending([], (sent.rows_E,))

    def finish_counts(self, pending: Pending) -> Received:
        return Received(pending.wait()[0].cpu().view(1, 1, -1))

    def equal_counts(self, sent: Sent) -> Received:
        return self.finish_counts(self.start_counts(sent))

    def start_out(self, rows_NH: torch.Tensor, sent: Sent, received: Received) -> Pending:
        return Pending([], (rows_NH,))

    start_back = start_out


class PlainLayer:
    """The plainest layer that keeps the contract, for one rank: row by row, in ordinary autograd. Tests hold others against it.

    Args:
        experts: [n, H] → [n, H], one for each global expert.
        shared: [B, s, H] → [B, s, H].
    """

    def __init__(self, router: Router, experts: Sequence[Expert], shared: Expert | None = None):
        self.exchange, self.router, self.experts, self.shared = PlainExchange(), router, experts, shared

    def route(self, h_TH: torch.Tensor, sequences: int, length: int | None = None, before: Tally | None = None) -> Routing:
        return self.router(h_TH, sequences, length, before)

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        chosen, keep_TK = routing.expert_TK.tolist(), routing.keep_TK
        kept = [(t, k) for t, row in enumerate(chosen) for k in range(len(row)) if keep_TK is None or keep_TK[t, k]]
        slots = sorted(kept, key=lambda slot: chosen[slot[0]][slot[1]])
        rows_E = [sum(chosen[t][k] == expert for t, k in slots) for expert in range(len(self.experts))]
        return torch.stack([h_TH[t] for t, _ in slots]), Sent(torch.tensor(rows_E), (slots, len(chosen)))

    def run_experts(self, rows_NH: torch.Tensor, received: Received) -> torch.Tensor:
        parts = rows_NH.split(received.rows_by_expert)
        return torch.cat([expert(part_nH) for expert, part_nH in zip(self.experts, parts, strict=True)])

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        slots, tokens = sent.memory
        out = [y_NH.new_zeros(y_NH.shape[1]) for _ in range(tokens)]
        for y_H, (t, k) in zip(y_NH, slots, strict=True):
            out[t] = out[t] + weight_TK[t, k] * y_H
        return torch.stack(out)
