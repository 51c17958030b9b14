"""The MoE layer against its experts one by one, and its backends against each other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model.initial import parameters_as
from foldray.moe import MoeBackend, MoELayer, TokenPiece
from foldray.moe.router import TopKGate
from tests.foldray.parity import MODEL, check_equal, make_recipe, one_process, train
from tests.optional import tutel_or_skip

GROUPS = Groups.create(Fold(1))


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{**MODEL, **changes})


def layer(model: ModelSpec, dtype: torch.dtype = torch.float64, **backend: Any) -> MoELayer:
    torch.manual_seed(0)
    with parameters_as("cpu", dtype):
        made = MoELayer(Ownership(model, Fold(1)), model.moe_layers[0], GROUPS, MoeBackend(**backend))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def naive(made: MoELayer, x_BSH: torch.Tensor) -> torch.Tensor:
    """Compute the output token by token and expert by expert, from the routing."""
    x_TH = x_BSH.flatten(0, 1)
    routing, _ = made.router.whole(x_TH, x_BSH.shape[0])
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
        made.router.bias += torch.tensor([5.0, 0, 0, 0, 0, 0, 0, -5.0])
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    out, balance = made(x)
    torch.testing.assert_close(out, naive(made, x))
    assert int(balance.tally.count_BE.sum()) == 3 * 7 * 2


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
    rows, sent = made.permutation.encode(x_TH, made.router.whole(x_TH, 1)[0])
    assert sent.rows_E.tolist() == [5, 5]
    assert rows.shape == (10, 16)


def test_the_router_computes_in_float32_at_least() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        made = layer(spec(), dtype)
        out, balance_of = made(torch.randn(1, 5, 16, dtype=dtype))
        assert out.dtype == dtype
        balance, z = balance_of.losses()
        assert balance.dtype == z.dtype == made.router.bias.dtype == expected


def _backend(name: str, model: ModelSpec) -> MoeBackend:
    if name == "tutel":
        tutel_or_skip()
        from foldray.moe.tutel import TutelPermutation, tutel_gate

        return MoeBackend(gate=tutel_gate(model), permutation=TutelPermutation())
    from trainers.worker.engines import deepspeed_gate

    return MoeBackend(gate=deepspeed_gate(model))


@pytest.mark.parametrize("name", ["tutel", "deepspeed"])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("router", [{}, {"capacity_factor": 0.75}, {"capacity_factor": 1.5, "pad": True}])
def test_backends_give_the_same_numbers(name: str, topk: int, router: dict) -> None:
    model = spec(topk=topk, router={**router, "softmax": "before_topk", "normalize": topk > 1})
    results = []
    for backend in (MoeBackend(), _backend(name, model)):
        torch.manual_seed(0)
        made = MoELayer(Ownership(model, Fold(1)), model.moe_layers[0], GROUPS, backend)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out, balance = made(x)
        (out.square().sum() + balance.losses()[0]).backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in made.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("topk", [1, 2])
def test_deepspeeds_gate_takes_no_tokens(topk: int) -> None:
    model = spec(topk=topk, router={"softmax": "before_topk", "normalize": topk > 1})
    logits_TE = torch.zeros((0, model.experts), requires_grad=True)
    expert_TK, weight_TK = _backend("deepspeed", model).gate(logits_TE, torch.zeros(model.experts))
    weight_TK.sum().backward()
    assert expert_TK.shape == weight_TK.shape == (0, topk)
    assert logits_TE.grad.shape == logits_TE.shape


@pytest.mark.parametrize(
    ("topk", "router", "applies"),
    [
        (2, {}, True),
        (2, {"softmax": "before_topk", "normalize": True, "scale": 2.5}, True),
        (2, {"softmax": "before_topk"}, True),
        (1, {"softmax": "before_topk"}, True),
        (1, {}, False),  # Tutel does not rescale the weight of a single expert
        (2, {"score": "sigmoid", "normalize": True}, False),  # Tutel knows no selection bias
    ],
)
def test_tutels_gate_chooses_like_our_own(topk: int, router: dict, applies: bool) -> None:
    tutel_or_skip()
    from foldray.moe.tutel import tutel_gate

    model = spec(topk=topk, router=router)
    gate = tutel_gate(model)
    assert (gate is not None) == applies
    if gate is None:
        return
    logits, grads = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), []
    handlers = list(logging.root.handlers)
    for each in (TopKGate(model), gate):
        given = logits.clone().requires_grad_()
        expert_TK, weight_TK = each(given, torch.zeros(8))
        (weight_TK * torch.arange(1.0, topk + 1)).sum().backward()
        grads.append((expert_TK, weight_TK.detach(), given.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(theirs, ours)
    assert logging.root.handlers == handlers


@pytest.mark.parametrize("topk", [1, 3])
def test_tutel_copies_bfloat16_exactly_and_rounds_sums_once(topk: int) -> None:
    model = spec(topk=topk, router={"capacity_factor": 0.75})
    results = []
    for backend in (MoeBackend(), MoeBackend(permutation=_backend("tutel", model).permutation)):
        made = layer(model, torch.bfloat16, permutation=backend.permutation)
        x_TH = torch.randn(24, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        routing = made.router(x_TH, TokenPiece(2))
        (rows_NH,), sent = made.dispatch_preprocess(x_TH, routing)
        rows_by_expert = [part[part.abs().sum(1) > 0] for part in rows_NH.split(sent.rows_E.tolist())]
        y_TH = made.combine_postprocess(rows_NH, sent, routing.weight_TK)
        y_TH.float().square().sum().backward()
        results.append([torch.cat(rows_by_expert).detach(), y_TH.detach(), x_TH.grad, made.router.weight.grad])
    (rows, *ours), (tutel_rows, *theirs) = results
    assert tutel_rows.dtype == torch.bfloat16
    assert torch.equal(tutel_rows, rows)
    for expected, found in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.gate(3)
@pytest.mark.parametrize("kind", ["sequential", "moe_only", "aaam", "one_a_one_m", "stream"])
@pytest.mark.parametrize("name", ["tutel", "deepspeed"])
def test_backends_train_under_expert_parallelism(ranks, name: str, kind: str) -> None:
    if name == "tutel":
        _backend(name, spec())
    schedule = {"kind": kind, "degree": 1 if kind == "sequential" else 4}
    recipe = make_recipe(4, 2, precision="float32", moe={"backend": name, "experts": "grouped"}, schedule=schedule)
    check_equal(ranks(4).run(train, recipe, 2), one_process(recipe, steps=2), 1e-5, relative=True)
