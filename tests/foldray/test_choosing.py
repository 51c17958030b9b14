"""The orders that a recipe's steps may have, and what the planner expects of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foldray.choosing import expected, orders, told_of_orders
from foldray.cli import main
from foldray.costs.hardware import load_hardware
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe

ROOT = Path(__file__).parents[2]
FOLD = {"ep": 2}
SCHEDULE = {"kind": "auto"}


def test_orders_are_those_that_the_recipe_can_have() -> None:
    among = orders(make_recipe(2, FOLD, schedule=SCHEDULE))
    assert next(iter(among)) == "sequential"
    assert {"one_a_one_m:2", "stream:4", "stream:4/2", "moe_only:2", "weave", "list", "list:2"} <= set(among)
    assert among["stream:4/2"].fewer_slices == 2
    assert among["list:2"].weight_gradients == "apart"
    whole = orders(make_recipe(2, FOLD, schedule=SCHEDULE, training={"micro_batch": 1, "global_batch": 4}))
    assert not any(order.batch_degree > 1 for order in whole.values()), "a micro-batch of one sequence has no parts"
    assert {"stream@2", "flow"} <= set(among)


def test_every_order_may_sum_gradients_earlier_if_the_recipe_sums_them_at_the_end() -> None:
    among = orders(make_recipe(2, FOLD, schedule=SCHEDULE))
    plain = {name: order for name, order in among.items() if order.reduction.kind == "end"}
    for kind in ("buckets", "chunks"):
        assert {name: among[f"{name}+{kind}"].reduction.kind for name in plain} == dict.fromkeys(plain, kind)
    for schedule in ({**SCHEDULE, "reduction": "chunks"}, {"kind": "stream", "degree": 2}):
        assert len({order.reduction for order in orders(make_recipe(2, FOLD, schedule=schedule)).values()}) == 1
    own_sums = orders(make_recipe(2, FOLD, schedule=SCHEDULE, precision="float32", engine={"kind": "deepspeed"}))
    assert {order.reduction.kind for order in own_sums.values()} == {"end"}


@pytest.mark.parametrize(
    ("workers", "fold", "sections"),
    [
        (1, {}, {}),  # no rows travel
        (2, {}, {}),
        (2, {"pp": 2}, {}),  # nor are there gradients to sum
        (2, FOLD, {"model": {"router": {"capacity_factor": 1.0}}}),  # the order decides which tokens are dropped
    ],
)
def test_nothing_is_searched_where_no_order_is_better(workers: int, fold: dict[str, int], sections: dict[str, Any]) -> None:
    among = orders(make_recipe(workers, fold, schedule=SCHEDULE, **sections))
    sums = ["", "+buckets", "+chunks"] if workers > 1 and fold.get("pp") is None else [""]
    assert list(among) == [f"sequential{how}" for how in sums]


def test_orders_that_need_more_memory_than_there_is_are_left_out() -> None:
    recipe = make_recipe(2, FOLD, schedule=SCHEDULE)
    assert {order.slicing for order in orders(recipe, memory=1e6).values()} == {None}
    assert orders(recipe, memory=1e12) == orders(recipe)


def gpus(*changes: str) -> Recipe:
    return Recipe.load(str(ROOT / "recipes" / "one_node.yaml"), list(changes))


STREAM = ("schedule.kind=stream", "schedule.degree=4")


def test_a_recipe_that_is_slower_than_need_be_is_told() -> None:
    steps = expected(gpus(*STREAM), load_hardware("h200"))
    assert next(iter(steps)) == "stream"
    told = told_of_orders(gpus(*STREAM))
    assert told is not None
    share = f"{steps['sequential'] / steps['stream']:.2f}"
    assert (
        told
        == f"schedule.kind=stream: on h200, the planner expects sequential to take {share} × its time; kind=auto measures both"
    )
    assert "on eos-h100" in (told_of_orders(gpus(*STREAM, "tune.hardware=eos-h100")) or "")


@pytest.mark.parametrize(
    "changes", [[], ["schedule.kind=auto"], [*STREAM, "cluster.gpu=false", "tune.hardware=null"]], ids=["fast", "auto", "no GPU"]
)
def test_nothing_is_told_of(changes: list[str]) -> None:
    assert told_of_orders(gpus(*changes)) is None


def test_a_recipes_own_order_is_priced_under_its_kind() -> None:
    """`flow` is also the short name of another order, with whole sequences."""
    hardware = load_hardware("h200")
    cut, whole = (expected(gpus("schedule.kind=flow", f"schedule.degree={degree}"), hardware) for degree in (4, 1))
    assert cut["flow"] > whole["flow"]


def test_gradients_of_weights_stay_as_the_recipe_has_them() -> None:
    among = orders(make_recipe(2, FOLD, schedule={**SCHEDULE, "weight_gradients": "whole"}))
    assert {ordering.weight_gradients for ordering in among.values()} == {"whole"}


def test_explain_shows_the_expected_steps(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", str(ROOT / "recipes" / "one_node.yaml"), *STREAM, "--cluster", "h200"]
    assert main(command) == 0
    shown = capsys.readouterr().out.split("a step on h200, as the planner expects it:\n")[1].splitlines()
    assert shown[0].startswith("  stream (the recipe's)")
    assert shown[1].startswith("  sequential")
    assert main([*command, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["step_time_s"]
    assert steps == expected(gpus(*STREAM), load_hardware("h200"))
