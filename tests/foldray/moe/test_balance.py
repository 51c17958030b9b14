"""The balance loss in each scope, the z-loss and the selection bias are the formulas of their papers, which loops compute."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch

from foldray.blueprint import Layout, ModelSpec
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.moe import Router
from foldray.moe.balance import bias_change
from tests.foldray.parity import MODEL

SEQUENCES, LENGTH, MICRO_BATCH, STEPS, TOPK, EXPERTS, RATE = 8, 8, 2, 3, 2, 8, 0.05
FOLDS: list[dict[str, int]] = [
    {"ep": 4}, {"tp": 2, "ep": 2}, {"cp": 2, "etp": 2}, {"tp": 2, "cp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "ep": 2},
]  # fmt: skip
SCOPES, UPDATES = ("sequence", "batch", "global_batch"), ("sign", "centered", "proportional")


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
        counts = [[0.0] * EXPERTS for _ in range(SEQUENCES)]
        scores, squares = [[0.0] * EXPERTS for _ in range(SEQUENCES)], []
        for b, logits_LE in enumerate(logits_BLE):
            for logits_E in logits_LE:
                score_E = [1 / (1 + math.exp(-logit)) for logit in logits_E]
                # DeepSeek-V3, equation 16: top-k of scores with the bias. Equations 19 and 20: scores over their sum, mean.
                for e in sorted(range(EXPERTS), key=lambda e: score_E[e] + bias_E[e])[-TOPK:]:
                    counts[b][e] += 1
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
        }
        bias_E = [bias + RATE * move for bias, move in zip(bias_E, moves[update], strict=True)]
        earlier_E = total_E
        steps.append(Step(fmean(losses), fmean(squares), bias_E))
    return steps


@pytest.mark.parametrize(("scope", "update"), zip(SCOPES, UPDATES, strict=True))
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
    assert len({tuple(expected("batch", update, 2)[-1].bias_E) for update in UPDATES}) == 3


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
