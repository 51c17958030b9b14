"""Rows that travel once to every rank give the same sums as one row for every assignment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foldray.blueprint import Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels.experts import reference_ffn
from foldray.moe import Experts, MoeBackend, MoELayer, Routing, Tally, run_layer
from foldray.moe.once import Chosen, OncePerRank, copy_to_ranks, decode, encode
from tests.foldray.moe.test_layer import spec

GROUPS = Groups.create(Fold(1))
EXPERTS, HIDDEN, TOKENS = 6, 8, 11


def routing_of(topk: int, dropping: bool) -> Routing:
    """Return random assignments. The last expert has few tokens or none."""
    expert_TK = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :topk].clamp(max=EXPERTS - 2)
    weight_TK = torch.rand(TOKENS, topk, dtype=torch.float64, requires_grad=True)
    keep_TK = torch.rand(TOKENS, topk) < 0.6 if dropping else None
    count = torch.zeros(1, EXPERTS, dtype=torch.int64)
    tally = Tally(count, torch.zeros(1, EXPERTS), torch.zeros(()), count.sum(), None)
    return Routing(expert_TK, weight_TK, keep_TK, None, tally)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("dropping", [False, True])
def test_sums_and_gradients_are_those_of_the_experts_one_by_one(ranks: int, topk: int, dropping: bool) -> None:
    torch.manual_seed(ranks * 10 + topk)
    share = spec(experts=EXPERTS, hidden=HIDDEN).block(1).moe
    assert share
    made = [
        Experts(range(first, first + EXPERTS // ranks), share.expert, HIDDEN, GROUPS.expert_slices).double()
        for first in range(0, EXPERTS, EXPERTS // ranks)
    ]
    for each in made:
        for parameter in each.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    routing = routing_of(topk, dropping)
    expert_TK, weight_TK, keep_TK = routing.expert_TK, routing.weight_TK, routing.keep_TK

    rows = encode(x_TH, Chosen.of(routing), EXPERTS, ranks)
    sent = rows.goes_TR.sum(0).tolist()
    assert len(rows.rows_NH) == sum(sent) <= TOKENS * min(ranks, topk)
    parts = zip(made, rows.rows_NH.split(sent), rows.weight_NK.split(sent), rows.expert_NK.split(sent), strict=True)
    out_TH = decode(torch.cat([each.weighted_sum(*part) for each, *part in parts]), rows.goes_TR)

    expected_TH = torch.zeros_like(x_TH)
    for t in range(TOKENS):
        for k in range(topk):
            if keep_TK is None or keep_TK[t, k]:
                owner, local = divmod(int(expert_TK[t, k]), EXPERTS // ranks)
                row = reference_ffn(x_TH[t : t + 1], made[owner].up[local], made[owner].down[local], share.expert.ffn)
                expected_TH = expected_TH.index_add(0, torch.tensor([t]), weight_TK[t, k] * row)
    assert (out_TH - expected_TH).abs().max() <= 1e-12
    leaves = [x_TH, weight_TK, *(parameter for each in made for parameter in each.parameters())]
    slope_TH = torch.randn_like(out_TH)
    found = torch.autograd.grad(out_TH, leaves, slope_TH, retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad(expected_TH, leaves, slope_TH, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (0 if ours is None else ours).sub(0 if theirs is None else theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("dropping", [False, True])
def test_room_for_more_rows_changes_none(ranks: int, topk: int, dropping: bool) -> None:
    torch.manual_seed(ranks * 10 + topk)
    x_TH, routing = torch.randn(TOKENS, HIDDEN), routing_of(topk, dropping)
    exact = encode(x_TH, Chosen.of(routing), EXPERTS, ranks)
    (rows_NH, weight_NK, expert_NK), sent = OncePerRank(ranks).encode(x_TH, routing)
    count = len(exact.rows_NH)
    assert len(rows_NH) == sent.room == TOKENS * min(topk, ranks) >= count
    for wide, each in ((rows_NH, exact.rows_NH), (weight_NK, exact.weight_NK), (expert_NK, exact.expert_NK)):
        assert torch.equal(wide[:count], each)
    assert not weight_NK[count:].any()
    assert bool((expert_NK[count:] == -1).all())
    assert sent.rows_R is not None
    assert sent.rows_R.tolist() == exact.goes_TR.sum(0).tolist()
    kept = routing.expert_TK.flatten() if routing.keep_TK is None else routing.expert_TK[routing.keep_TK]
    assert sent.rows_E.tolist() == kept.bincount(minlength=EXPERTS).tolist()
    y_NH = torch.randn(count, HIDDEN, dtype=torch.float64, requires_grad=True)
    out_TH = OncePerRank(ranks).decode(y_NH, sent)
    torch.testing.assert_close(out_TH, decode(y_NH, exact.goes_TR), rtol=0, atol=1e-12)
    slope_TH = torch.randn_like(out_TH)
    (gradient_NH,) = torch.autograd.grad(out_TH, y_NH, slope_TH)
    assert torch.equal(gradient_NH, copy_to_ranks(slope_TH, exact.goes_TR))


def draw_weights(made: MoELayer, groups: Groups) -> None:
    """Draw the weights of a layer, and begin random numbers of this rank's own."""
    torch.manual_seed(groups.coordinate["moe"]["ep"])  # ranks that share experts have the same
    for parameter in made.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.manual_seed(7)
    torch.nn.init.normal_(made.router.weight, std=0.3)
    torch.manual_seed(100 + groups.rank)


def both_ways(rank: int, fold: Fold, router: dict[str, Any], tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return output and gradients of a layer with a row for each assignment, and with one for each rank."""
    found = []
    for way, own in (("assignment", replace(fold, ep_inside=1)), ("rank", fold)):
        groups = Groups.create(own, rank)
        model = spec(topk=4, shared_hidden=0, router=router)
        backend = MoeBackend(experts="loop", dispatch=way)
        made = MoELayer(Ownership(model, own), model.moe_layers[0], groups, backend).double()
        draw_weights(made, groups)
        x_BSH = torch.randn(2, tokens * (rank % 3 != 1), 16, dtype=torch.float64, requires_grad=True)
        out_BSH, _ = run_layer(made, x_BSH)
        weights = list(made.parameters())
        gradients = torch.autograd.grad(out_BSH, [x_BSH, *weights], torch.randn_like(out_BSH))
        found.append([out_BSH.detach(), *gradients])
        groups.close()
    return found[0], found[1]


@pytest.mark.gate(2)
@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.5}], ids=["dropless", "dropping"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 8},
        {"ep": 4, "etp": 2},
        {"ep": 2, "etp": 2},
        {"etp": 4},
        {"ep": 8, "ep_inside": 4},
        {"ep": 4, "etp": 2, "ep_inside": 2},
        {"ep": 4, "ep_inside": 4},
    ],
    ids=str,
)
def test_a_layer_is_the_same_both_ways(ranks: Any, sizes: dict[str, int], router: dict[str, Any]) -> None:
    """Some ranks have no tokens."""
    for by_assignment, by_rank in ranks(8).run(both_ways, Fold(8, **sizes), router, 5):
        for one, other in zip(by_assignment, by_rank, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-11)
