"""Training with attention and experts on ranks of their own gives the results of one process."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.foldray.parity import BATCH, check_equal, make_recipe, one_process, train

STEPS = 2


class Case(NamedTuple):
    """A recipe whose experts have ranks of their own.

    Args:
        ranks: number of ranks of attention, and of the experts.
        passes: micro-batches of a data-parallel place.
    """

    ranks: tuple[int, int]
    fold: dict[str, int]
    model: Mapping[str, Any] = MappingProxyType({})
    passes: int = 2
    expert_pp: int | None = None
    zero: int = 0
    schedule: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "1:1": Case((1, 1), {}),
    "1:1, two positions each": Case((2, 2), {"pp": 2}, expert_pp=2),
    "1:1, one micro-batch alive": Case((2, 2), {"pp": 2}, passes=4, expert_pp=2, schedule={"alive": 1}),
    "2:1": Case((2, 1), {}, passes=1),
    "1:2": Case((1, 2), {"ep": 2}),
    "1:2, edp 2": Case((1, 2), {}),
    "3:1": Case((3, 1), {"pp": 3}, {"layers": 3}, passes=4, expert_pp=1),
    "2:2": Case((2, 2), {"tp": 2, "ep": 2}, zero=1),
    "2:2, two stages each": Case((2, 2), {"pp": 2}, {"layers": 4}, passes=4, expert_pp=2, zero=2, schedule={"virtual_stages": 2}),
    "1:3": Case((1, 3), {"ep": 3}, {"experts": 6}),
    "2:1, other numbers of positions": Case((2, 1), {"pp": 2}, {"layers": 3}, passes=4, expert_pp=1),
    "1:2, other numbers of positions": Case((1, 2), {}, {"layers": 3}, expert_pp=2),
    "4:4": Case((4, 4), {"tp": 2, "cp": 2, "etp": 2, "ep": 2}, schedule={"degree": 2}),
    "3:5": Case((3, 5), {"pp": 3, "ep": 5}, {"layers": 3, "experts": 5}, passes=4, expert_pp=1),
    "top-1": Case((2, 2), {"cp": 2, "ep": 2}, {"topk": 1}),
    "dropping": Case((1, 2), {"ep": 2}, {"router": {"capacity_factor": 0.75, "balance_loss": 0.1}}),
    "dense blocks between": Case((2, 2), {"pp": 2, "ep": 2}, {"layers": 4, "moe_every": 2}, passes=4, expert_pp=1),
    "pieces, recomputed": Case(
        (2, 2), {"pp": 2, "ep": 2}, expert_pp=1, schedule={"degree": 2, "recompute": ["attention", "expert", "shared"]}
    ),
    "chunks": Case((2, 2), {}, passes=1, zero=1, schedule={"reduction": "chunks"}),
    "two nodes": Case((2, 4), {"ep": 4, "ep_inside": 2}, {"topk": 4}),
    "two nodes, one sender, top-1": Case((1, 4), {"ep": 4, "ep_inside": 2}, {"topk": 1}, schedule={"kind": "list", "degree": 2}),
    "one node, ETP2, recomputed, further tokens": Case(
        (2, 4),
        {"tp": 2, "ep": 2, "etp": 2, "ep_inside": 2},
        {"topk": 3, "mtp_depth": 1},
        schedule={"degree": 2, "recompute": ["attention", "expert", "shared"]},
    ),
    "two nodes, two positions each, dropping": Case(
        (2, 8),
        {"pp": 2, "ep": 4, "ep_inside": 2},
        {"layers": 4, "router": {"capacity_factor": 0.75, "balance_loss": 0.1}},
        passes=4,
        expert_pp=2,
        schedule={"virtual_stages": 2},
    ),
    "one node, EDP2, weights whole, ZeRO, chunks": Case(
        (2, 4),
        {"cp": 2, "ep": 2, "ep_inside": 2},
        {"topk": 4},
        zero=1,
        schedule={"kind": "list", "degree": 2, "weight_gradients": "whole", "reduction": "chunks", "sp_bytes": 4096},
    ),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_parity_with_one_process(ranks, name: str) -> None:
    (attention, experts), fold, model, passes, expert_pp, zero, schedule = CASES[name]
    sequences = fold.get("tp", 1) * fold.get("cp", 1) * fold.get("pp", 1)
    recipe = make_recipe(
        attention + experts, fold, placement={"attention": attention, "experts": experts, "expert_pp": expert_pp},
        model=dict(model), schedule=dict(schedule), engine={"zero": zero},
        training={"micro_batch": BATCH // (attention // sequences * passes)},
    )  # fmt: skip
    found = ranks(recipe.cluster.workers).run(train, recipe, STEPS)
    check_equal(found, one_process(recipe, steps=STEPS))
