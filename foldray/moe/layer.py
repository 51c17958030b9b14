"""The Mixture-of-Experts layer of ranks that own both tokens and experts.

torch copies and sums the rows of tokens, which is the default backend. On the receiver's side, a rank has shares of its experts.

Legend: T tokens, K experts per token, N rows, M rows of experts (N, unless a row has several experts), H hidden, F inner width of
this rank's share of an expert, W width of its first product (2F with a gate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from foldray.blueprint import FeedForwardSpec, Ownership
from foldray.blueprint.parts import Parts, columns, ffn_columns
from foldray.blueprint.sections import AdapterSpec
from foldray.comm import Communicator, Groups, gather_rows, scatter_rows
from foldray.kernels.autograd import ByHand, Later, Leave
from foldray.kernels.expert_rows import ExpertRows
from foldray.kernels.experts import Biases, Kind, expert_ffn, expert_ffn_by_hand
from foldray.kernels.lora import ExpertAdapters, adapted_ffn, adapted_ffn_by_hand
from foldray.kernels.permutation import combine, combine_by_hand, pad_by_expert, permute, sort_by_expert
from foldray.moe.balance import Balance
from foldray.moe.contracts import Permutation, Received, Rows, Sent, run_layer
from foldray.moe.copies import CopiedExperts
from foldray.moe.exchange import WIRES, AllToAll, Wire
from foldray.moe.once import OncePerRank, PassedOn, Relay
from foldray.moe.router import Gate, Router, Routing, TokenPiece


class TorchPermutation:
    """Rows sorted by expert. With `Routing.capacity`, every expert gets that many rows, and the empty ones are zero.

    `Sent.memory` is position_TK, the row of each assignment, int64 [T, K], −1 if the assignment was dropped; and whether
    assignments may be dropped.
    """

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        experts, drops = routing.targets, routing.keep_TK is not None
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


class Experts(nn.Module):
    """This rank's shares of its experts, stacked: `up` [E_local, H, W] and `down` [E_local, F, H].

    ETP cuts the inner width of every expert. `up_bias` [E_local · W] and `down_bias` [E_local · H] are None without
    biases. They are vectors, which do not decay. The ids of experts are global.

    With adapters, `up_lora_a` [E_local, H, R] and `up_lora_b` [E_local, R, W] are those of the first product, `down_lora_a`
    [E_local, F, R] and `down_lora_b` [E_local, R, H] those of the second one. Matrices that ETP does not cut are on each rank.

    Attributes:
        copied: the copies of other ranks' experts, whose rows come behind those of the own ones; at most one stack of them.
    """

    def __init__(
        self,
        ids: range,
        share: FeedForwardSpec,
        hidden: int,
        slices: Communicator,
        kind: Kind = "grouped",
        later: Later | None = None,
        adapter: AdapterSpec | None = None,
    ):
        super().__init__()
        self.ids, self.share, self.slices, self.kind, self.later = ids, share, slices, kind, later or Later()
        self.up = nn.Parameter(torch.empty(len(ids), hidden, share.width))
        self.down = nn.Parameter(torch.empty(len(ids), share.inner, hidden))
        self.up_bias = nn.Parameter(self.up.new_empty(len(ids) * share.width)) if share.bias else None
        self.down_bias = nn.Parameter(self.up.new_empty(len(ids) * hidden)) if share.bias else None
        self.copied: list[Experts] = []  # a list, because they are no part of the model's state
        self.adapter = adapter
        if adapter and adapter.inwards:
            self._add_adapter("up", adapter.rank)
        if adapter and adapter.outwards:
            self._add_adapter("down", adapter.rank)

    def _add_adapter(self, name: str, rank: int) -> None:
        experts, inside, outside = getattr(self, name).shape
        for factor, shape in (("a", (inside, rank)), ("b", (rank, outside))):
            self.register_parameter(f"{name}_lora_{factor}", nn.Parameter(self.up.new_empty(experts, *shape)))

    def forward(self, rows: Rows, received: Received) -> torch.Tensor:
        """Compute the rows in the order of their arrival; the results are in the order of their return: [N, H] → [N, H].

        Rows are gathered over ETP, and results are summed over ETP.
        """
        by_slice = received.rows_by_slice if self.slices.size > 1 else []
        rows_NH, *beside = (gather_rows(x, self.slices, by_slice) for x in rows)
        if beside:
            weight_NK, expert_NK = beside
            y_NH = self.weighted_sum(rows_NH, weight_NK, expert_NK, received.rows_by_expert)
        else:
            y_NH = combine_preprocess(self.compute(dispatch_postprocess(rows_NH, received), received.by_expert), received)
        return scatter_rows(y_NH, self.slices, by_slice)

    def weighted_sum(
        self, rows_NH: torch.Tensor, weight_NK: torch.Tensor, expert_NK: torch.Tensor, counts: list[int] | None = None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts on this rank: [N, H] → [N, H].

        Args:
            expert_NK: the numbers of the experts on this rank; −1 for experts of other ranks.
            counts: number of rows of each local expert, if the host knows it; with None, it waits for the device.
        """
        kept, experts = (None, len(self.ids)) if counts is None else (sum(counts), len(counts))
        token_M, position_NK, count_E = sort_by_expert(expert_NK.to(torch.int64), expert_NK >= 0, experts, kept)
        y_MH = self.compute(permute(rows_NH, token_M, position_NK), ExpertRows.counted(count_E, counts))
        return combine(y_MH, position_NK, weight_NK)

    def compute(self, rows_NH: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """Compute each local expert on its rows, which are sorted by expert."""
        stacks = self._stacks(rows_NH, rows)
        return _joined([experts._compute(x_NH, of) for experts, x_NH, of in stacks])

    def _stacks(self, rows_NH: torch.Tensor, rows: ExpertRows) -> list[_Stack]:
        """Return the stacks of experts that have rows, each with its own."""
        own = len(self.ids)
        if not self.copied or len(rows.counts) == own:
            return [_Stack(self, rows_NH, rows)]
        counts = rows.counts[:own], rows.counts[own:]
        parts = rows_NH.split([sum(of) for of in counts])
        return list(map(_Stack, (self, *self.copied), parts, map(ExpertRows.of, counts)))

    def _compute(self, rows_NH: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        biases: Biases = (None, None)
        if self.up_bias is not None and self.down_bias is not None:
            biases = (self.up_bias.view(len(self.ids), -1), self.down_bias.view(len(self.ids), -1))
        weights = rows_NH, rows, self.up, self.down
        if (adapters := self.adapters) is not None:
            return adapted_ffn(*weights, adapters, self.share.ffn, self.kind, self._leave(*adapters.factors), biases)
        return expert_ffn(*weights, self.share.ffn, self.kind, self._leave(self.up, self.down), biases)

    def by_hand(self, rows_NH: torch.Tensor, received: Received) -> ByHand:
        """Do as `forward`, for rows without weights and without ETP, but without autograd."""
        stacks = self._stacks(dispatch_postprocess(rows_NH, received), received.by_expert)
        results, backwards = zip(*(experts._by_hand(x_NH, rows) for experts, x_NH, rows in stacks), strict=True)
        sizes = [len(y_NH) for y_NH in results]

        def differentiate(dy_NH: torch.Tensor) -> tuple[list[torch.Tensor], dict[nn.Parameter, torch.Tensor]]:
            given = dispatch_postprocess(dy_NH, received)
            parts: dict[nn.Parameter, torch.Tensor] = {}
            gradients = []
            for backward, part_NH in zip(backwards, given.split(sizes), strict=True):
                (dx_NH,), of_stack = backward(part_NH)
                gradients.append(dx_NH)
                parts.update(of_stack)
            return [combine_preprocess(_joined(gradients), received)], parts

        return ByHand(combine_preprocess(_joined(results), received), differentiate)

    def _by_hand(self, x_NH: torch.Tensor, rows: ExpertRows) -> ByHand:
        weights, biases = (x_NH, rows, self.up, self.down), (self.up_bias, self.down_bias)
        if (adapters := self.adapters) is not None:
            return adapted_ffn_by_hand(*weights, adapters, self.share.ffn, self._leave(*adapters.factors), biases)
        return expert_ffn_by_hand(*weights, self.share.ffn, self._leave(self.up, self.down), biases)

    @property
    def adapters(self) -> ExpertAdapters | None:
        """The adapters of both products; None if neither has one."""
        if self.adapter is None or not (self.adapter.inwards or self.adapter.outwards):
            return None
        names = ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
        return ExpertAdapters(self.adapter.scale, *(getattr(self, name, None) for name in names))

    def _leave(self, *weights: nn.Parameter | None) -> Leave | None:
        return self.later.leaver(*(weight for weight in weights if weight is not None))

    def parts(self) -> Parts:
        names, inner, hidden = self.share.activation.inwards, self.share.inner, self.down.shape[-1]
        parts: Parts = {name: [] for name, _ in self.named_parameters()}
        for i, expert in enumerate(self.ids):
            inwards = ffn_columns(names, inner, (i, slice(None)))
            found: Parts = {
                "up": [(f"{expert}.{part}", index) for part, index in inwards],
                "down": [(f"{expert}.down", (i,))],
                "down_bias": [(f"{expert}.down_bias", (slice(i * hidden, (i + 1) * hidden),))],
                "up_lora_a": [(f"{expert}.inwards_lora.a", (i,))],
                "up_lora_b": [(f"{expert}.{part}_lora.b", index) for part, index in inwards],
                "down_lora_a": [(f"{expert}.down_lora.a", (i,))],
                "down_lora_b": [(f"{expert}.down_lora.b", (i,))],
            }
            for name, rows in parts.items():
                rows += found.get(name, [])
        biases = [f"{expert}.{part}_bias" for expert in self.ids for part in names]
        return parts | {"up_bias": columns(dict.fromkeys(biases, inner), before=())}


class _Stack(NamedTuple):
    """A stack of experts, and its rows."""

    experts: Experts
    rows_NH: torch.Tensor
    rows: ExpertRows


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def dispatch_postprocess(rows_NH: torch.Tensor, received: Received) -> torch.Tensor:
    """Reorder rows from (ETP rank, source rank, local expert) to (local expert, ETP rank, source rank)."""
    return rows_NH if received.stays else _regroup(rows_NH, received.rows_by_runs)


def combine_preprocess(y_NH: torch.Tensor, received: Received) -> torch.Tensor:
    """Undo `dispatch_postprocess`."""
    return y_NH if received.stays else _regroup(y_NH, list(zip(*received.rows_by_runs, strict=True)))


def _regroup(rows_NH: torch.Tensor, counts_AB: Sequence[Sequence[int]]) -> torch.Tensor:
    """Reorder runs of `counts_AB[a][b]` rows from (a, b) order to (b, a) order."""
    A, B = len(counts_AB), len(counts_AB[0])
    if A == 1 or B == 1:
        return rows_NH
    blocks = rows_NH.split([count for counts_B in counts_AB for count in counts_B])
    return torch.cat([blocks[a * B + b] for b in range(B) for a in range(A)])


@dataclass(frozen=True)
class MoeBackend:
    """The kernels of a MoE layer, and how its tokens travel.

    Args:
        gate: chooses experts from logits; None is `TopKGate`.
        permutation: copies tokens to rows for each assignment, and sums rows; None is `TorchPermutation`.
        dispatch: whether a token travels for each assignment, or once to each rank. With `Fold.ep_inside`, it travels once to
            each node, and from there once to each rank.
        wire: how rows are written for the wire (`wire.WIRES`); None leaves them as they are.
    """

    gate: Gate | None = None
    permutation: Permutation | None = None
    experts: Literal["grouped", "loop"] = "grouped"
    dispatch: Literal["assignment", "rank"] = "assignment"
    wire: Literal["bfloat16", "float8"] | None = None

    @property
    def formats(self) -> Wire | None:
        """The formats of rows on the wire; None leaves them as they are."""
        return WIRES[self.wire] if self.wire else None


class MoELayer(nn.Module):
    """A MoE layer over an EP×ETP group: [B, s, H] → [B, s, H]. It implements `contracts.Layer`."""

    def __init__(
        self,
        ownership: Ownership,
        layer: int,
        groups: Groups,
        backend: MoeBackend,
        shared: nn.Module | None = None,
        later: Later | None = None,
    ):
        super().__init__()
        model, moe = ownership.model, ownership.share(layer).moe
        assert moe, f"block {layer} is dense"
        ids = ownership.experts(groups.rank)
        self.router = Router(model, groups, backend.gate)
        self.experts = Experts(ids, moe.expert, model.hidden, groups.expert_slices, backend.experts, later, model.adapter)
        self.shared = shared
        self.exchange = AllToAll(groups, backend.formats)
        self.permutation = backend.permutation or TorchPermutation()
        ep, inside = ownership.fold.ep, ownership.fold.ep_inside
        self.once = OncePerRank(ep, inside) if backend.dispatch == "rank" else None
        assert self.once or inside == 1, "tokens that travel once to each node must travel once to each rank"
        self.inside = (groups.tokens_inside, groups.tokens_inside_queue) if inside > 1 else None
        self.copies: CopiedExperts | None = None

    def make_room(self, room: int, over: Communicator) -> CopiedExperts:
        """Have room for copies of other ranks' experts. `over` is the expert-parallel group."""
        home = self.experts
        stack = Experts(range(room), home.share, home.down.shape[-1], home.slices, home.kind, home.later)
        stack.to(home.up).requires_grad_(home.up.requires_grad)
        home.copied, self.copies = [stack], CopiedExperts(home, len(home.ids), stack, room, over)
        return self.copies

    def forward(self, h_BSH: torch.Tensor, expert_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, Balance]:
        """Run all phases one after another in one autograd graph (`run_layer`)."""
        return run_layer(self, h_BSH, expert_TK)

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        return self.router(h_TH, piece)

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[Rows, Sent]:
        if self.once is not None:
            return self.once.encode(h_TH, routing)
        rows_NH, sent = self.permutation.encode(h_TH, routing)
        return (rows_NH,), sent

    def inside_node(self, sent: Sent, received: Received) -> Relay | None:
        if self.inside is None:
            return None
        ranks, queue = self.inside

        def passed_on() -> PassedOn:
            inside = received.inside
            experts = ranks.size * len(inside.rows_by_runs[0])  # of which copies have places
            return PassedOn(experts, inside.leaving_by_rank, inside.rows_by_rank)

        return Relay(ranks, queue, sent.rows_E.device, passed_on)

    def run_experts(self, rows: Rows, received: Received) -> torch.Tensor:
        return self.experts(rows, received if self.inside is None else received.inside)

    def experts_by_hand(self, received: Received) -> Callable[..., ByHand] | None:
        if self.once is not None or self.experts.slices.size > 1 or self.experts.kind == "loop":
            return None
        return lambda rows_NH: self.experts.by_hand(rows_NH, received)

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        return self.permutation.decode(y_NH, sent, weight_TK) if self.once is None else self.once.decode(y_NH, sent)

    def sums_by_hand(self, sent: Sent) -> Callable[..., ByHand] | None:
        if self.once is not None or not isinstance(self.permutation, TorchPermutation):
            return None
        position_TK, drops = sent.memory
        return lambda y_NH, weight_TK: combine_by_hand(y_NH, position_TK, weight_TK, drops=drops)
