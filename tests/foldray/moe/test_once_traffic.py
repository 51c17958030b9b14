"""Bytes of tokens that travel once to each rank: those of the formula, and exactly those that follow from the routing.

If every choice of K of E experts is equally likely, a token has a row for each of R · (1 − C(E − E/R, K) / C(E, K)) of R ranks.
If a token travels once to each node first, R is the number of nodes for what travels between them.
"""

from __future__ import annotations

from math import comb, sqrt
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from foldray.blueprint import Ownership, ranks_of_a_token
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.moe import MoeBackend, MoELayer, Sent, TokenPiece, combine, compute_rows, dispatch
from foldray.moe.once import OncePerRank
from foldray.recipe import Recipe
from tests.foldray.moe.test_layer import spec
from tests.foldray.parity import engine_on, make_recipe, own_batches

E, H, T = 16, 4, 4096
ROW, WEIGHT, NUMBER = 8 * H, 8, 4
"""Bytes of a row, of a weight and of an expert's number. Rows and weights are in float64."""


class Measured(NamedTuple):
    """What one rank has sent, and its routing.

    Args:
        sent: bytes by stage: dispatch, combine, and their backward. "… inside" are those of the ranks of a node to each other.
        expert_TK: the experts of its tokens.
    """

    sent: dict[str, int]
    expert_TK: list[list[int]]


