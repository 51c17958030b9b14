"""The ops of a micro-batch on ranks that own only tokens, or only experts.

What goes from the router past the experts to the sums of results (`_Past`) travels with the handover if the sums are at the
next stage. In backward, the gradient of the residual stream comes back the same way.

The weights travel with the rows, so a sum of results has no weights of its own. Its backward copies the gradients of tokens to
rows, and needs none of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import torch

from foldray.comm import Groups, Pending
from foldray.graph import Op
from foldray.kinds import COMBINE, COUNTS, DISPATCH
from foldray.moe import Routing
from foldray.moe.apart import ExpertHalf, TokenExchange, TokenHalf
from foldray.moe.once import copy_to_ranks, decode
from foldray.runtime.micro_batch import MicroBatch
from foldray.runtime.micro_batch_state import Part
from foldray.runtime.op_graphs import Computed


def micro_batch_type(groups: Groups) -> type[MicroBatch]:
    """Return the type of a rank's micro-batches."""
    if not groups.fold.disjoint:
        return MicroBatch
    return TokenMicroBatch if groups.owns_tokens else ExpertMicroBatch


class _Past:
    """The data that go from the router of a piece past the experts. They may still be on their way.

    Args:
        coming: brings goes_TR (`once.Encoded`) as uint8, and the residual stream, with the output of the shared expert once
            that has run.
    """

    def __init__(self, coming: Pending):
        self._coming, self._lock = coming, Lock()  # the queue's thread reads it, too

    @property
    def is_here(self) -> bool:
        return not self._coming.is_running

    @cached_property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            goes_TR, residual_BsH = self._coming.wait()
        return goes_TR, residual_BsH

    @cached_property
    def count_R(self) -> list[int]:
        """Number of rows by rank of experts. The host waits for it."""
        return self.both[0].sum(0, dtype=torch.int64).tolist()


