"""The contracts of a MoE layer: the state of its two sides, the exchange between them, and the methods that ops call.

A layer has two sides. The *sender* owns tokens: it routes them, and sums the rows that come back. The *receiver* owns
experts. A rank may be a sender, a receiver or both. The phases are those of Megatron-Core's token dispatcher (MoE Parallel
Folding, section 3.3). Each phase runs on one side; only the exchange runs on both.

    sender    route → dispatch_preprocess ─┐                                                   ┌─ combine_postprocess
    exchange                               └─ counts → out ─┐                          ┌─ back ┘
    receiver                                                └─ run_experts ────────────┘

In backward, the gradient of the rows that went out comes back, and the gradient of the rows that came back goes out.

A token has a row for each of its assignments, or one for each rank with experts of it (`once.py`). Then its weights and the
numbers of its experts travel beside the row, and the receiver sums the results of its experts. If it has a row for each node,
a receiver of the node passes it on to the ranks with experts of it, and brings one row back (`once.Relay`).

Legend: B sequences, s positions of a rank's piece, T = B·s tokens, H hidden, K experts per token, N rows that travel
(assignments that are not dropped, and padding; or pairs of a token and a rank or a node), E experts, X expert-tensor-parallel
ranks (ETP), R expert-parallel ranks (EP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch

from foldray.comm import Pending, mirrored_together
from foldray.kernels.autograd import ByHand
from foldray.kernels.expert_rows import ExpertRows
from foldray.kernels.transfer import start_reading
from foldray.moe.balance import Balance
from foldray.moe.copies import CopiedExperts
from foldray.moe.router import Router, Routing, TokenPiece

Expert = Callable[[torch.Tensor], torch.Tensor]
Rows = Sequence[torch.Tensor]
"""Rows [N, H], and what travels beside them: nothing, or their weights [N, K] and the numbers of their experts [N, K]."""


@dataclass(frozen=True)
class Sent:
    """The state that a sender keeps of a dispatch.

    Args:
        rows_E: number of rows that every global expert computes, int64, on the rows' device.
        memory: state that is needed to sum rows back into tokens.
        known_E: the same numbers, if the host knows them without waiting for the device; else None.
        rows_R: number of rows that travel to every EP rank, int64, if these are not the rows of its experts; else None.
        rows_N: number of rows that travel to every node, int64, if tokens travel once to a node; else None. Then `rows_R` are
            those that a rank of the node passes on.
        room: number of rows of the tensors that leave, if the last ones are room that no row needs; else None. So the host need
            not know how many rows there are before their counts arrive.
    """

    rows_E: torch.Tensor
    memory: Any
    known_E: list[int] | None = None
    rows_R: torch.Tensor | None = None
    rows_N: torch.Tensor | None = None
    room: int | None = None

    @property
    def counts(self) -> torch.Tensor:
        """The numbers that the receivers need: rows_E, then rows_R and rows_N if there are any."""
        travelling = [rows for rows in (self.rows_R, self.rows_N) if rows is not None]
        return torch.cat([self.rows_E, *travelling]) if travelling else self.rows_E


class RowCounts(NamedTuple):
    """The row counts of a dispatch.

    Args:
        rows_XRE: number of rows for each ETP rank of this rank's group, from each EP rank, for each local expert.
        leaving_R: number of rows that this rank sends to each EP rank.
        arriving_XR: number of rows that travel to each ETP rank of this rank's group from each EP rank, if these are not the rows
            of its experts; else None.
        inside: the same of what ranks of a node then pass on to each other, if tokens travel once to a node; else None. The rows
            above travel between ranks with the same place on their nodes, and R is the number of nodes.
    """

    rows_XRE: list[list[list[int]]]
    leaving_R: list[int]
    arriving_XR: list[list[int]] | None = None
    inside: RowCounts | None = None


class Received:
    """The row counts of a dispatch, on the host. They may still be on their way; the first reader waits for them.

    One tensor brings the counts in any order, and `arrange` puts them in order. Experts may do without the host (`by_expert`).

    Args:
        index: the receiver's among the ETP ranks.
        reading: returns the numbers of the tensor on the host, and waits for them. None reads the tensor once it has come.
        ends: returns where the rows of each local expert end (`ExpertRows`), from what has come; None asks the host for counts.
        stays: whether no row travels, because this rank has all experts. Then nobody need ask for counts to send rows.
    """

    def __init__(
        self,
        coming: Pending,
        arrange: Callable[[list[int]], RowCounts],
        index: int = 0,
        reading: Callable[[], list[int]] | None = None,
        ends: Callable[[torch.Tensor], torch.Tensor] | None = None,
        stays: bool = False,
    ):
        self.coming, self._arrange, self.index, self.stays = coming, arrange, index, stays
        self._reading, self._ends = reading, ends

    @classmethod
    def of(cls, counts: RowCounts, index: int = 0) -> Received:
        """Make a record of counts that are known."""
        received = cls(Pending([], ()), lambda _: counts, index)
        received.counts = counts
        return received

    @cached_property
    def counts(self) -> RowCounts:
        """All counts. One copy brings them to the host; the host waits for it."""
        return self._arrange(start_reading(*self.coming.wait())() if self._reading is None else self._reading())

    @property
    def are_here(self) -> bool:
        """Whether rows can be sent without waiting for counts."""
        return self.stays or "counts" in self.__dict__ or not (self.coming.is_running or self._reading)

    @cached_property
    def inside(self) -> Received:
        """The counts of the rows that ranks of a node pass on to each other."""
        inside = self.counts.inside
        assert inside is not None, "rows travel to ranks, and not to nodes"
        return Received.of(inside, self.index)

    @property
    def rows_by_runs(self) -> list[list[int]]:
        """Number of rows for each local expert that each ETP rank gets from each EP rank, in this order."""
        return [rows_E for rows_RE in self.counts.rows_XRE for rows_E in rows_RE]

    @property
    def leaving_by_rank(self) -> list[int]:
        return self.counts.leaving_R

    @cached_property
    def rows_by_rank(self) -> list[int]:
        """Number of rows that each EP rank sends to this receiver."""
        return self._arriving_XR[self.index]

    @cached_property
    def rows_by_slice(self) -> list[int]:
        """Number of rows that each ETP rank receives."""
        return [sum(rows_R) for rows_R in self._arriving_XR]

    @property
    def _arriving_XR(self) -> list[list[int]]:
        counts = self.counts
        return counts.arriving_XR or [[sum(rows_E) for rows_E in rows_RE] for rows_RE in counts.rows_XRE]

    @cached_property
    def rows_by_expert(self) -> list[int]:
        """Number of rows that each local expert computes, after the gather over ETP."""
        return [sum(rows) for rows in zip(*self.rows_by_runs, strict=True)]

    @cached_property
    def by_expert(self) -> ExpertRows:
        """The same numbers, which the host need not know."""
        if self._ends is None:
            return ExpertRows.of(self.rows_by_expert)
        of = self._ends
        rows = ExpertRows(lambda: self.rows_by_expert, lambda: of(*self.coming.wait()))
        if "counts" in self.__dict__:
            rows.counts = self.rows_by_expert
        return rows


class Permutation(Protocol):
    """How a backend copies tokens into rows sorted by global expert, and sums rows back into tokens."""

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        """Return rows [N, H] sorted by expert, and the state that `decode` needs."""

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows: [N, H] → [T, H]."""


