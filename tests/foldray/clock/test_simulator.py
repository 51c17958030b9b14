"""The clock with costs: results by hand, and properties for any costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, Recording, Span, length, merged, replay, simulate
from foldray.clock.recorded import slice_timings
from foldray.finding import best_overlaps
from foldray.graph import Op, PipelineGraph, Slicing, StepGraph, slice_sequence
from foldray.graph.slicing import SliceCost
from foldray.orders import OVERLAPS, Overlap, pipeline, step_schedule
from tests.foldray.blocks import DENSE, MOE
from tests.gate import examples


def graph_of(degree: int = 2, blocks: tuple = (MOE,), **more: Any) -> StepGraph:
    cut = tuple([8 // degree] * degree)
    return StepGraph((blocks,), Slicing(cut, cut), **{"ragged": False, "backward": False, **more})


def cost_of(seconds: dict[str, float], link: str = "link") -> Any:
    return lambda op: ((link if op.kind in ("dispatch", "combine", "counts") else COMPUTE, seconds.get(op.kind, 0.0)),)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # One block in two pieces: attention 3, experts 1, each all-to-all 2. A0 0–3, A1 3–6, D0 3–5, D1 6–8.
        ("aaam", 12),  # E0 6–7, C0 8–10 after D1, E1 8–9, C1 10–12
        ("sequential", 4 * 2 + 2 * 4),  # nothing overlaps: 6 + 4 + 2 + 4
    ],
)
def test_one_block_by_hand(kind: str, seconds: float) -> None:
    graph = graph_of(1 if kind == "sequential" else 2)
    whole = 2 if kind == "sequential" else 1
    cost = cost_of({"attention": 3 * whole, "expert": whole, "dispatch": 2 * whole, "combine": 2 * whole})
    found = simulate(graph, step_schedule(graph, Overlap(kind)), cost)
    assert found.seconds == seconds
    assert found.usage[0].compute == 8
    assert found.usage[0].communication == 8


def test_rows_wait_for_counts_and_nobody_waits_for_rows_to_leave() -> None:
    graph = graph_of(2, ragged=True)
    cost = cost_of({"attention": 1.0, "counts": 5.0, "dispatch": 1.0})
    spans = simulate(graph, step_schedule(graph, Overlap("aaam")), cost).spans
    assert spans[Op("dispatch", "F", 0)] == Span(6.0, 7.0)
    assert spans[Op("attention", "F", 0, 1)] == Span(1.0, 2.0)


def test_traffic_inside_an_op_keeps_its_lane_busy() -> None:
    graph = graph_of(2)

    def cost(op: Op) -> Any:
        if op.kind == "attention":
            return (COMPUTE, 1.0), ("link", 2.0), (COMPUTE, 1.0)
        return (("link", 3.0),) if op.kind == "dispatch" else ((COMPUTE, 0.0),)

    spans = simulate(graph, step_schedule(graph, Overlap("aaam")), cost).spans
    a1, d0 = (next(op for op in graph.pieces(kind, 0) if op.part == part) for kind, part in (("attention", 1), ("dispatch", 0)))
    assert spans[d0] == Span(4.0, 7.0)
    assert spans[a1] == Span(4.0, 10.0), "its own traffic waits for the dispatch, 7–9"


SECONDS = st.fixed_dictionaries(
    {kind: st.floats(0.01, 5.0) for kind in ("attention", "route", "expert", "merge", "ffn", "head", "dispatch", "combine")}
)


@given(SECONDS, st.sampled_from(list(OVERLAPS)), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.floats(1.0, 4.0))
@examples(60)
def test_no_step_beats_the_bound_and_bandwidth_never_costs_time(seconds, kind, degree, lag, other, faster) -> None:
    cut = slice_sequence("time_uniform", 40, degree, SliceCost(1, 1))
    if kind == "moe_only":
        cut = cut._replace(attention=(40,))
    graph = StepGraph(((MOE, DENSE, MOE),), cut, ragged=False)
    schedule = step_schedule(graph, Overlap(kind, lag), Overlap(kind, other))
    found = simulate(graph, schedule, cost_of(seconds))
    sides = {"F": {True: 0.0, False: 0.0}, "B": {True: 0.0, False: 0.0}}
    for op in schedule[0]:
        sides[op.direction][graph.channel(op) is not None] += seconds.get(op.kind, 0.0)
    assert found.seconds >= sum(max(side.values()) for side in sides.values()) - 1e-9
    quick = {key: value / faster if key in ("dispatch", "combine") else value for key, value in seconds.items()}
    assert simulate(graph, schedule, cost_of(quick)).seconds <= found.seconds + 1e-9
    used = found.usage[0]
    assert used.exposed == pytest.approx(length(merged(found.spans.values())) - used.compute), (
        "what is not computation and not waiting is exposed"
    )


def test_recorded_costs_are_taken_where_they_were_least_held_up() -> None:
    graph = graph_of(2)
    (a0, a1), (d0, d1) = graph.pieces("attention", 0), graph.pieces("dispatch", 0)
    (order,) = step_schedule(graph, Overlap("aaam"))
    nothing = {op: Span(0, 0) for op in order}
    first = {**nothing, a0: Span(0, 2), d0: Span(2, 9), a1: Span(2, 4), d1: Span(4, 12)}
    second = {**nothing, a0: Span(0, 4), d0: Span(4, 9), a1: Span(4, 8), d1: Span(8, 12)}
    found = replay(graph, [Recording(order, spans) for spans in (first, second)])
    # d0 takes 5, and starts when the second rank is ready. d1 takes 3, counted from the end of the first dispatch.
    assert [found.spans[op] for op in (a0, d0, a1, d1)] == [Span(0, 2), Span(4, 9), Span(2, 4), Span(9, 12)]
    assert [used.compute for used in found.usage] == [4, 8]
    assert found.seconds == 12


@pytest.mark.parametrize("whole", [False, True])
def test_slices_share_an_op_for_the_weights_of_all_of_them(whole: bool) -> None:
    graph = StepGraph(((MOE,),), Slicing((6, 2), (4, 4)), ragged=False, later=("attention",), whole=whole)
    seconds = {"F": 1.0, "B": 2.0, "W": 8.0 if whole else 0.0}
    spans = {op: Span(0.0, seconds[op.direction]) for op in graph.ops() if op.kind == "attention"}
    assert sorted(slice_timings(graph, spans, ranks=2)) == [(4, 16, 3.0 + 2.0 * whole), (12, 12, 3.0 + 6.0 * whole)]


def test_a_pipeline_is_simulated_too() -> None:
    graph = PipelineGraph(2, 4)
    found = simulate(graph, pipeline(graph), lambda op: ((COMPUTE, 1.0 if op.kind == "stage" else 0.0),))
    assert found.seconds == 2 * 4 + 2


@pytest.mark.parametrize("ahead", [(0.0, 0.0, 0.0), (0.0, 1e5, -50.0), (0.0, -3.0, 4.0)])
def test_hosts_need_not_share_a_clock(ahead: tuple[float, ...]) -> None:
    """Recordings of positions whose clocks count from different moments are replayed as they ran."""
    graph = PipelineGraph(3, 5)
    schedule = pipeline(graph)
    ran = simulate(graph, schedule, lambda op: ((COMPUTE, 1.0 if op.kind == "stage" else 0.25),))
    recordings = [
        Recording(order, {op: Span(*(time + shift for time in ran.spans[op])) for op in order})
        for order, shift in zip(schedule, ahead, strict=True)
    ]
    assert replay(graph, recordings).seconds == pytest.approx(ran.seconds)


@given(SECONDS, st.integers(2, 5))
@examples(20)
def test_the_best_ways_are_as_fast_as_any_pair(seconds, degree) -> None:
    cut = slice_sequence("time_uniform", 40, degree, SliceCost(1, 1))
    graph, cost = StepGraph(((MOE, DENSE, MOE),), cut, ragged=False), cost_of(seconds)
    ways = [Overlap("one_a_one_m"), *(Overlap("stream", lag) for lag in range(1, degree + 1))]
    fastest = min(simulate(graph, step_schedule(graph, f, b), cost).seconds for f in ways for b in ways)
    found = simulate(graph, step_schedule(graph, *best_overlaps(graph, cost)), cost).seconds
    assert found == pytest.approx(fastest)
