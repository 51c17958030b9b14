"""Tests of the kernels of routers against torch's own path, on a GPU or on Triton's interpreter (`test_fused.py` says how)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.blueprint import ModelSpec, RouterSpec
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels import autograd, fused, routing
from foldray.kernels.permutation import pad_by_expert, sort_by_expert
from foldray.moe.router import Router, TokenPiece, TopKGate, scores
from tests.foldray.kernels.test_fused import DEVICE, needs_kernels, values

SPECS: dict[str, dict[str, Any]] = {
    "softmax": {"softmax": "before_topk"},
    "softmax, normalized": {"softmax": "before_topk", "normalize": True, "scale": 2.5},
    "softmax last": {"scale": 1.5},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, normalized": {"score": "sigmoid", "normalize": True, "scale": 0.5},
}
SIZES = [(1, 1, 4, 1), (2, 5, 7, 3), (3, 40, 8, 2), (1, 300, 8, 8), (2, 17, 130, 6), (1, 3, 1000, 2)]
"""Sequences, tokens of each, experts, experts of a token."""


@pytest.fixture
def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute with tensors on the CPU, except those in float64, which are what to expect."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "fits", lambda *tensors: all(x.dtype != torch.float64 for x in tensors))
        monkeypatch.setattr(routing, "sorts", lambda expert_TK: True)


def expected(logits_TE: torch.Tensor, bias_E: torch.Tensor, sequences: int, topk: int, spec: RouterSpec) -> list[torch.Tensor]:
    """Return what torch computes: experts, weights, counts, scores and z."""
    model = ModelSpec(preset="tiny", experts=logits_TE.shape[1], topk=topk, router=spec)
    expert_TK, weight_TK = TopKGate(model)(logits_TE, bias_E)
    one_hot = torch.nn.functional.one_hot(expert_TK, logits_TE.shape[1]).sum(1)
    by_sequence = [x.unflatten(0, (sequences, -1)).sum(1) for x in (one_hot, scores(logits_TE, spec))]
    return [expert_TK, weight_TK, *by_sequence, logits_TE.logsumexp(-1).square().sum()]


def rule_of(spec: RouterSpec, topk: int) -> routing.GateRule:
    rule = TopKGate(ModelSpec(preset="tiny", experts=8 * topk, topk=topk, router=spec)).rule
    assert rule is not None
    return rule


@needs_kernels
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gate(through_kernels, name: str, size: tuple[int, ...]) -> None:
    sequences, length, experts, topk = size
    spec, tokens = RouterSpec(**SPECS[name]), sequences * length
    logits_TE = (values(tokens, experts) * 3).requires_grad_()
    bias_E = values(experts, seed=2) * 0.2
    wide_TE = logits_TE.detach().double().requires_grad_()
    got = routing.gate(logits_TE, bias_E, sequences, rule_of(spec, topk))
    want = expected(wide_TE, bias_E.double(), sequences, topk, spec)
    assert torch.equal(got.expert_TK, want[0])
    assert torch.equal(got.count_BE, want[2])
    for one, other in zip((got.weight_TK, got.score_BE, got.z), (want[1], want[3], want[4]), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    slopes = values(tokens, topk, seed=3), values(sequences, experts, seed=4), values(seed=5)
    for some in (slice(3), slice(1), slice(1, 2), slice(2, 3)):  # all together, and each alone
        found = routing.gate(logits_TE, bias_E, sequences, rule_of(spec, topk))
        ends, wide = (found.weight_TK, found.score_BE, found.z), expected(wide_TE, bias_E.double(), sequences, topk, spec)
        (slope,) = torch.autograd.grad(ends[some], logits_TE, slopes[some])
        (want_TE,) = torch.autograd.grad([wide[1], *wide[3:]][some], wide_TE, [each.double() for each in slopes[some]])
        torch.testing.assert_close(slope.double(), want_TE, rtol=1e-4, atol=2e-5)


@needs_kernels
def test_sums_of_many_programs(through_kernels) -> None:
    """There are so many programs that their sums are added up in several turns."""
    logits_TE = values(7 * 600, 1000)
    got = routing.gate(logits_TE, values(1000, seed=2), 7, rule_of(RouterSpec(), 2))
    want = expected(logits_TE.double(), values(1000, seed=2).double(), 7, 2, RouterSpec())
    assert torch.equal(got.count_BE, want[2])
    torch.testing.assert_close(got.score_BE.double(), want[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.z.double(), want[4], rtol=1e-5, atol=0.0)


@needs_kernels
def test_of_equal_scores_the_first_are_chosen(through_kernels) -> None:
    logits_TE = torch.zeros(3, 12, device=DEVICE)
    logits_TE[1, 7] = 1.0
    logits_TE[2] = -torch.inf
    logits_TE[2, 5] = 0.0
    found = routing.gate(logits_TE, torch.zeros(12, device=DEVICE), 1, rule_of(RouterSpec(), 3))
    assert found.expert_TK.tolist() == [[0, 1, 2], [7, 0, 1], [5, 0, 1]]
    assert found.weight_TK[2].tolist() == [1.0, 0.0, 0.0]


@needs_kernels
@pytest.mark.parametrize("name", SPECS)
def test_numbers_that_are_not_finite_choose_different_experts(through_kernels, name: str) -> None:
    """What comes of them is not finite either, but no kernel after this one may write outside of its tensors."""
    logits_TE = values(4, 5)
    logits_TE[0], logits_TE[1, 2], logits_TE[2, 3], logits_TE[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    found = routing.gate(logits_TE, torch.zeros(5, device=DEVICE), 2, rule_of(RouterSpec(**SPECS[name]), 4))
    assert found.expert_TK.min() >= 0
    assert found.expert_TK.max() < 5
    assert all(len(set(row)) == 4 for row in found.expert_TK.tolist())
    if "softmax" not in name or "last" in name:  # the softmax of a token with NaN is NaN for all
        assert found.expert_TK[1, 0] == 2
    assert not found.z.isfinite()


@needs_kernels
def test_a_gate_gives_the_same_bits_again(through_kernels) -> None:
    logits_TE, bias_E, rule = values(600, 16), values(16, seed=2), rule_of(RouterSpec(), 4)
    assert all(map(torch.equal, routing.gate(logits_TE, bias_E, 2, rule), routing.gate(logits_TE, bias_E, 2, rule)))


def routed(dtype: torch.dtype, spec: dict[str, Any]) -> list[torch.Tensor]:
    """Return what a router finds in two pieces of two sequences, and its gradients."""
    model = ModelSpec(preset="tiny", hidden=24, experts=6, topk=2, router=RouterSpec(**spec))
    router = Router(model, Groups.create(Fold(1))).to(DEVICE, dtype)
    with torch.no_grad():
        router.weight.copy_(values(24, 6, dtype=torch.float32))
        router.bias.copy_(values(6, seed=6) * 0.1)
    x_TH, before, found, objective = values(20, 24, dtype=torch.float32).to(dtype).requires_grad_(), None, [], 0.0
    for number, piece_TH in enumerate(x_TH.split(10)):
        routing_ = router(piece_TH, TokenPiece(2, 10, before))
        before = routing_.tally if before is None else before + routing_.tally
        found += [routing_.expert_TK, routing_.weight_TK, *([] if routing_.keep_TK is None else [routing_.keep_TK])]
        objective = objective + (routing_.weight_TK * values(10, 2, seed=number)).sum()
    objective = objective + router.balance(before, 10).objective(model.router)
    return [*found, *before.tensors, *torch.autograd.grad(objective, [x_TH, router.weight])]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        *SPECS.values(),
        {"capacity_factor": 0.6, "drop": "position"},
        {"score": "sigmoid", "groups": 3, "topk_groups": 2},
        {"skew": 0.5},
    ],
    ids=str,
)
def test_a_router_with_the_kernels(through_kernels, monkeypatch, dtype: torch.dtype, spec: dict[str, Any]) -> None:
    spec = {"balance_loss": 0.1, "z_loss": 0.01, **spec}
    found = routed(dtype, spec)
    monkeypatch.setattr(routing, "gates", lambda _: False)
    for one, other in zip(found, routed(dtype, spec), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def assignments(tokens: int, topk: int, experts: int, busy: bool) -> torch.Tensor:
    """Return different experts of each token: of all experts, or of few of them."""
    some = min(experts, topk + 1) if busy else experts
    generator = torch.Generator().manual_seed(tokens + experts)
    order = torch.rand(tokens, some, generator=generator).argsort(1)[:, :topk]
    return (order + (experts - some) // 2).to(DEVICE)


SORTED = [
    (1, 1, 1, False),
    (5, 2, 4, False),
    (100, 3, 7, True),
    (65, 8, 130, False),
    (33, 2, 1000, True),
    (0, 2, 4, False),
    (6000, 3, 5, False),
]
"""Tokens, experts of a token, experts, and whether most experts are idle."""


@needs_kernels
@pytest.mark.parametrize("size", SORTED, ids=str)
@pytest.mark.parametrize("drop", [None, 0.0, 0.4, 1.0])
def test_sort(through_kernels, monkeypatch, size: tuple[int, int, int, bool], drop: float | None) -> None:
    expert_TK = assignments(*size)
    keep_TK = None if drop is None else torch.rand(expert_TK.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) >= drop
    found = sort_by_expert(expert_TK, keep_TK, size[2])
    known = sort_by_expert(expert_TK, keep_TK, size[2], kept=len(found[0]))
    most = int(found[2].max())
    padded = pad_by_expert(expert_TK, keep_TK, size[2], most + 2)
    monkeypatch.setattr(routing, "sorts", lambda _: False)
    for one, again, other in zip(found, known, sort_by_expert(expert_TK, keep_TK, size[2]), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(again, other)
    assert all(map(torch.equal, padded, pad_by_expert(expert_TK, keep_TK, size[2], most + 2)))


@needs_kernels
@pytest.mark.parametrize("sizes", [(1, 1), (3, 8), (2, 1500)], ids=str)
def test_halves(through_kernels, monkeypatch, sizes: tuple[int, int]) -> None:
    x_TE = values(*sizes) * 100
    found_TE = autograd._halves(x_TE)
    high_TE, low_TE = found_TE.double().chunk(2, 1)
    assert found_TE.dtype == torch.bfloat16
    torch.testing.assert_close(high_TE + low_TE, x_TE.double(), rtol=2**-14, atol=0.0)
    torch.testing.assert_close(high_TE, x_TE.double(), rtol=2**-7, atol=0.0)


@needs_kernels
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0], [1], [0, 7, 0, 2]], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (40, 130)], ids=str)
def test_add_groups(counts: list[int], shape: tuple[int, int]) -> None:
    total = values(len(counts), *shape)
    gradient = values(len(counts), *shape, dtype=torch.bfloat16, seed=2)
    want = total.clone()
    for e, count in enumerate(counts):
        if count:
            want[e] += gradient[e]
        else:
            gradient[e] = torch.nan
    fused.add_groups(total, gradient, torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32))
    assert torch.equal(total, want)
