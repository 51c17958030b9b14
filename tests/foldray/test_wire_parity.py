"""Schedules and folds with rows that are rounded for the wire. What is rounded does not depend on the order of a step."""

from __future__ import annotations

from typing import Any

import pytest

from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray.parity import drifted, make_recipe, one_process, train, worst
from tests.foldray.strict import StrictPools

_STEPS = 1
SCHEDULES: dict[str, dict[str, Any]] = {
    "stream": {"kind": "stream", "degree": 2},
    "again": {"kind": "one_a_one_m", "degree": 2, "recompute": ["attention", "expert", "ffn"]},
    "weave, weights apart": {"kind": WEAVE.name, "degree": 2, "weight_gradients": "apart"},
    "list": {"kind": LIST.name, "degree": 2},
    "chunks": {"kind": "stream", "degree": 4, "reduction": "chunks", "sp_bytes": 4096},
}


def recipe_of(wire: str | None, schedule: dict[str, Any], way: str = "assignment", **sections: Any) -> Recipe:
    return make_recipe(
        2,
        2,
        precision="float32",
        model={"topk": 4, "hidden": 64},
        schedule=schedule,
        moe={"dispatch": way, "wire": wire},
        **sections,
    )


@pytest.mark.gate(2)
@pytest.mark.parametrize("wire", ["bfloat16", "float8"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_round_alike(ranks: Any, wire: str, name: str) -> None:
    """Where sums in another order differ in their last bit, a number is sometimes rounded the other way."""
    way = "rank" if name in ("again", "list") else "assignment"
    found = ranks(2).run(train, recipe_of(wire, SCHEDULES[name], way), _STEPS)
    assert drifted(found) == [], "copies of the same weights part"
    usual = ranks(2).run(train, recipe_of(wire, {"kind": "sequential"}, way), _STEPS)
    exact = one_process(recipe_of(None, {"kind": "sequential"}), steps=_STEPS)
    off, _ = worst(usual, exact, relative=True)
    assert off > 1e-4, "nothing is rounded"
    assert _apart(found, usual) < 0.2 * off


@pytest.mark.parametrize("wire", ["bfloat16", "float8"])
def test_rows_are_read_when_they_are_there(ranks: Any, wire: str) -> None:
    recipe = recipe_of(wire, {"kind": "stream", "degree": 2}, "rank")
    strict, usual = StrictPools(ranks)(2).run(train, recipe, _STEPS), ranks(2).run(train, recipe, _STEPS)
    assert _apart(strict, usual) == 0


@pytest.mark.parametrize("wire", ["bfloat16", "float8"])
def test_rows_that_go_on_inside_a_node_round_alike(ranks: Any, wire: str) -> None:
    def made(schedule: dict[str, Any]) -> Recipe:
        model, moe = {"topk": 4, "hidden": 64}, {"dispatch": "rank", "wire": wire}
        return make_recipe(4, {"ep": 4, "ep_inside": 2}, precision="float32", model=model, moe=moe, schedule=schedule)

    usual = ranks(4).run(train, made({"kind": "sequential"}), _STEPS)
    off, _ = worst(usual, one_process(recipe_of(None, {"kind": "sequential"}), steps=_STEPS), relative=True)
    assert 1e-4 < off < 0.3
    pieces = ranks(4).run(train, made(SCHEDULES["stream"]), _STEPS)
    assert drifted(pieces) == []
    assert _apart(pieces, usual) < 0.2 * off
    assert _apart(StrictPools(ranks)(4).run(train, made(SCHEDULES["stream"]), _STEPS), pieces) == 0


APART = {"placement": {"attention": 1, "experts": 1}}


@pytest.mark.parametrize("wire", ["bfloat16", "float8"])
def test_experts_with_ranks_of_their_own_round_alike(ranks: Any, wire: str) -> None:
    def made(wire: str | None, **schedule: Any) -> Recipe:
        model = {"topk": 4, "hidden": 64}
        return make_recipe(2, 1, precision="float32", model=model, moe={"wire": wire}, schedule=schedule, **APART)

    usual = ranks(2).run(train, made(wire), _STEPS)
    off, _ = worst(usual, one_process(recipe_of(None, {"kind": "sequential"}), steps=_STEPS), relative=True)
    assert 1e-4 < off < 0.3
    pieces = ranks(2).run(train, made(wire, degree=2), _STEPS)
    assert _apart(pieces, usual) < 0.2 * off
    strict = StrictPools(ranks)(2).run(train, made(wire), _STEPS)
    assert _apart(strict, usual) == 0


def _apart(found: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return the largest difference of two trainings under one fold, over the largest value of a tensor."""
    pairs = [(part["weights"], other["weights"]) for part, other in zip(found, others, strict=True)]
    tensors = [(ours[name].tensor, theirs[name].tensor) for ours, theirs in pairs for name in ours]
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)) for one, other in tensors)