class TokenMicroBatch(MicroBatch):
    """The state of a micro-batch on a rank that owns tokens."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._goes: dict[Part, torch.Tensor] = {}  # goes_TR of pieces whose rows have not left
        self._left: dict[Part, list[int]] = {}  # number of rows that have left by rank of experts, until their gradients come
        self._pasts: dict[Part, _Past] = {}  # at the stage of the sums, until they are made
        self._summed: dict[Part, tuple[torch.Tensor, list[int]]] = {}  # goes_TR, and rows by rank of experts
        self._past_gradients: dict[Part, Pending] = {}  # of the residual stream, at the router's stage

    def _half(self, op: Op) -> TokenHalf:
        half = self.model.block(op.layer).moe
        assert isinstance(half, TokenHalf)
        return half

    # Handovers.

    def leaving(self, op: Op) -> list[torch.Tensor]:
        last, part = self._past_layer(op), op.part
        if last is None:
            return super().leaving(op)
        if op.direction == "F":
            return [*self._pasts.pop((last, part)).both]
        return [*self._past_gradients.pop((last, part)).wait()]

    def coming(self, op: Op) -> list[torch.Tensor]:
        last = self._past_layer(op)
        if last is None:
            return super().coming(op)
        (residual_BsH,) = super().coming(op)
        if op.direction == "B":
            return [residual_BsH]
        tokens = residual_BsH.shape[0] * residual_BsH.shape[1]
        return [residual_BsH.new_empty((tokens, self.groups.fold.ep_across), dtype=torch.uint8), residual_BsH]

    def arriving(self, op: Op, pending: Pending) -> None:
        last = self._past_layer(op)
        if last is None:
            super().arriving(op, pending)
        elif op.direction == "F":
            self._pasts[last, op.part] = _Past(pending)
        else:
            self._past_gradients[last, op.part] = pending

    def _past_layer(self, op: Op) -> int | None:
        """Return the block whose experts a handover goes past; None for an ordinary handover."""
        before = self.graph.layers[op.layer if op.direction == "F" else op.layer - 1][-1]
        return before if self.graph.merges_onwards(before) else None

    @property
    def groups(self) -> Groups:
        return self.model.groups

    # Forward.

    def route_forward(self, op: Op) -> None:
        half, part = self._half(op), (op.layer, op.part)

        def rows_of(h_TH: torch.Tensor, routing: Routing) -> Computed:
            rows = half.encode(h_TH, routing)
            return Computed([rows.rows_NH, rows.weight_NK, rows.expert_NK], rows.goes_TR)

        rows, goes_TR, residual_BsH = self._route(op, half, rows_of)
        self._goes[part], self._pasts[part] = goes_TR, _Past(Pending([], (goes_TR.to(torch.uint8), residual_BsH)))
        self.flight[op._replace(kind=DISPATCH)] = Pending([], rows)

    def _add_past(self, op: Op, y_BsH: torch.Tensor) -> None:
        goes_TR, residual_BsH = self._pasts[op.layer, op.part].both
        self._pasts[op.layer, op.part] = _Past(Pending([], (goes_TR, residual_BsH + y_BsH)))

    def counts_forward(self, op: Op) -> None:
        self.flight[op] = self._exchange(op).start_counts(self._goes[op.layer, op.part].sum(0))

    def dispatch_forward(self, op: Op) -> None:
        rows_NH, weight_NK, expert_NK = self.flight.pop(op).wait()
        count_R = self._goes.pop((op.layer, op.part)).sum(0).tolist()
        meta_NM = torch.cat([weight_NK, expert_NK.to(weight_NK.dtype)], dim=1)  # numbers of experts are exact there
        self.flight[op] = self._exchange(op).start_out([rows_NH, meta_NM], count_R)
        if self.training:
            self._left[op.layer, op.part] = count_R

    def combine_forward(self, op: Op) -> None:
        past = self._pasts[op.layer, op.part]
        like, hidden = next(self.model.parameters()), self.model.spec.hidden
        self.flight[op] = self._exchange(op).start_back(
            [like.new_empty((0, hidden))], lambda: past.count_R, like.is_cuda or past.is_here
        )

    def merge_forward(self, op: Op) -> None:
        y_NH, past = self._arrived(op, COMBINE), self._pasts.pop((op.layer, op.part))
        goes_TR, residual_BsH = past.both
        self.graphs.begin()
        y_TH = decode(y_NH, goes_TR.bool())
        self._pass_on(op, residual_BsH + y_TH.to(residual_BsH.dtype).view_as(residual_BsH))
        if self.training:
            self._summed[op.layer, op.part] = goes_TR, past.count_R

    # Backward.

    def merge_backward(self, op: Op) -> None:
        residual_BsH = self._output_gradient(op)
        goes_TR, _ = self._summed[op.layer, op.part]
        self.graphs.begin()
        rows_NH = copy_to_ranks(residual_BsH.flatten(0, 1), goes_TR.bool()).to(next(self.model.parameters()).dtype)
        self._past_gradients[op.layer, op.part] = Pending([], (residual_BsH,))
        self.flight[op._replace(kind=COMBINE)] = Pending([], (rows_NH,))

    def combine_backward(self, op: Op) -> None:
        (rows_NH,) = self.flight.pop(op).wait()
        self.flight[op] = self._exchange(op).start_out([rows_NH], self._summed.pop((op.layer, op.part))[1])

    def dispatch_backward(self, op: Op) -> None:
        count_R, half = self._left.pop((op.layer, op.part)), self._half(op)
        like, weight = next(self.model.parameters()), half.router.bias
        self.flight[op] = self._exchange(op).start_back(
            [like.new_empty((0, half.hidden)), weight.new_empty((0, half.topk))], lambda: count_R, True
        )

    def _past_gradient(self, op: Op) -> torch.Tensor:
        part = op.layer, op.part
        (residual_BsH,) = self._past_gradients[part].wait()
        self._past_gradients[part] = Pending([], (residual_BsH,))
        return residual_BsH

    def route_backward(self, op: Op) -> None:
        rows_NH, weight_NK = self.flight.pop(op._replace(kind=DISPATCH)).wait()
        (residual_BsH,) = self._past_gradients.pop((op.layer, op.part)).wait()
        self._route_back(op, [rows_NH, weight_NK], residual_BsH)

    def _exchange(self, op: Op) -> TokenExchange:
        """Return the exchange with a block's experts. A rank that sums their results may lack the block's router."""
        return self.model.token_exchange(op.layer)


class ExpertMicroBatch(MicroBatch):
    """The state of a micro-batch on a rank that owns experts."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._counts: dict[Part, Pending] = {}
        self._known: dict[Part, list[int]] = {}  # number of rows by sender

    def _half(self, op: Op) -> ExpertHalf:
        half = self.model.block(op.layer).moe
        assert isinstance(half, ExpertHalf)
        return half

    def counts_forward(self, op: Op) -> None:
        device = next(self.model.parameters()).device
        self._counts[op.layer, op.part] = self.flight[op] = self._half(op).exchange.start_counts(device)

    def dispatch_forward(self, op: Op) -> None:
        part, half = (op.layer, op.part), self._half(op)
        self.flight.pop(op._replace(kind=COUNTS), None)
        coming, like = self._counts.pop(part), next(self.model.parameters())
        wide = torch.promote_types(like.dtype, torch.float32)

        def counts() -> Sequence[int]:
            (count_S,) = coming.wait()
            self._known[part] = count_S.tolist()
            return self._known[part]

        self.flight[op] = half.exchange.start_rows(
            [like.new_empty((0, half.hidden)), like.new_empty((0, 2 * half.topk), dtype=wide)],
            counts, like.is_cuda or not coming.is_running,
        )  # fmt: skip

    def expert_forward(self, op: Op) -> None:
        half = self._half(op)
        rows_NH, meta_NM = self.flight.pop(op._replace(kind=DISPATCH)).wait()
        weight_NK, expert_NK = meta_NM.split(half.topk, dim=1)
        expert_NK = expert_NK.to(torch.int64)
        (y_NH,), _ = self.graphs.compute(
            op, lambda *given: Computed([half.run(*given)]), rows_NH, weight_NK.contiguous(), beside=[expert_NK]
        )
        self.flight[op._replace(kind=COMBINE)] = Pending([], (y_NH,))

    def combine_forward(self, op: Op) -> None:
        part = op.layer, op.part
        counts = self._known[part] if self.training else self._known.pop(part)
        self.flight[op] = self._half(op).exchange.start_results(self.flight.pop(op).wait(), counts)

    def combine_backward(self, op: Op) -> None:
        half, like = self._half(op), next(self.model.parameters())
        counts = self._known[op.layer, op.part]
        self.flight[op] = half.exchange.start_gradients([like.new_empty((0, half.hidden))], lambda: counts)

    def expert_backward(self, op: Op) -> None:
        rows_NH, weight_NK = self.graphs.differentiate(op, [self._arrived(op, COMBINE)])
        self.flight[op._replace(kind=DISPATCH)] = Pending([], (rows_NH, weight_NK))

    def dispatch_backward(self, op: Op) -> None:
        counts = self._known.pop((op.layer, op.part))
        self.flight[op] = self._half(op).exchange.start_row_gradients(self.flight.pop(op).wait(), counts)