class Exchange(Protocol):
    """How rows travel. All ranks of the group must call each method, in the same order. No method waits for another rank."""

    def start_counts(self, sent: Sent) -> Received:
        """Start to tell the receivers how many rows will come."""

    def equal_counts(self, sent: Sent) -> Received:
        """Return the counts of the rows that will come if every rank sends the same counts, as with padding.

        Nothing travels, and the host does not wait. `sent.known_E` must not be None.
        """

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        """Send rows to the owners of their experts, as soon as the counts have arrived. Rows behind the last one stay here."""

    def start_back(self, rows: Pending, sent: Sent, received: Received, room: int | None = None) -> Pending:
        """Send rows to the owners of their tokens, as soon as they are here. What comes back has `room` for rows
        (`start_all_to_all`)."""


class NodeExchange(Protocol):
    """How the rows of a piece go on from the rank of a node that they reach to the ranks of their experts, and come back.

    All ranks of the node must call each method, in the same order. No method waits, even for rows that are still on their way.
    """

    def start_out(self, rows: Pending) -> Pending:
        """Send rows with what is beside them to the ranks of their experts, or afterwards the gradients of results alone."""

    def start_back(self, rows: Pending) -> Pending:
        """Send results back, or the gradients of rows and weights: sums over the ranks to which a row went."""


