"""Gradients in chunks: the cuts of buffers, legal lists, and FlowMoE's two theorems on the simulator's clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import GradientPart, ModelSpec, Ownership
from foldray.clock import COMPUTE, OpCosts, Recording, ScheduleError, Span, check, op_costs, simulate
from foldray.finding import find
from foldray.fold import Fold
from foldray.graph import REDUCTIONS, Op, Reduction, SliceCost, Slicing, StepGraph, cut_buffer, slice_sequence
from foldray.orders import OVERLAPS, Overlap, step_schedule
from foldray.orders.position import PositionList
from tests.foldray.blocks import DENSE, MOE
from tests.foldray.parity import MODEL
from tests.gate import examples

PARTS = st.lists(st.integers(0, 300), max_size=8).map(
    lambda sizes: [GradientPart(size, (("attention", number),)) for number, size in enumerate(sizes)]
)
SECONDS = st.fixed_dictionaries(
    {kind: st.floats(0.01, 5.0) for kind in ("attention", "route", "expert", "merge", "ffn", "head", "dispatch", "combine")}
)


@given(PARTS, st.sampled_from([2, 4, 8]), st.one_of(st.none(), st.integers(1, 3000)), st.sampled_from([1, 7, 64]))
def test_chunks_cover_a_buffer_once_and_know_who_makes_them(parts, itemsize: int, most: int | None, granule: int) -> None:
    chunks = cut_buffer("dense", parts, itemsize, most, granule)
    total = sum(part.elements for part in parts)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks)][: len(chunks)]
    assert (chunks[-1].stop if chunks else 0) == -(-total // granule) * granule
    begin = 0
    made_by: dict[int, tuple] = {}
    for part in parts:
        made_by |= dict.fromkeys(range(begin, begin := begin + part.elements), part.makers[0])
    for chunk in chunks:
        assert chunk.start % granule == 0
        assert chunk.bytes == (chunk.stop - chunk.start) * itemsize
        assert most is None or chunk.bytes <= max(most, granule * itemsize)
        wanted = {made_by[element] for element in range(chunk.start, min(chunk.stop, total))}
        assert set(chunk.makers) == wanted


def test_a_rank_buffers_its_gradients_in_the_order_of_backward() -> None:
    model = ModelSpec(**{**MODEL, "layers": 2, "moe_every": 2, "tied_embeddings": True})
    parts = Ownership(model, Fold(1)).gradient_parts(0)
    assert [part.makers for part in parts["expert"]] == [(("expert", 1),)]
    assert [part.makers for part in parts["dense"]] == [
        (("shared", 1),), (("attention", 1),), (("ffn", 0),), (("attention", 0),), (("head", 1), ("embed", 0)),
    ]  # fmt: skip
    assert [part.makers[0] for part in parts["replicated"]] == [
        ("head", 1), ("route", 1), ("attention", 1), ("ffn", 0), ("attention", 0),
    ]  # fmt: skip
    last = Ownership(model, Fold(2, pp=2)).gradient_parts(1)
    assert last["dense"][0].makers == (("head", 1),), "the tied copy is the first to be whole"


def graph_of(kind: str, degree: int, batch_degree: int, most: int | None, **more: Any) -> StepGraph:
    cut = slice_sequence("time_uniform", 40, degree, SliceCost(1, 1))
    if kind == "moe_only":
        cut = cut._replace(attention=(40,))
    if kind == "sequential":
        cut = Slicing((40,), (40,))
    stages = more.pop("stages", ((MOE, DENSE, MOE),))
    pp = more.get("pp", 1)
    chunks: list[tuple] = [()] * pp
    for position in range(pp):
        held = [
            layer for number, layers in enumerate(StepGraph(stages, cut).layers) if number % pp == position for layer in layers
        ]
        kinds = {layer: stages_kind(stages, layer) for layer in held}
        dense = [GradientPart(100, (("attention", layer),)) for layer in sorted(held, reverse=True)]
        expert = [GradientPart(70, (("expert", layer),)) for layer in sorted(held, reverse=True) if kinds[layer] == MOE]
        chunks[position] = (*cut_buffer("dense", dense, 4, most), *cut_buffer("expert", expert, 4, most))
    settings = {"ragged": False, "micro_batches": batch_degree, "batch_degree": batch_degree, **more}
    return StepGraph(stages, cut, chunks=tuple(chunks), **settings)


def stages_kind(stages: tuple, layer: int) -> str:
    return [kind for stage in stages for kind in stage][layer]


def costs_of(seconds: dict[str, float], startup: float, per_byte: float) -> OpCosts:
    """Make equal costs for all parts. Backward takes twice as long as forward, except for all-to-alls."""
    table = {
        (kind, direction, part): value * (2 if direction == "B" and kind not in ("dispatch", "combine") else 1)
        for kind, value in seconds.items()
        for direction in "FB"
        for part in range(8)
    }
    return OpCosts(tuple(sorted(table.items())), startup, per_byte)


def clock_of(graph: StepGraph, costs: OpCosts) -> Any:
    """Make the same costs for the simulator. All communication shares one link."""
    seconds = dict(costs.seconds)

    def cost(op: Op) -> Any:
        if op.kind == "reduce":
            return (("link", costs.startup + costs.per_byte * graph.chunk(op).bytes),)
        return ((COMPUTE if graph.channel(op) is None else "link", seconds.get((op.kind, op.direction, op.part), 0.0)),)

    return cost


@given(
    st.sampled_from(list(OVERLAPS)), st.sampled_from(REDUCTIONS), st.integers(1, 4), st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 2000)), st.booleans(), st.sampled_from([1, 2]), SECONDS, st.integers(1, 3), st.booleans(),
    st.sampled_from([(), ("expert",), ("expert", "attention")]), st.sampled_from([(), ("ffn",), ("attention", "expert", "ffn")]),
)  # fmt: skip
@examples(200)
def test_every_list_with_reductions_is_legal(
    kind, reduction, degree, batch_degree, most, ragged, pp, seconds, lag, copies, later, offloaded
) -> None:
    batch_degree = 1 if kind == "sequential" else batch_degree
    stages = ((MOE, DENSE), (DENSE, MOE))[:pp]
    cuts = {"ragged": ragged, "pp": pp, "stages": stages, "micro_batches": 2 * batch_degree, "later": later}
    cuts |= {"offloaded": offloaded}
    graph = graph_of(kind, degree, batch_degree, most, **cuts)
    graph = replace(graph, copied=tuple(layer for layer, block in enumerate(graph.blocks) if block.moe)) if copies else graph
    for costs in (None, costs_of(seconds, 0.1, 0.01)):
        schedule = step_schedule(graph, Overlap(kind, lag), None, Reduction(reduction, most), costs)
        check(graph, schedule)
        assert [sum(op.kind == "reduce" for op in ops) for ops in schedule] == [len(chunks) for chunks in graph.chunks]
        assert sum(op.kind == "copy" for ops in schedule for op in ops) == 2 * len(graph.copied)


def test_weights_leave_for_copies_as_their_block_begins_and_gradients_come_home_beside_the_next_backward() -> None:
    graph = replace(graph_of("sequential", 1, 1, None, stages=((MOE, MOE),), micro_batches=2), copied=(0, 1))
    for reduction in ("end", "buckets"):
        (order,) = step_schedule(graph, Overlap("sequential"), None, Reduction(reduction))
        names = [str(op) for op in order]
        for layer, first in ((0, "embed F0.0"), (1, "attention F1.0")):
            assert names[names.index(f"copy F{layer}.0") + 1] == first
            before = names[names.index(f"copy B{layer}.0") - 1]
            assert before == f"expert B{layer}.1"
        sums = [name for name in names if name in ("copy B1.0", "copy B0.0", "attention B1.1", *map(str, graph.reductions(0)))]
        dense, expert = map(str, graph.reductions(0))
        assert sums == ["copy B1.0", "attention B1.1", "copy B0.0", dense, expert]


def test_a_found_list_has_copies_where_the_link_idles() -> None:
    graph = replace(graph_of("sequential", 1, 1, None, stages=((MOE, MOE, MOE),)), copied=(0, 1, 2), chunks=())
    seconds = {"attention": 1.0, "expert": 1.0, "dispatch": 0.8, "combine": 0.8, "copy": 1.5, "route": 0.1, "merge": 0.1}
    cost = clock_of(graph, costs_of(seconds, 0.0, 0.0))
    found = find(graph, cost)
    check(graph, found.schedule)
    named = simulate(graph, step_schedule(graph, Overlap("sequential")), cost).seconds
    assert found.seconds <= named
    (order,) = found.schedule
    assert order.index(Op("copy", "F", 2)) < order.index(Op("attention", "F", 2)), "weights of later blocks travel early"


def test_a_chunk_before_its_gradients_is_refused() -> None:
    graph = graph_of("aaam", 2, 1, 200)
    (order,) = step_schedule(graph, Overlap("aaam"), None, Reduction("buckets", 200))
    chunk = next(op for op in order if op.kind == "reduce")
    early = [op for op in order if op != chunk]
    with pytest.raises(ScheduleError, match=f"{chunk} before [a-z]+ B.*, which it needs"):
        check(graph, ((early[0], chunk, *early[1:]),))


def test_flow_goes_through_micro_batches_side_by_side() -> None:
    """FlowMoE, section 3.2: AT1 AT2 E1 E2 compute while D1 D2 C1 C2 travel."""
    graph = StepGraph(((MOE,),), Slicing((8,), (8,)), micro_batches=4, batch_degree=2, ragged=False)
    (order,) = step_schedule(graph, Overlap("flow"))
    forward = [f"{op.kind}{op.micro_batch}" for op in order if op.direction == "F" and op.micro_batch < 2]
    assert [name for name in forward if name[:-1] in ("attention", "expert", "merge")] == [
        "attention0", "attention1", "expert0", "expert1", "merge0", "merge1",
    ]  # fmt: skip
    assert [name for name in forward if name[:-1] in ("dispatch", "combine")] == [
        "dispatch0",
        "dispatch1",
        "combine0",
        "combine1",
    ]
    backward = [f"{op.kind}{op.micro_batch}" for op in order if op.direction == "B" and op.micro_batch < 2]
    assert backward.index("expert1") < backward.index("expert0") < backward.index("attention1") < backward.index("attention0")
    halves = [op.micro_batch // 2 for op in order]
    assert halves == sorted(halves), "the second pair follows the first"


CASES = (
    st.sampled_from(list(OVERLAPS)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(20, 1000),
    SECONDS,
    st.floats(0.0001, 0.02),
)


@given(*CASES, st.floats(0.0, 2.0))
@examples(120)
def test_no_all_to_all_waits_longer_than_one_chunk(kind, degree, batch_degree, most, seconds, per_byte, startup) -> None:
    batch_degree = 1 if kind == "sequential" else batch_degree
    graph, costs = graph_of(kind, degree, batch_degree, most), costs_of(seconds, startup, per_byte)
    schedule = step_schedule(graph, Overlap(kind), None, Reduction("chunks", most), costs)
    spans = simulate(graph, schedule, clock_of(graph, costs)).spans
    longest = startup + per_byte * max(graph.chunk(op).bytes for op in graph.reductions(0))
    assert max(waits(graph, spans)) <= longest + 1e-9


def waits(graph: StepGraph, spans: dict[Op, Span]) -> list[float]:
    """Return how long each all-to-all waited for gradients: from the time at which it could have started without them."""
    found, before = [], 0.0
    for op in sorted((op for op in spans if op.kind in ("dispatch", "combine")), key=spans.__getitem__):
        ready = max([before, *(spans[need].end for need in graph.needs(op))])
        found.append(spans[op].start - ready)
        before = spans[op].end
    return found


@given(*CASES)
@examples(120)
def test_chunks_are_never_later_than_one_reduction_at_the_end(kind, degree, batch_degree, most, seconds, per_byte) -> None:
    """FlowMoE's theorem 1. It assumes that a reduction takes no time to start."""
    batch_degree = 1 if kind == "sequential" else batch_degree
    took = {}
    for reduction in ("end", "chunks"):
        graph, costs = graph_of(kind, degree, batch_degree, most), costs_of(seconds, 0.0, per_byte)
        schedule = step_schedule(graph, Overlap(kind), None, Reduction(reduction, most), costs)
        took[reduction] = simulate(graph, schedule, clock_of(graph, costs)).seconds
    assert took["chunks"] <= took["end"] + 1e-9


