"""The balance loss in each scope, the z-loss and the selection bias are the formulas of their papers, which loops compute."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch

from foldray.blueprint import Layout, ModelSpec, RouterSpec
from foldray.blueprint.sections import check_router
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.moe import Router
from foldray.moe.balance import bias_change
from foldray.moe.quantile import BINS, add_margins, balanced_bias
from tests.foldray.parity import MODEL
from tests.foldray.plain import balanced

SEQUENCES, LENGTH, MICRO_BATCH, STEPS, TOPK, EXPERTS, RATE = 8, 8, 2, 3, 2, 8, 0.05
FOLDS: list[dict[str, int]] = [
    {"ep": 4}, {"tp": 2, "ep": 2}, {"cp": 2, "etp": 2}, {"tp": 2, "cp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "ep": 2},
]  # fmt: skip
SCOPES, UPDATES = ("sequence", "batch", "global_batch"), ("sign", "centered", "proportional", "quantile")


class Step(NamedTuple):
    """The losses of a step, mean over its sequences, and the bias after it."""

    balance: float
    z: float
    bias_E: list[float]


def hidden(step: int) -> torch.Tensor:
    shape, generator = (SEQUENCES, LENGTH, MODEL["hidden"]), torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def router_of(groups: Groups, scope: str, update: str) -> Router:
    rule = {"score": "sigmoid", "bias_rate": RATE, "balance_loss": 1.0, "balance_scope": scope, "bias_update": update}
    made = Router(ModelSpec(**{**MODEL, "topk": TOPK, "experts": EXPERTS, "router": rule}), groups).double()
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(9))
    return made


def routed(rank: int, scope: str, update: str) -> list[list[Step]]:
    """Return the steps that the ranks of every fold make together."""
    found = []
    for sizes in FOLDS:
        groups = Groups.create(fold := Fold(4, **sizes), rank)
        router, place = router_of(groups, scope, update), groups.coordinate["attention"]
        piece = Layout(fold.cp, fold.tp, place["cp"], place["tp"]).piece(LENGTH)
        steps = []
        for step in range(STEPS):
            own = hidden(step)[:, piece].split(MICRO_BATCH)[place["dp"] :: fold.dp]
            balances = [router.whole(x_BsH.flatten(0, 1), MICRO_BATCH)[1] for x_BsH in own]
            terms = torch.stack([torch.stack(balance.losses()) for balance in balances]).sum(0).detach() / SEQUENCES
            count_E = torch.stack([balance.tally.count_BE.sum(0) for balance in balances]).sum(0)
            balance, z = groups.replicated_gradients.all_reduce(terms).tolist()
            router.margin_EQ.copy_(groups.replicated_gradients.all_reduce(router.margin_EQ.clone()))
            router.update(groups.replicated_gradients.all_reduce(count_E))
            steps.append(Step(balance, z, router.bias.tolist()))
        found.append(steps)
        groups.close()
    return found


def expected(scope: str, update: str, dp: int) -> list[Step]:
    weight_HE, bias_E = router_of(Groups.create(Fold(1)), scope, update).weight.detach(), [0.0] * EXPERTS
    earlier_E, steps = [1.0] * EXPERTS, []
    for step in range(STEPS):
        logits_BLE = (hidden(step) @ weight_HE).tolist()
        counts, margins = [[0.0] * EXPERTS for _ in range(SEQUENCES)], list[list[float]]()
        scores, squares = [[0.0] * EXPERTS for _ in range(SEQUENCES)], []
        for b, logits_LE in enumerate(logits_BLE):
            for logits_E in logits_LE:
                score_E = [1 / (1 + math.exp(-logit)) for logit in logits_E]
                # DeepSeek-V3, equation 16: top-k of scores with the bias. Equations 19 and 20: scores over their sum, mean.
                by_score = sorted(range(EXPERTS), key=lambda e: score_E[e] + bias_E[e])
                for e in by_score[-TOPK:]:
                    counts[b][e] += 1
                after = by_score[-TOPK - 1]
                margins.append([score_E[after] + bias_E[after] - score for score in score_E])
                for e in range(EXPERTS):
                    scores[b][e] += score_E[e] / sum(score_E) / LENGTH
                squares.append(math.log(sum(math.exp(logit) for logit in logits_E)) ** 2)  # ST-MoE, equation 5
        total_E = [sum(count_E[e] for count_E in counts) for e in range(EXPERTS)]
        losses = []
        for b in range(SEQUENCES):
            first = b // (dp * MICRO_BATCH) * dp * MICRO_BATCH  # the first of the micro-batches with the same number
            batch_E = [sum(count_E[e] for count_E in counts[first : first + dp * MICRO_BATCH]) for e in range(EXPERTS)]
            f_E = {"sequence": counts[b], "batch": batch_E, "global_batch": earlier_E}[scope]
            losses.append(EXPERTS * sum(f_E[e] / sum(f_E) * scores[b][e] for e in range(EXPERTS)))  # Switch, equation 4
        mean = fmean(total_E)
        lacks_E = [mean - count for count in total_E]  # Wang et al. 2024, algorithm 1: the violation of the load
        sign_E = [float((lack > 0) - (lack < 0)) for lack in lacks_E]
        moves = {
            "sign": sign_E,
            "centered": [sign - fmean(sign_E) for sign in sign_E],
            "proportional": [lack / mean for lack in lacks_E],
            "quantile": [to - now for to, now in zip(balanced(margins, bias_E, TOPK), bias_E, strict=True)],
        }
        bias_E = [bias + RATE * move for bias, move in zip(bias_E, moves[update], strict=True)]
        earlier_E = total_E
        steps.append(Step(fmean(losses), fmean(squares), bias_E))
    return steps


@pytest.mark.parametrize(("scope", "update"), zip((*SCOPES, "sequence"), UPDATES, strict=True))
def test_losses_and_bias_are_the_formulas_under_every_fold(ranks, scope: str, update: str) -> None:
    for found in ranks(4).run(routed, scope, update):
        for sizes, steps in zip(FOLDS, found, strict=True):
            for ours, theirs in zip(steps, expected(scope, update, Fold(4, **sizes).dp), strict=True):
                assert ours.balance == pytest.approx(theirs.balance, rel=1e-12), sizes
                assert ours.z == pytest.approx(theirs.z, rel=1e-12), sizes
                assert ours.bias_E == pytest.approx(theirs.bias_E, abs=1e-12), sizes


def test_scopes_and_updates_differ() -> None:
    balances = {scope: expected(scope, "sign", 2)[-1].balance for scope in SCOPES}
    assert min(abs(a - b) for i, a in enumerate(balances.values()) for b in list(balances.values())[:i]) > 1e-4
    assert len({tuple(expected("batch", update, 2)[-1].bias_E) for update in UPDATES}) == 4


def test_the_first_step_of_a_global_batch_has_no_gradient_and_a_loss_of_one() -> None:
    router = router_of(Groups.create(Fold(1)), "global_batch", "sign")
    balance = router.whole(hidden(0).flatten(0, 1), SEQUENCES)[1].losses()[0] / SEQUENCES
    (gradient_HE,) = torch.autograd.grad(balance, [router.weight])
    assert balance.item() == pytest.approx(1, abs=1e-12)
    assert float(gradient_HE.abs().max()) < 1e-15


@pytest.mark.parametrize("rule", ["centered", "proportional"])
def test_the_mean_of_biases_stays(rule: Any) -> None:
    change_E = bias_change(torch.tensor([9.0, 1.0, 1.0, 1.0, 0.0, 0.0]), rule)
    assert float(change_E.mean()) == pytest.approx(0, abs=1e-7)
    assert float(bias_change(torch.zeros(6), rule).abs().max()) == 0


def _loads(score_TE: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    """Return the assignments of each expert over the even share."""
    expert_TK = (score_TE + bias_E).topk(TOPK).indices
    return expert_TK.flatten().bincount(minlength=EXPERTS) * (EXPERTS / expert_TK.numel())


def _balanced(score_TE: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    count_EQ = torch.zeros(EXPERTS, BINS, dtype=torch.int32)
    for piece_TE in score_TE.split(100):
        add_margins(count_EQ, piece_TE, bias_E, TOPK)
    return balanced_bias(count_EQ, bias_E, TOPK)


def test_quantiles_even_out_an_uneven_router_in_a_few_steps() -> None:
    tilt_E = torch.linspace(-3, 3, EXPERTS, dtype=torch.float64)
    score_TE = (torch.randn(4096, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + tilt_E).sigmoid()
    bias_E, loads = torch.zeros(EXPERTS, dtype=torch.float64), list[float]()
    for _ in range(8):
        loads.append(float(_loads(score_TE, bias_E).max()))
        bias_E = _balanced(score_TE, bias_E)
    assert loads[0] > 2
    assert loads[2] < 1.3
    assert loads[-1] < 1.05
    assert float(bias_E.mean()) == pytest.approx(0, abs=1e-12)


def test_a_bias_is_the_quantile_of_margins_to_a_bin() -> None:
    score_TE = torch.rand(1000, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bias_E = torch.linspace(-0.2, 0.3, EXPERTS, dtype=torch.float64)
    threshold_T1 = (score_TE + bias_E).sort(descending=True).values[:, TOPK, None]
    exact_E = (threshold_T1 - score_TE).sort(dim=0).values[len(score_TE) * TOPK // EXPERTS - 1]
    assert torch.allclose(_balanced(score_TE, bias_E), exact_E - exact_E.mean(), atol=2 * 2.5 / BINS)


def test_scores_that_are_no_numbers_have_no_margins() -> None:
    bias_E, score_TE = torch.zeros(EXPERTS), torch.rand(10, EXPERTS)
    count_EQ = torch.zeros(EXPERTS, BINS, dtype=torch.int32)
    score_TE[3, 5] = math.nan
    add_margins(count_EQ, score_TE, bias_E, TOPK)
    assert count_EQ.sum(1).tolist() == [9] * EXPERTS
    assert torch.equal(balanced_bias(torch.zeros_like(count_EQ), bias_E, TOPK), bias_E)


def test_quantiles_need_an_expert_that_a_token_does_not_take() -> None:
    with pytest.raises(UserError, match="bias_update=quantile: needs more than topk=8 experts; legal: sign"):
        check_router(RouterSpec(score="sigmoid", bias_rate=1.0, bias_update="quantile"), experts=8, topk=8)
