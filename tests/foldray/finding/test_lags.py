"""Lags that training chooses: with measured times of ops, the order that the simulator finds fastest, on all ranks alike."""

from __future__ import annotations

import pytest

from foldray.clock import OpCosts, simulate
from foldray.finding import settle
from foldray.graph import Slicing, StepGraph
from foldray.orders import ONE_A_ONE_M, STREAM, Ordering, Overlap, position_list, step_schedule
from tests.foldray.blocks import DENSE, MOE
from tests.foldray.parity import check_equal, make_recipe, one_process, train

CUT = Slicing((4, 4, 4, 4), (4, 4, 4, 4))


def costs(**seconds: float) -> OpCosts:
    """Make costs from the forward seconds of ops. Backward takes twice as long, except for all-to-alls."""
    travels = ("dispatch", "combine")
    rows = [
        ((kind, direction, part), took * (1 if direction == "F" or kind in travels else 2))
        for kind, took in seconds.items() for direction in "FB" for part in range(4)
    ]  # fmt: skip
    return OpCosts(tuple(rows), 0.0, 0.0)


SLOW_LINK = costs(attention=1.0, route=0.1, dispatch=2.5, expert=1.0, combine=2.5, merge=0.1)
FAST_LINK = costs(attention=1.0, route=0.1, dispatch=0.2, expert=1.0, combine=0.2, merge=0.1)
GRAPH = StepGraph(((MOE, DENSE, MOE), (MOE, MOE)), CUT, pp=2, micro_batches=2, ragged=False)
OPEN = Ordering(Overlap("stream"), Overlap("stream"), CUT)


def seconds(found: Ordering, given: OpCosts) -> float:
    """Simulate the first stage alone, and return its seconds."""
    alone, table = StepGraph(GRAPH.stages[:1], CUT, ragged=False), dict(given.seconds)

    def cost(op):
        channel = alone.channel(op)
        return ((channel[0] if channel else "compute", table.get((op.kind, op.direction, op.part), 0.0)),)

    return simulate(alone, step_schedule(alone, found.forward, found.backward), cost).seconds


@pytest.mark.parametrize("given", [SLOW_LINK, FAST_LINK], ids=["slow", "fast"])
def test_no_other_lag_is_faster(given: OpCosts) -> None:
    found = settle(OPEN, GRAPH, 0, given)
    assert not found.open
    assert found.costs == given
    ways = [Overlap(ONE_A_ONE_M.name), *(Overlap(STREAM.name, lag) for lag in range(1, 5))]
    others = [OPEN._replace(forward=forward, backward=backward) for forward in ways for backward in ways]
    assert seconds(found, given) == pytest.approx(min(seconds(other, given) for other in others))


def test_lags_go_by_what_ops_take() -> None:
    slow, fast = (settle(OPEN, GRAPH, 0, given) for given in (SLOW_LINK, FAST_LINK))
    assert (slow.forward, slow.backward) != (fast.forward, fast.backward)


def test_what_the_recipe_names_stays() -> None:
    named = OPEN._replace(backward=Overlap("stream", 3))
    assert settle(named, GRAPH, 1, SLOW_LINK).backward == Overlap("stream", 3)
    closed = named._replace(forward=Overlap("moe_only"))
    assert not closed.open
    assert settle(closed, GRAPH, 1, SLOW_LINK) == closed._replace(costs=SLOW_LINK)


def test_an_open_lag_runs_as_the_usual_one_until_then() -> None:
    usual = OPEN._replace(forward=Overlap("stream", 2), backward=Overlap("stream", 2))
    for position in range(2):
        assert position_list(GRAPH, position, OPEN) == position_list(GRAPH, position, usual)
    with_costs = OPEN._replace(costs=SLOW_LINK)
    assert position_list(GRAPH, 0, with_costs) == position_list(GRAPH, 0, usual)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("fold", [{"ep": 2}, {"pp": 2}], ids=["ep", "pp"])
def test_training_with_chosen_lags_equals_one_process(ranks, fold: dict[str, int]) -> None:
    recipe = make_recipe(2, fold, schedule={"kind": "stream", "degree": 4})
    assert recipe.ordering.open
    check_equal(ranks(2).run(train, recipe, 3), one_process(recipe, steps=3))
    named = make_recipe(2, fold, schedule={"kind": "stream", "degree": 4, "lag": 2, "backward_lag": 2})
    assert not named.ordering.goes_by_costs
    check_equal(ranks(2).run(train, named, 3), one_process(named, steps=3))
