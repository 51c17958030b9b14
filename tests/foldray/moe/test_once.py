"""Rows that travel once to every rank give the same sums as one row for every assignment."""

from __future__ import annotations

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels.experts import reference_ffn
from foldray.moe import Experts, Routing, Tally
from foldray.moe.once import decode, encode, run_experts
from tests.foldray.moe.test_layer import spec

GROUPS = Groups.create(Fold(1))
EXPERTS, HIDDEN, TOKENS = 6, 8, 11


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("dropping", [False, True])
def test_sums_and_gradients_are_those_of_the_experts_one_by_one(ranks: int, topk: int, dropping: bool) -> None:
    torch.manual_seed(ranks * 10 + topk)
    share = spec(experts=EXPERTS, hidden=HIDDEN).block(1).moe
    assert share
    made = [
        Experts(range(first, first + EXPERTS // ranks), share.expert, HIDDEN, GROUPS.expert_slices, dtype=torch.float64)
        for first in range(0, EXPERTS, EXPERTS // ranks)
    ]
    for each in made:
        for parameter in each.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    expert_TK = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :topk].clamp(max=EXPERTS - 2)  # the last expert has few tokens or none
    weight_TK = torch.rand(TOKENS, topk, dtype=torch.float64, requires_grad=True)
    keep_TK = torch.rand(TOKENS, topk) < 0.6 if dropping else None
    count = torch.zeros(1, EXPERTS, dtype=torch.int64)
    routing = Routing(
        expert_TK, weight_TK, keep_TK, None, Tally(count, torch.zeros(1, EXPERTS), torch.zeros(()), count.sum(), None)
    )

    rows = encode(x_TH, routing, EXPERTS, ranks)
    sent = rows.goes_TR.sum(0).tolist()
    assert len(rows.rows_NH) == sum(sent) <= TOKENS * min(ranks, topk)
    parts = zip(made, rows.rows_NH.split(sent), rows.weight_NK.split(sent), rows.expert_NK.split(sent), strict=True)
    out_TH = decode(torch.cat([run_experts(*part) for part in parts]), rows.goes_TR)

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