class RandomGate:
    """Every choice of K experts is equally likely."""

    def __init__(self, rank: int, topk: int):
        self.generator, self.topk = torch.Generator().manual_seed(rank), topk

    def __call__(self, logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.rand(logits_TE.shape, generator=self.generator).topk(self.topk).indices
        return chosen, logits_TE.gather(1, chosen).softmax(1)


def measured(rank: int, ranks: int, topk: int, inside: int = 1) -> Measured:
    fold = Fold(ranks, ep=ranks, ep_inside=inside)
    groups, model = Groups.create(fold, rank), spec(experts=E, hidden=H, topk=topk, shared_hidden=0, expert_hidden=4)
    backend = MoeBackend(gate=RandomGate(rank, topk), experts="loop", dispatch="rank")
    layer = MoELayer(Ownership(model, fold), model.moe_layers[0], groups, backend).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    sent: dict[str, int] = {}

    def measure(stage: str) -> None:
        found = groups.traffic.by_name()
        sent[stage] = found["tokens"].inside_bytes
        if "tokens_inside" in found:
            sent[f"{stage} inside"] = found["tokens_inside"].inside_bytes
        groups.traffic.clear()

    x_TH = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    routing = layer.route(x_TH, TokenPiece(1))
    rows, sides = layer.dispatch_preprocess(x_TH, routing)
    received = layer.exchange.start_counts(sides)
    groups.traffic.clear()
    rows = dispatch(layer.exchange, rows, sides, received)
    measure("dispatch")
    y_NH = compute_rows(layer, rows, sides, received)
    if inside > 1:
        sent["experts inside"] = groups.traffic.by_name()["tokens_inside"].inside_bytes
        groups.traffic.clear()
    y_NH = combine(layer.exchange, y_NH, sides, received)
    measure("combine")
    layer.combine_postprocess(y_NH, sides, routing.weight_TK).sum().backward()
    measure("backward")
    groups.close()
    return Measured(sent, routing.expert_TK.tolist())


@pytest.mark.gate(4)
@pytest.mark.parametrize("ranks_of_group", [2, 4, 8])
@pytest.mark.parametrize("topk", [2, 4, 6, 8])
def test_bytes_are_those_of_the_formula_and_of_the_routing(ranks: Any, ranks_of_group: int, topk: int) -> None:
    R = ranks_of_group
    found: list[Measured] = ranks(R).run(measured, R, topk)
    goes = [[{expert * R // E for expert in experts} for experts in each.expert_TK] for each in found]
    rows = [[sum(to in visited for visited in goes[rank]) * (to != rank) for to in range(R)] for rank in range(R)]
    for rank, (sent, _) in enumerate(found):
        leaving, arriving = sum(rows[rank]), sum(rows[other][rank] for other in range(R))
        assert sent["dispatch"] == leaving * (ROW + topk * (WEIGHT + NUMBER))
        assert sent["combine"] == arriving * ROW
        assert sent["backward"] == leaving * ROW + arriving * (ROW + topk * WEIGHT)

    D = R * (1 - comb(E - E // R, topk) / comb(E, topk))
    assert ranks_of_a_token(spec(experts=E, topk=topk), R) == pytest.approx(D)
    # A token visits R − 1 other ranks, each with probability D / R. It visits one more rarely if it has visited another, so the
    # variance of a sum is at most the sum of the variances.
    tokens, visits = R * T, D / R
    error = 5 * sqrt((R - 1) * visits * (1 - visits) / tokens)
    for stage, row in (("dispatch", ROW + topk * (WEIGHT + NUMBER)), ("combine", ROW)):
        a_token = sum(each.sent[stage] for each in found) / (tokens * row)
        assert a_token == pytest.approx(D * (R - 1) / R, abs=error), stage


@pytest.mark.gate(2)
@pytest.mark.parametrize(("R", "inside"), [(4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("topk", [2, 4, 6, 8])
def test_a_token_travels_once_to_each_node_and_from_there_once_to_each_rank(ranks: Any, R: int, inside: int, topk: int) -> None:
    found: list[Measured] = ranks(R).run(measured, R, topk, inside)
    goes = [[{expert * R // E for expert in experts} for experts in each.expert_TK] for each in found]
    N, out, row = R // inside, ROW + topk * (WEIGHT + NUMBER), ROW

    def to_node(rank: int, node: int) -> int:
        return sum(any(to // inside == node for to in visited) for visited in goes[rank])

    def passed(rank: int, to: int) -> int:
        """Return the rows that a rank passes on to one of its node: those of the ranks with its place on all nodes."""
        return sum(to in visited for of in range(rank % inside, R, inside) for visited in goes[of])

    for rank, (sent, _) in enumerate(found):
        node, place = divmod(rank, inside)
        leaving = sum(to_node(rank, to) for to in range(N) if to != node)
        arriving = sum(to_node(other * inside + place, node) for other in range(N) if other != node)
        mates = [node * inside + other for other in range(inside) if other != place]
        passed_on, taken = sum(passed(rank, to) for to in mates), sum(passed(other, rank) for other in mates)
        assert sent["dispatch"] == leaving * out
        assert sent["combine"] == arriving * row
        assert sent["experts inside"] == passed_on * out + taken * row
        assert sent["backward"] == leaving * row + arriving * (row + topk * WEIGHT)
        assert sent["backward inside"] == passed_on * row + taken * (row + topk * WEIGHT)

    D, tokens = N * (1 - comb(E - E // N, topk) / comb(E, topk)), R * T
    error = 5 * sqrt((N - 1) * (D / N) * (1 - D / N) / tokens)
    assert sum(each.sent["dispatch"] for each in found) / (tokens * out) == pytest.approx(D * (N - 1) / N, abs=error)


def a_step(rank: int, recipe: Recipe) -> tuple[int, int, int]:
    """Return the bytes and the all-to-alls of tokens in a training step, and the rows that have left for other ranks."""
    encode, left = OncePerRank.encode, list[int]()

    def noted(self: OncePerRank, *given: Any) -> tuple[Any, Sent]:
        rows, sent = encode(self, *given)
        assert sent.rows_R is not None
        left.append(int(sent.rows_R.sum() - sent.rows_R[groups.tokens.index]))
        return rows, sent

    with engine_on(recipe, rank) as (engine, groups), patch.object(OncePerRank, "encode", noted):
        groups.traffic.clear()
        engine.train(own_batches(recipe, groups, 0))
        count = groups.traffic.by_name()["tokens"]
    return count.inside_bytes, count.calls, sum(left)


def test_a_step_sends_no_more(ranks: Any) -> None:
    schedule = {"kind": "stream", "degree": 2, "recompute": ["expert"]}
    recipe = make_recipe(4, 4, model={"topk": 4}, moe={"dispatch": "rank"}, schedule=schedule)
    found = ranks(4).run(a_step, recipe)
    row, topk = 8 * recipe.model.hidden, recipe.model.topk
    rows = sum(left for _, _, left in found)
    assert sum(sent for sent, _, _ in found) == rows * (4 * row + topk * (2 * WEIGHT + NUMBER))
    pieces = len(recipe.model.moe_layers) * recipe.accumulation * 2
    # Rows, and weights with numbers; results; their gradients; gradients of rows and of weights.
    assert {calls for _, calls, _ in found} == {pieces * (2 + 1 + 1 + 2)}