def test_all_to_alls_wait_less_and_less_as_chunks_get_smaller() -> None:
    """FlowMoE's theorem 2: if chunks take no time to start, the wait tends to zero with their size."""
    seconds = {
        "attention": 1.0,
        "expert": 0.7,
        "dispatch": 0.45,
        "combine": 0.45,
        "route": 0.1,
        "merge": 0.1,
        "ffn": 0.8,
        "head": 0.2,
    }
    found = []
    for most in (400, 200, 100, 40, 20, 4):
        graph, costs = graph_of("one_a_one_m", 4, 1, most), costs_of(seconds, 0.0, 0.004)
        schedule = step_schedule(graph, Overlap("one_a_one_m"), None, Reduction("chunks", most), costs)
        found.append(max(waits(graph, simulate(graph, schedule, clock_of(graph, costs)).spans)))
    assert found[0] > 0.1
    assert all(wait <= 0.004 * most + 1e-9 for wait, most in zip(found, (400, 200, 100, 40, 20, 4), strict=True))
    assert found[-1] < 0.02


def test_costs_are_read_from_a_recorded_step() -> None:
    graph, costs = graph_of("aaam", 2, 1, 200), costs_of({"attention": 1.0, "dispatch": 0.5, "combine": 0.25}, 0.3, 0.002)
    (order,) = step_schedule(graph, Overlap("aaam"), None, Reduction("buckets", 200))
    spans = simulate(graph, (order,), clock_of(graph, costs)).spans
    found = op_costs(graph, [Recording(order, spans)])
    assert dict(found.seconds)["attention", "B", 0] == pytest.approx(2.0)
    assert dict(found.seconds)["dispatch", "F", 1] == pytest.approx(0.5)
    again = PositionList(graph, 0, Reduction("buckets"))
    again.write([op for op in order if op.kind != "reduce"])
    assert again.end() == order
