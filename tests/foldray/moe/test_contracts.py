"""The contract of MoE layers: callers can use the plain layer instead of the fast one, and get the same results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from foldray.comm import Pending
from foldray.kernels.experts import reference_ffn
from foldray.kernels.transfer import start_reading
from foldray.moe import MoELayer, Received, Router, Routing, RowCounts, Rows, Sent, TokenPiece, run_layer
from foldray.moe.contracts import Expert
from foldray.runtime import micro_batch
from tests.foldray.moe.test_layer import layer, spec
from tests.foldray.parity import make_recipe, train

ROUTERS: list[dict[str, Any]] = [
    {},
    {"capacity_factor": 0.75},
    {"capacity_factor": 0.75, "drop": "position"},
    {"score": "sigmoid", "normalize": True, "scale": 2.5},
]


class PlainExchange:
    """The exchange of a single rank, where nothing travels."""

    def start_counts(self, sent: Sent) -> Received:
        rows_E = start_reading(sent.rows_E)()
        return Received.of(RowCounts([[rows_E]], [sum(rows_E)]))

    equal_counts = start_counts

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        return Pending([], rows)

    def start_back(self, rows: Pending, sent: Sent, received: Received, room: int | None = None) -> Pending:
        return rows


class PlainLayer:
    """The simplest layer for one rank. It computes row by row in ordinary autograd, and tests compare other layers with it.

    Args:
        router: chooses experts.
        experts: one function [n, H] → [n, H] for each global expert.
        shared: the shared expert, [B, s, H] → [B, s, H]; None if the layer has none.
    """

    def __init__(self, router: Router, experts: Sequence[Expert], shared: Expert | None = None):
        self.exchange, self.router, self.experts, self.shared = PlainExchange(), router, experts, shared

    def route(self, h_TH: torch.Tensor, piece: TokenPiece) -> Routing:
        return self.router(h_TH, piece)

    def dispatch_preprocess(self, h_TH: torch.Tensor, routing: Routing) -> tuple[Rows, Sent]:
        chosen, keep_TK = routing.expert_TK.tolist(), routing.keep_TK
        kept = [(t, k) for t, row in enumerate(chosen) for k in range(len(row)) if keep_TK is None or keep_TK[t, k]]
        slots = sorted(kept, key=lambda slot: chosen[slot[0]][slot[1]])
        rows_E = [sum(chosen[t][k] == expert for t, k in slots) for expert in range(len(self.experts))]
        return [torch.stack([h_TH[t] for t, _ in slots])], Sent(torch.tensor(rows_E), (slots, len(chosen)))

    def inside_node(self, sent: Sent, received: Received) -> None:
        """Have rows come to the ranks of their experts."""

    def run_experts(self, rows: Rows, received: Received) -> torch.Tensor:
        parts = rows[0].split(received.rows_by_expert)
        return torch.cat([expert(part_nH) for expert, part_nH in zip(self.experts, parts, strict=True)])

    def combine_postprocess(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        slots, tokens = sent.memory
        out = [y_NH.new_zeros(y_NH.shape[1]) for _ in range(tokens)]
        for y_H, (t, k) in zip(y_NH, slots, strict=True):
            out[t] = out[t] + weight_TK[t, k] * y_H
        return torch.stack(out)

    def experts_by_hand(self, received: Received) -> None:
        """Have autograd differentiate the experts."""

    def sums_by_hand(self, sent: Sent) -> None:
        """Have autograd differentiate the sums."""


def plain(made: MoELayer) -> PlainLayer:
    """Return the plain layer with the weights of a fast one."""

    def expert(number: int, x_nH: torch.Tensor) -> torch.Tensor:
        return reference_ffn(x_nH, made.experts.up[number], made.experts.down[number], made.experts.share.ffn)

    return PlainLayer(made.router, [partial(expert, number) for number in made.experts.ids], made.shared)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_fast_layer_gives_what_the_plain_one_gives(router: dict[str, Any]) -> None:
    made = layer(spec(router=router))
    x_BSH = torch.randn(3, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for each in (made, plain(made)):
        out_BSH, balance = run_layer(each, x_BSH)
        objective = out_BSH.square().sum() + balance.losses()[0] + balance.losses()[1]
        results.append([out_BSH, *torch.autograd.grad(objective, [x_BSH, *made.parameters()])])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.75, "drop": "position"}], ids=["dropless", "position"])
def test_training_runs_on_the_plain_layer(monkeypatch: pytest.MonkeyPatch, router: dict[str, Any]) -> None:
    """The runtime can schedule any layer that keeps the contract."""
    recipe = make_recipe(1, model={"router": router}, schedule={"kind": "one_a_one_m", "degree": 4})
    fast = train(0, recipe, 2)
    original, calls = micro_batch.MicroBatch._layer, []

    def swapped(self: Any, op: Any) -> PlainLayer:
        calls.append(op)
        return plain(original(self, op))  # type: ignore[arg-type]

    monkeypatch.setattr(micro_batch.MicroBatch, "_layer", swapped)
    slow = train(0, recipe, 2)
    assert calls
    for name, held in fast["weights"].items():
        torch.testing.assert_close(held.tensor, slow["weights"][name].tensor, rtol=1e-11, atol=1e-11)


def test_pieces_grow_into_the_tally_of_the_whole() -> None:
    made = layer(spec(router={"capacity_factor": 0.75, "drop": "position"}))
    x_BSH = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole, tally, keep = made.route(x_BSH.flatten(0, 1), TokenPiece(2)), None, []
    for piece_BsH in x_BSH.split([3, 5], dim=1):
        routing = made.route(piece_BsH.flatten(0, 1), TokenPiece(2, length=8, before=tally))
        again = made.route(piece_BsH.flatten(0, 1), TokenPiece(2, length=8, before=tally))
        assert torch.equal(routing.keep_TK, again.keep_TK), "routing changes nothing"
        tally = routing.tally if tally is None else tally + routing.tally
        keep.append(routing.keep_TK.view(2, -1, 2))
    assert torch.equal(torch.cat(keep, dim=1).flatten(0, 1), whole.keep_TK)
    assert torch.equal(tally.count_BE, whole.tally.count_BE)
    assert int(tally.dropped) == int(whole.tally.dropped) > 0
    torch.testing.assert_close(tally.score_BE, whole.tally.score_BE)
