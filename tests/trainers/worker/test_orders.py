"""`schedule.kind: auto`: the search among orders in a training's first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.choosing import orders
from foldray.comm import Groups
from foldray.finding.choice import MOST_TRIED
from foldray.runtime import Trace
from tests.foldray.parity import batches, check_equal, engine_of, engine_on, go_on, make_recipe, one_process
from trainers.worker.online import PATIENCE, TURNS, WATCHED, Knobs, Online
from trainers.worker.orders import OrderSearch

FOLD = {"ep": 2}
SCHEDULE = {"kind": "auto"}
ADAMW = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


def _auto(rank: int, fastest: str, slower: float, steps: int, worth: bool, chosen: str | None = None) -> dict[str, Any]:
    """Run steps with made-up times: one order is fast, and all others take a second.

    Args:
        chosen: the order that an earlier start of the training has chosen.
    """
    recipe = make_recipe(2, FOLD, schedule=SCHEDULE)
    groups = Groups.create(recipe.placed_fold, rank)
    execution, records = engine_of(recipe, groups).execution, list[Any]()
    # It takes seconds to find a list.
    among = {name: order for name, order in orders(recipe).items() if not order.forward.row.found}
    orderings = list(among.values())
    online = Online(execution, groups, torch.device("cpu"), dict(enumerate(orderings)), False, list(among), worth=lambda: worth)
    if chosen is not None:
        online.choose(Knobs(list(among).index(chosen)), 1.0)
    going = online.steps(lambda *_: OrderSearch(execution, recipe, orderings), records.append)
    next(going)
    taken = []
    for _ in range(steps):
        execution.train(batches(recipe, groups.dp_rank, 0))
        execution.gradients.zero()
        taken.append(list(among)[online._order])
        going.send((slower if rank else 1.0) * (0.5 if taken[-1] == fastest else 1.0))
    found = {"taken": taken, "chosen": online.chosen, "names": list(among), "records": records, "now": execution.ordering}
    groups.close()
    return found


def _names(found: dict[str, Any]) -> list[str]:
    return [record["order"] for record in found["records"] if record["kind"] == "tried" and not record["chosen"]]


def test_the_fastest_order_is_kept_and_told(ranks) -> None:
    first, second = ranks(2).run(_auto, "one_a_one_m:2", 1.0, 120, True)
    assert first["taken"] == second["taken"], "all ranks have one order"
    assert first["names"][first["chosen"].order] == first["taken"][-1]
    tried = _names(first)
    assert tried[0] == "sequential"
    assert len([name for name in tried if "+" not in name]) <= MOST_TRIED
    assert not second["records"]
    if "one_a_one_m:2" in tried:
        assert first["taken"][-1] == "one_a_one_m:2"
    final = [record for record in first["records"] if record["kind"] == "tried" and record["chosen"]]
    assert [record["order"] for record in final] == [first["taken"][-1]]


def test_sequential_is_always_in_the_run_off(ranks) -> None:
    """Pieces are slower on this machine, so training ends with what it began with."""
    first, _ = ranks(2).run(_auto, "sequential", 1.0, 120, True)
    assert first["chosen"] == Knobs(0)
    last = (
        len(first["taken"])
        - 1
        - first["taken"][::-1].index(next(name for name in reversed(first["taken"]) if name != "sequential"))
    )
    assert "sequential" in first["taken"][max(0, last - 3 * TURNS) : last]


def test_a_training_that_goes_on_searches_nothing_until_its_steps_drift(ranks) -> None:
    first, _ = ranks(2).run(_auto, "one_a_one_m:2", 1.0, 20 + PATIENCE * WATCHED, True, "stream:2")
    assert set(first["taken"]) == {"stream:2"}
    assert not _names(first)
    first, _ = ranks(2).run(_auto, "one_a_one_m:2", 1.5, 20 + PATIENCE * WATCHED, True, "stream:2")
    assert "drifted" in [record["kind"] for record in first["records"]], "steps take longer than before"
    assert _names(first)
    assert first["taken"][PATIENCE * WATCHED] == "stream:2"


def test_short_trainings_search_nothing(ranks) -> None:
    first, _ = ranks(2).run(_auto, "stream:4", 1.0, 30, False)
    assert set(first["taken"]) == {"sequential"}
    assert not first["records"]


def test_gradients_are_summed_as_the_fastest_order_has_it(ranks) -> None:
    """Training turns to chunks, and back to the sums of each order that it tries."""
    first, second = ranks(2).run(_auto, "sequential+chunks", 1.0, 120, True)
    assert first["now"].reduction.kind == second["now"].reduction.kind == "chunks"
    assert first["names"][first["chosen"].order] == "sequential+chunks"


TURNS_THROUGH = ("sequential+chunks", "stream@2", "list:2+chunks", "flow+buckets", "weave:2", "sequential")


def _through(rank: int, zero: int) -> dict[str, Any]:
    """Train a step in each of several orders."""
    engine, training = {"kind": "torch", "zero": zero}, {"micro_batch": 2}
    recipe = make_recipe(4, {"tp": 2, "ep": 2}, schedule=SCHEDULE, engine=engine, optimizer=ADAMW, training=training)
    among, steps = orders(recipe), list[Any]()
    with engine_on(recipe, rank) as (engine, groups):
        execution = engine.execution
        for step, name in enumerate(TURNS_THROUGH):
            execution.reorder(among[name])
            execution.trace = Trace()
            steps.append(go_on(engine, groups, recipe, range(step, step + 1)))
            if execution.lacks_costs:
                execution.learn_costs()
        return {**steps[-1], **{key: [value for each in steps for value in each[key]] for key in ("losses", "norms")}}


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_orders_may_change_from_step_to_step(ranks, zero: int) -> None:
    recipe = make_recipe(4, FOLD, schedule=SCHEDULE, optimizer=ADAMW)
    check_equal(ranks(4).run(_through, zero), one_process(recipe, steps=len(TURNS_THROUGH)))
