"""The clock of one list is the clock of them all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foldray.planner.stage_clock import Alone
from foldray.schedule import COMPUTE, Op, Overlap, Slicing, StepGraph, step_schedule, times

LENGTH = 48


@given(st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", ["sequential", "moe_only", "aaam", "one_a_one_m", "stream"])
def test_a_list_alone_runs_as_on_the_clock(kind: str, data: st.DataObject) -> None:
    """Whatever ops cost, on links that what computes and what travels share; equal times too."""
    degree = 1 if kind == "sequential" else data.draw(st.sampled_from([2, 3, 4]))
    cut = (LENGTH // degree,) * degree
    slicing = Slicing((LENGTH,) if kind == "moe_only" else cut, cut)
    blocks = data.draw(st.sampled_from([("moe",), ("moe", "moe"), ("moe", "dense", "moe")]))
    again = data.draw(st.sampled_from([(), ("expert",), ("attention", "expert")]))
    graph = StepGraph((blocks,), slicing, 1, 1, False, again)  # type: ignore[arg-type]
    (order,) = step_schedule(graph, Overlap(kind, 1), Overlap(kind, 1))
    seconds = st.integers(0, 4).map(float)
    lanes = {name: data.draw(st.sampled_from(["intra", "inter"])) for name in ("dispatch", "combine", "attention", "expert")}
    took = {(name, way): data.draw(seconds) for name in {op.kind for op in order} for way in "FBR"}

    def cost(op: Op) -> list[tuple[str, float]]:
        if graph.channel(op) is not None:
            return [(lanes[op.kind], took[op.kind, op.direction])]
        return [(COMPUTE, took[op.kind, op.direction]), (lanes.get(op.kind, COMPUTE), 1.0), (COMPUTE, 1.0)]

    whole = times(graph, (order,), cost)
    assert Alone(graph, order).spans([cost(op) for op in order]) == [whole[op] for op in order]