class Layer(Protocol):
    """The methods that a schedule's ops call. They communicate only within one side, over TP×CP or over ETP."""

    @property
    def exchange(self) -> Exchange: ...

    @property
    def router(self) -> Router: ...

    @property
    def shared(self) -> Expert | None:
        """The shared expert: [B, s, H] → [B, s, H]; None if the layer has none."""

    @property
    def copies(self) -> CopiedExperts | None:
        """The copies of experts; None if there is no room for them."""

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        """Choose the experts of each token of a piece (`Router.forward`)."""

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[Rows, Sent]:
        """Copy tokens to rows [N, H], in the order in which rows leave."""

    def inside_node(self, sent: Sent, received: Received) -> NodeExchange | None:
        """Return how the rows of a dispatch go on inside a node; None if they have come to the ranks of their experts."""

    def run_experts(self, rows: Rows, received: Received) -> torch.Tensor:
        """Compute the rows in the order of their arrival; the results are in the order of their return: [N, H] → [N, H]."""

    def experts_by_hand(self, received: Received) -> Callable[..., ByHand] | None:
        """Return what does as `run_experts` without autograd, if this layer can."""

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        """Sum the results that have come back into tokens: [N, H] → [T, H]. Weights that have travelled are in the results."""

    def sums_by_hand(self, sent: Sent) -> Callable[..., ByHand] | None:
        """Return what does as `combine_postprocess` without autograd, if this layer can."""


def run_layer(layer: Layer, h_BSH: torch.Tensor, expert_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, Balance]:
    """Run all phases one after another in one autograd graph: [B, s, H] → [B, s, H], and the layer's balance.

    Every schedule must give the same result.
    """
    h_TH, exchange = h_BSH.flatten(0, 1), layer.exchange
    routing = layer.route(h_TH, TokenPiece(h_BSH.shape[0], expert_TK=expert_TK))
    rows, sent = layer.dispatch_preprocess(h_TH, routing)
    received = exchange.start_counts(sent)
    rows = dispatch(exchange, rows, sent, received)
    y_NH = compute_rows(layer, rows, sent, received)
    y_NH = combine(exchange, y_NH, sent, received)
    y_TH = layer.combine_postprocess(y_NH, sent, routing.weight_TK)
    y_BSH = y_TH.to(h_BSH.dtype).view_as(h_BSH)
    y_BSH = y_BSH if layer.shared is None else y_BSH + layer.shared(h_BSH)
    return y_BSH, layer.router.balance(routing.tally, h_BSH.shape[1])


def dispatch(exchange: Exchange, rows: Rows, sent: Sent, received: Received) -> Rows:
    """Send rows to the owners of their experts, and their gradients back."""
    return mirrored_together(
        rows,
        lambda rows: exchange.start_out(rows, sent, received).wait(),
        lambda gradients: exchange.start_back(Pending([], gradients), sent, received, sent.room).wait(),
    )


def compute_rows(layer: Layer, rows: Rows, sent: Sent, received: Received) -> torch.Tensor:
    """Compute rows that have been dispatched: [N, H] → [N, H]."""
    run, node = partial(layer.run_experts, received=received), layer.inside_node(sent, received)
    return run(rows) if node is None else compute_inside(node, run, rows)


def compute_inside(node: NodeExchange, run: Callable[[Rows], torch.Tensor], rows: Rows) -> torch.Tensor:
    """Compute rows that have come to a node on the ranks of their experts, and wait for them: [N, H] → [N, H]."""

    def out(rows: Rows) -> Rows:
        return node.start_out(Pending([], rows)).wait()

    def back(rows: Rows) -> Rows:
        return node.start_back(Pending([], rows)).wait()

    (y_NH,) = mirrored_together([run(mirrored_together(rows, out, back))], back, out)
    return y_NH


def combine(exchange: Exchange, y_NH: torch.Tensor, sent: Sent, received: Received) -> torch.Tensor:
    """Send results to the owners of their tokens, and their gradient back."""
    (back_NH,) = mirrored_together(
        [y_NH],
        lambda results: exchange.start_back(Pending([], results), sent, received).wait(),
        lambda gradients: exchange.start_out(gradients, sent, received).wait(),
    )
    return back_NH
