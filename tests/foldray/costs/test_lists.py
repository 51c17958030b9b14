"""Lists that the planner compiles once, a stage's and a pipeline's, against the clock of the whole schedule."""

from __future__ import annotations

import pytest

from foldray.clock import COMPUTE, times
from foldray.costs.passes import StagePass, backward_ends, stage_list
from foldray.graph import Op, PipelineGraph, Slicing, StepGraph
from foldray.orders import Overlap, pipeline, stage_order
from tests.foldray.blocks import DENSE, MOE


@pytest.mark.parametrize(("pp", "micro_batches", "virtual"), [(2, 4, 1), (4, 8, 1), (4, 3, 1), (3, 6, 2), (2, 8, 4)])
def test_a_pipeline_ends_as_its_schedule_does(pp: int, micro_batches: int, virtual: int) -> None:
    graph = PipelineGraph(pp, micro_batches, virtual)
    forward = tuple(1.0 + 0.25 * stage for stage in range(graph.stages))
    backward = tuple(2.0 + 0.125 * stage for stage in range(graph.stages))

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        if op.kind == "handover":
            return ((str(graph.channel(op)), 0.5),)
        return ((COMPUTE, (forward if op.direction == "F" else backward)[op.layer]),)

    spans = times(graph, pipeline(graph), cost)
    last = {op.layer: 0.0 for op in spans}
    for op, span in spans.items():
        if (op.kind, op.direction) == ("stage", "B"):
            last[op.layer] = max(last[op.layer], span.end)
    expected = [[last[stage] for stage in graph.stages_at(place)] for place in range(pp)]
    seconds = {StagePass("stage", way, i): each for way, own in (("F", forward), ("B", backward)) for i, each in enumerate(own)}
    seconds |= {StagePass("handover", way, stage): 0.5 for way in "FB" for stage in range(graph.stages)}
    assert backward_ends(graph, seconds) == expected


@pytest.mark.parametrize("direction", ["F", "B"])
@pytest.mark.parametrize("kind", ["moe_only", "one_a_one_m", "stream"])
def test_pieces_that_cost_the_same_are_priced_once(kind: str, direction: str) -> None:
    slicing = Slicing((48,) if kind == "moe_only" else (24, 24), (24, 24))
    stages = ((MOE, DENSE, MOE),)
    graph = StepGraph(stages, slicing, 1, 1, False, ("expert",))
    order = stage_list(graph, 0, direction, Overlap(kind, 1)).compiled
    assert list(order.ops) == list(dict.fromkeys(stage_order(graph, 0, direction, Overlap(kind, 1))))
    assert len(order.classes) < len(order.ops)
    for op, number in zip(order.ops, order.class_of, strict=True):
        assert order.classes[number] == (op.kind, op.direction == "B", graph.tokens(op), graph.block(op))
