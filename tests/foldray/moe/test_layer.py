"""The MoE layer as a whole: stages, backends, dropping, balance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.moe import Dispatcher, MoeBackend, MoELayer, Router, Routing
from foldray.moe.capacity import capacity, keep_within
from foldray.moe.torch_backend import TorchPermutation
from foldray.spec import ModelSpec
from tests.foldray.parity import MODEL, make_recipe, one_process, train, worst

GROUPS = Groups.create(Fold(1))


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{**MODEL, **changes})


def layer(model: ModelSpec, dtype: torch.dtype = torch.float64, **backend: Any) -> MoELayer:
    torch.manual_seed(0)
    made = MoELayer(model, GROUPS, MoeBackend(**backend), dtype=dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def naive(made: MoELayer, x_BSH: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, from the routing alone."""
    x_TH = x_BSH.flatten(0, 1)
    routing = made.router(x_TH, x_BSH.shape[0])
    out = torch.zeros_like(x_TH)
    for t in range(x_TH.shape[0]):
        for k in range(routing.expert_TK.shape[1]):
            if routing.keep_TK is None or routing.keep_TK[t, k]:
                e = routing.expert_TK[t, k]
                gate, value = (x_TH[t] @ made.experts.up[e]).chunk(2)
                out[t] += routing.weight_TK[t, k] * ((torch.nn.functional.silu(gate) * value) @ made.experts.down[e])
    return out.view_as(x_BSH)


@pytest.mark.parametrize(
    "router",
    [
        {},
        {"softmax": "before_topk", "normalize": True},
        {"score": "sigmoid", "normalize": True, "scale": 2.5, "bias_rate": 0.1},
        {"capacity_factor": 0.75},
        {"capacity_factor": 0.75, "drop": "position"},
        {"capacity_factor": 0.75, "pad": True},
        {"capacity_factor": 4.0, "pad": True},
    ],
)
def test_the_layer_is_the_weighted_sum_of_its_experts(router: dict) -> None:
    made = layer(spec(router=router))
    if made.router.spec.bias_rate:
        made.router.bias += torch.tensor([5.0, 0, 0, -5.0])
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    out, stats = made(x)
    torch.testing.assert_close(out, naive(made, x))
    assert int(stats.count_E.sum()) == 3 * 7 * 2


def test_padding_changes_neither_output_nor_gradients() -> None:
    results = []
    for pad in (False, True):
        made = layer(spec(router={"capacity_factor": 0.8, "pad": pad}))
        x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        made(x)[0].square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in made.parameters())])
    for ragged, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, ragged)


def test_padding_beyond_the_tokens_is_clamped() -> None:
    made = layer(spec(experts=2, router={"capacity_factor": 100.0, "pad": True}))
    x_TH = torch.randn(5, 16, dtype=torch.float64)
    rows, counts, _ = made.dispatcher.permutation.encode(x_TH, made.router(x_TH, 1))
    assert counts.tolist() == [5, 5]
    assert rows.shape == (10, 16)


def test_stages_bring_every_row_to_its_expert_and_back(ranks) -> None:
    """Identity experts and rank-distinct tokens: what comes back is the token times the sum of its weights."""
    ranks(4).run(_round_trip)


def _tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's tokens (ragged over ranks, their rank in the last column), experts and weights."""
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(5 + rank, 16, generator=generator, dtype=torch.float64)
    x_TH[:, -1] = rank
    expert_TK = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in x_TH])
    if rank == 1:
        expert_TK[:] = torch.tensor([0, 6, 3])  # leaves five experts without a row of this rank
    return x_TH, expert_TK, torch.rand(expert_TK.shape, generator=generator, dtype=torch.float64)


def _round_trip(rank: int) -> None:
    for ep in (1, 2, 4):
        groups = Groups.create(Fold(4, ep=ep), rank)
        x_TH, expert_TK, weight_TK = _tokens(rank)
        count_E = torch.bincount(expert_TK.flatten(), minlength=8)
        routing = Routing(expert_TK, weight_TK, None, None, count_E, torch.zeros(()), torch.zeros(()))
        stages = Dispatcher(groups, TorchPermutation())
        rows, plan = stages.dispatch_preprocess(x_TH, routing)
        plan = stages.exchange_counts(plan)
        rows = stages.dispatch_postprocess(stages.dispatch(rows, plan), plan)
        first = groups.ep_rank * 8 // ep
        for expert, block in enumerate(rows.split(plan.rows_per_expert), start=first):
            # Expert-major: the tokens that chose this expert, rank by rank of the EP group, in their order.
            expected = [x[(experts == expert).any(1)] for x, experts, _ in map(_tokens, groups.tokens.ranks)]
            torch.testing.assert_close(block, torch.cat(expected), rtol=0, atol=0)
        back = stages.combine_postprocess(stages.combine(stages.combine_preprocess(rows, plan), plan), plan)
        torch.testing.assert_close(back, x_TH * weight_TK.sum(1, keepdim=True))
        groups.close()


