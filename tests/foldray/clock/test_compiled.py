"""The compiled clock equals the plain one for any schedule and any costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import Maker
from foldray.clock import COMPUTE, CompiledSchedule, ScheduleError, times
from foldray.graph import Chunk, Op, PipelineGraph, Reduction, Schedule, Slicing, StepGraph, handover, stage
from foldray.graph.step_ops import Place
from foldray.orders import OVERLAPS, Overlap, pipeline, stage_order, step_schedule
from tests.foldray.blocks import DENSE, MOE
from tests.foldray.clock.plain_clock import plain_times
from tests.gate import examples

LENGTH = 48
SECONDS = st.one_of(st.integers(0, 4).map(float), st.floats(0.0, 4.0))  # whole numbers make equal times


def drawn_graph(kind: str, data: st.DataObject) -> StepGraph:
    """Draw a graph of dense and MoE blocks, with any number of pieces and stages, with or without reductions and counts."""
    degree = 1 if kind == "sequential" else data.draw(st.sampled_from([2, 3, 4]))
    cut = (LENGTH // degree,) * degree
    slicing = Slicing((LENGTH,) if kind == "moe_only" else cut, cut)
    pp, virtual = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]))
    block = st.sampled_from([DENSE, MOE])
    stages = tuple(tuple(data.draw(st.lists(block, min_size=1, max_size=2))) for _ in range(pp * virtual))
    again = data.draw(st.sampled_from([(), ("expert",), ("attention", "expert")]))
    batch_degree = data.draw(st.sampled_from([1, 2]))
    ragged, rounds, gathers = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    passes_on, count = data.draw(st.booleans()), pp * rounds * batch_degree
    graph = StepGraph(
        stages,
        slicing,
        pp,
        count,
        ragged,
        again,
        batch_degree=batch_degree,
        gathers=gathers,
        passes_on=passes_on,  # type: ignore[arg-type]
    )
    if not data.draw(st.booleans()):
        return graph
    chunks: list[list[Chunk]] = [[] for _ in range(pp)]
    for number, layers in enumerate(graph.layers):
        for layer in layers:
            maker: Maker = ("attention", layer)
            chunks[number % pp].append(Chunk(DENSE, layer, layer + 1, 4, (maker,)))
    return replace(graph, chunks=tuple(map(tuple, chunks)))


def drawn_cost(graph: Any, data: st.DataObject, lanes: list[str]) -> Callable[[Op], list[tuple[str, float]]]:
    """Draw costs by kind and direction. A collective uses one or two lanes, and computation may communicate in between."""
    known: dict[tuple[str, str], list[tuple[str, float]]] = {}
    inside = data.draw(st.booleans())

    def cost(op: Op) -> list[tuple[str, float]]:
        key = op.kind, op.direction
        if key not in known:
            links = [(data.draw(st.sampled_from(lanes)), data.draw(SECONDS)) for _ in range(data.draw(st.integers(1, 2)))]
            if graph.channel(op) is None:
                links = [(COMPUTE, data.draw(SECONDS)), *(links if inside else []), (COMPUTE, 1.0)]
            known[key] = links
        return known[key]

    return cost


def assert_equal(graph: Any, schedule: Schedule, cost: Any) -> None:
    """Compare both ways of the compiled clock with the plain one: `times`, and `run`, which uses one pass if it can."""
    plain = plain_times(graph, schedule, cost)
    compiled = CompiledSchedule(graph, schedule, lambda op: op)
    by_run = compiled.run([cost(op) for op in compiled.classes])
    spans = times(graph, schedule, cost)
    assert spans.keys() == plain.keys() == set(compiled.ops)
    for i, op in enumerate(compiled.ops):
        for start, end in (spans[op], (by_run.starts[i], by_run.ends[i])):
            assert start == pytest.approx(plain[op].start, rel=1e-12, abs=1e-12), op
            assert end == pytest.approx(plain[op].end, rel=1e-12, abs=1e-12), op


@pytest.mark.parametrize("lanes", [["link"], ["intra", "inter"]], ids=str)
@pytest.mark.parametrize("kind", OVERLAPS)
@given(st.data())
@examples(15)
def test_steps_run_as_on_the_plain_clock(kind: str, lanes: list[str], data: st.DataObject) -> None:
    """Test all overlap kinds, 1F1B and interleaved 1F1B, and reductions, with shared lanes."""
    graph = drawn_graph(kind, data)
    lags = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    reduction = Reduction(data.draw(st.sampled_from(["end", "buckets"])))
    schedule = step_schedule(graph, *(Overlap(kind, lag) for lag in lags), reduction=reduction)
    assert_equal(graph, schedule, drawn_cost(graph, data, lanes))


@pytest.mark.parametrize("kind", OVERLAPS)
@given(st.data())
@examples(10)
def test_one_pass_is_enough_where_no_lane_is_shared(kind: str, data: st.DataObject) -> None:
    graph = drawn_graph(kind, data)
    schedule = step_schedule(graph, Overlap(kind, 1))
    took = drawn_cost(graph, data, ["link"])

    def cost(op: Op) -> list[tuple[str, float]]:
        """Give every channel a lane of its own."""
        return [(COMPUTE if lane == COMPUTE else f"{graph.channel(op)}", seconds) for lane, seconds in took(op)]

    compiled = CompiledSchedule(graph, schedule, lambda op: op)
    costs = [cost(op) for op in compiled.classes]
    assert not compiled.contended(costs)
    assert_equal(graph, schedule, cost)
    assert compiled.one_pass([sum(seconds for _, seconds in each) for each in costs]) == compiled.run(costs)


def test_a_lane_is_shared_if_two_queues_use_it_at_one_position() -> None:
    graph = StepGraph(((MOE,),), Slicing((8,), (4, 4)), ragged=False)
    schedule = step_schedule(graph, Overlap("moe_only"))

    def shared(computing: str) -> bool:
        compiled = CompiledSchedule(graph, schedule, lambda op: op.kind)
        costs = [((("link" if kind in ("dispatch", "combine") else computing), 1.0),) for kind in compiled.classes]
        return compiled.contended(costs)

    assert [shared(lane) for lane in (COMPUTE, "other", "link")] == [False, False, True]


@given(st.data())
@examples(30)
def test_pipelines_run_as_on_the_plain_clock(data: st.DataObject) -> None:
    pp, virtual = data.draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]))
    graph = PipelineGraph(pp, pp * data.draw(st.integers(1, 3)), virtual)
    assert_equal(graph, pipeline(graph), drawn_cost(graph, data, ["a", "b"]))


def test_attention_and_experts_apart_run_as_on_the_plain_clock() -> None:
    """A dispatch has two positions. One of them computes its rows, and the other posts it much earlier."""
    graph = StepGraph(((MOE, MOE),), Slicing((8,), (4, 4)), 2, 1, False, backward=False, places=(Place(0, 1), Place(0, 1)))
    (order,) = [stage_order(graph, 0, "F", Overlap("one_a_one_m"))]
    schedule = tuple(tuple(op for op in order if place in graph.where(op)) for place in range(2))
    for lane in ("link", "other"):
        assert_equal(graph, schedule, lambda op, lane=lane: ((lane if graph.channel(op) else COMPUTE, 2.0), (COMPUTE, 0.5)))


@pytest.mark.parametrize("lane", ["link", "other"])
def test_what_is_posted_ahead_of_what_it_carries_waits_for_it(lane: str) -> None:
    graph = StepGraph(((MOE,),), Slicing((8,), (4, 4)), ragged=False)
    (order,) = step_schedule(graph, Overlap("moe_only"))
    ahead = [op for op in order if op.kind == "dispatch" and op.direction == "F"]
    schedule = ((*ahead, *(op for op in order if op not in ahead)),)
    assert_equal(graph, schedule, lambda op: ((lane if graph.channel(op) else COMPUTE, 2.0), ("link", 0.5)))


def test_ops_of_a_class_cost_the_same() -> None:
    graph = StepGraph(((MOE,),), Slicing((8,), (4, 4)), ragged=False)
    schedule = step_schedule(graph, Overlap("moe_only"))
    compiled = CompiledSchedule(graph, schedule, lambda op: (op.kind, op.direction))
    assert len(compiled.classes) < len(compiled.ops)
    seconds = {each: float(number) for number, each in enumerate(compiled.classes)}

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        return (("link" if graph.channel(op) else COMPUTE, seconds[op.kind, op.direction]),)

    lanes = ["link" if kind in ("dispatch", "combine") else COMPUTE for kind, _ in compiled.classes]
    found = compiled.run([((lane, seconds[each]),) for lane, each in zip(lanes, compiled.classes, strict=True)])
    assert dict(zip(compiled.ops, found.ends, strict=True)) == {op: span.end for op, span in times(graph, schedule, cost).items()}


def test_a_part_of_the_lists_takes_the_rest_as_done() -> None:
    """The list of a single stage needs handovers that are not in it."""
    graph = StepGraph(((MOE,), (MOE,)), Slicing((8,), (8,)), 2, 1, False)
    lists = ((), stage_order(graph, 1, "F", Overlap("sequential")))
    costs = ((COMPUTE, 1.0),)
    compiled = CompiledSchedule(graph, lists, lambda op: None, partial=True)
    assert max(compiled.run([costs]).ends) == len(lists[1]) - 1  # the shared expert runs while rows travel
    with pytest.raises(ScheduleError, match=r"position 1 in attention F1\.0 for handover F0\.0$"):
        CompiledSchedule(graph, lists, lambda op: None).run([costs])


def test_what_nobody_posts_never_travels() -> None:
    graph = PipelineGraph(2, 1, backward=False)
    lists = ((stage("F", 0, 0), handover("F", 0, 0)), ())
    for compiled in (CompiledSchedule(graph, lists, lambda op: None), CompiledSchedule(graph, lists, lambda op: op.kind)):
        with pytest.raises(ScheduleError, match=r"position 0 for the end of handover F0\.0$"):
            compiled.run([((COMPUTE, 1.0),)] * len(compiled.classes))


def test_ends_of_a_channel_that_differ_wait_for_each_other() -> None:
    graph = PipelineGraph(2, 2, backward=False)
    sent, taken = [handover("F", 0, 0), handover("F", 0, 1)], [handover("F", 0, 1), handover("F", 0, 0)]
    lists = ((stage("F", 0, 0), stage("F", 0, 1), *sent), (*taken, stage("F", 1, 0), stage("F", 1, 1)))
    with pytest.raises(ScheduleError, match=r"position 1 in F1\.0 for handover F0\.0"):
        CompiledSchedule(graph, lists, lambda op: None).run([((COMPUTE, 1.0),)])
