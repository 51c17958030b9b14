"""The Mixture-of-Experts layer of ranks that own both tokens and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from foldray.blueprint import Ownership
from foldray.comm import Groups
from foldray.kernels.later import Later
from foldray.moe.balance import Balance
from foldray.moe.contracts import Permutation, Received, Rows, Sent, run_layer
from foldray.moe.exchange import AllToAll
from foldray.moe.experts import Experts
from foldray.moe.inside import InsideNode
from foldray.moe.once import OncePerRank
from foldray.moe.router import Gate, Router, Routing, TokenPiece
from foldray.moe.torch_backend import TorchPermutation
from foldray.moe.wire import WIRES, Wire


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
        self.experts = Experts(ids, moe.expert, model.hidden, groups.expert_slices, backend.experts, later)
        self.shared = shared
        self.exchange = AllToAll(groups, backend.formats)
        self.permutation = backend.permutation or TorchPermutation()
        ep, inside = ownership.fold.ep, ownership.fold.ep_inside
        self.once = OncePerRank(ep, inside) if backend.dispatch == "rank" else None
        assert self.once or inside == 1, "tokens that travel once to each node must travel once to each rank"
        self.inside = InsideNode(groups.tokens_inside, inside * len(ids)) if inside > 1 else None

    def forward(self, h_BSH: torch.Tensor) -> tuple[torch.Tensor, Balance]:
        """Run all phases one after another in one autograd graph (`run_layer`)."""
        return run_layer(self, h_BSH)

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        return self.router(h_TH, piece)

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[Rows, Sent]:
        if self.once is not None:
            return self.once.encode(h_TH, routing)
        rows_NH, sent = self.permutation.encode(h_TH, routing)
        return (rows_NH,), sent

    def run_experts(self, rows: Rows, received: Received) -> torch.Tensor:
        return self.experts(rows, received) if self.inside is None else self.inside.run(self.experts, rows, received)

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        return self.permutation.decode(y_NH, sent, weight_TK) if self.once is None else self.once.decode(y_NH, sent)