def test_counts_must_be_exchanged_first() -> None:
    made = layer(spec())
    x_TH = torch.randn(4, 16, dtype=torch.float64)
    rows, plan = made.dispatcher.dispatch_preprocess(x_TH, made.router(x_TH, 1))
    with pytest.raises(RuntimeError, match="counts must be exchanged"):
        made.dispatcher.dispatch(rows, plan)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "factor", "expected"), [(10, 2, 4, 1.0, 5), (10, 2, 4, 1.25, 7), (4, 2, 4, 9.0, 4)]
)
def test_capacity_is_the_papers(tokens: int, topk: int, experts: int, factor: float, expected: int) -> None:
    assert capacity(tokens, topk, experts, factor) == expected == min(tokens, math.ceil(tokens * topk / experts * factor))


def test_dropping_keeps_the_most_probable_or_the_earliest_of_each_sequence() -> None:
    expert_TK = torch.tensor([[0], [0], [0], [1], [0], [0], [1], [1]])  # two sequences of four
    score_TK = torch.tensor([[0.1], [0.9], [0.5], [0.2], [0.3], [0.3], [0.1], [0.2]])
    by_score = keep_within(2, expert_TK, score_TK, 2, 2, "probability").flatten().tolist()
    by_place = keep_within(1, expert_TK, score_TK, 2, 2, "position").flatten().tolist()
    assert by_score == [False, True, True, True, True, True, True, True]
    assert by_place == [True, False, False, True, True, False, True, False]


def test_dropping_and_balance_do_not_depend_on_the_micro_batch() -> None:
    router = Router(spec(router={"capacity_factor": 0.7}), dtype=torch.float64)
    torch.nn.init.normal_(router.weight)
    x_BSH = torch.randn(6, 8, 16, dtype=torch.float64)
    whole = router(x_BSH.flatten(0, 1), 6)
    parts = [router(x_SH, 1) for x_SH in x_BSH]
    assert whole.keep_TK.tolist() == torch.cat([part.keep_TK for part in parts]).tolist()
    torch.testing.assert_close(whole.balance_loss, torch.stack([part.balance_loss for part in parts]).mean())
    assert int(whole.dropped) == sum(int(part.dropped) for part in parts) > 0


def test_the_balance_loss_is_one_when_even_and_E_when_one_expert_takes_all() -> None:
    router = Router(spec(topk=1), dtype=torch.float64)
    torch.nn.init.zeros_(router.weight)
    even = torch.eye(4, dtype=torch.float64).repeat(2, 1) * 50
    with torch.no_grad():
        router.weight[:4] = torch.eye(4, dtype=torch.float64)
    x_TH = torch.zeros(8, 16, dtype=torch.float64)
    x_TH[:, :4] = even
    assert router(x_TH, 1).balance_loss.item() == pytest.approx(1.0)
    x_TH[:, :4] = torch.tensor([50.0, 0, 0, 0])
    assert router(x_TH, 1).balance_loss.item() == pytest.approx(4.0)


def test_the_bias_moves_towards_even_use_by_its_rate_alone() -> None:
    router = Router(spec(router={"score": "sigmoid", "bias_rate": 0.01}))
    router.update_bias(torch.tensor([10, 0, 5, 5]))
    torch.testing.assert_close(router.bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]))


def test_the_router_computes_in_float32_at_least() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        made = layer(spec(), dtype)
        out, stats = made(torch.randn(1, 5, 16, dtype=dtype))
        assert out.dtype == dtype
        assert stats.balance_loss.dtype == stats.z_loss.dtype == made.router.bias.dtype == expected


def _backend(name: str, model: ModelSpec) -> MoeBackend:
    if name == "tutel":
        pytest.importorskip("tutel", reason="Tutel is not installed", exc_type=Exception)
        from foldray.moe.tutel import TutelPermutation

        return MoeBackend(permutation=TutelPermutation())
    from trainers.deepspeed_gates import deepspeed_gate

    return MoeBackend(gate=deepspeed_gate(model))


@pytest.mark.parametrize("name", ["tutel", "deepspeed"])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.75}, {"capacity_factor": 1.5, "pad": True}])
def test_backends_give_the_same_numbers(name: str, topk: int, router: dict) -> None:
    model = spec(topk=topk, router={**router, "softmax": "before_topk", "normalize": topk > 1})
    results = []
    for backend in (MoeBackend(), _backend(name, model)):
        torch.manual_seed(0)
        made = MoELayer(model, GROUPS, backend)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out, stats = made(x)
        (out.square().sum() + stats.balance_loss).backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in made.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tutel", "deepspeed"])
def test_backends_train_under_expert_parallelism(ranks, name: str) -> None:
    if name == "tutel":
        _backend(name, spec())
    recipe = make_recipe(4, 2, precision="float32", moe={"backend": name, "experts": "grouped"})
    found, reference = ranks(4).run(train, recipe, 2), one_process(recipe, steps=2)
    difference, where = worst(found, reference, relative=True)
    assert difference <= 1e-5, where
