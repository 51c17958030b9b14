"""AF-Pipe: lists for attention and experts on positions of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, check, times
from foldray.graph import Op, Place, Slicing, StepGraph
from foldray.kinds import WITH_WEIGHTS
from foldray.orders import Ordering, Overlap, position_list, step_schedule
from foldray.orders.af_pipe import _NEARLY, _Line, _passes, _run, _ways, af_pipe, chain
from tests.foldray.blocks import DENSE, FURTHER, MOE
from tests.foldray.order import check_lists, peak
from tests.gate import examples

WHOLE = Slicing((8,), (8,))


def apart(layers: int, attention: int, experts: int, micro_batches: int = 1, further: int = 0, **changes) -> StepGraph:
    """Return a step whose block l has its attention at position l mod `attention`, and its experts at l mod `experts`.

    Attention of further tokens is where the last block's is.
    """
    places = tuple(Place(min(i, layers - 1) % attention, attention + i % experts) for i in range(layers + further))
    blocks = changes.pop("blocks", (MOE,) * layers)
    stages = tuple((block,) for block in blocks) if attention > 1 else (tuple(blocks),)
    stages = (*stages[:-1], stages[-1] + (FURTHER,) * further)
    return StepGraph(stages, changes.pop("slicing", WHOLE), attention, micro_batches, places=places, **changes)


@pytest.mark.gate(1 / 2)
@given(
    st.lists(st.sampled_from([DENSE, MOE, MOE]), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([WHOLE, Slicing((4, 4), (4, 4)), Slicing((5, 3), (4, 4)), Slicing((8,), (4, 4))]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("expert",), ("attention", "expert")]),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 3),
    st.sets(st.sampled_from(WITH_WEIGHTS)),
    st.booleans(),
    st.integers(0, 2),
)
@examples(300)
def test_any_placement_passes_the_checker_and_ends(
    blocks, attention, experts, micro_batches, slicing, ragged, gathers, recompute, backward, alive, parts, later, whole, further
) -> None:
    graph = apart(
        len(blocks), attention, experts, micro_batches * parts, further, blocks=tuple(blocks), slicing=slicing, ragged=ragged,
        gathers=gathers and len(slicing.attention) > 1, recompute=recompute if backward else (), backward=backward,
        batch_degree=parts, later=tuple(sorted(later)), whole=whole,
    )  # fmt: skip
    seen: set[Op] = set()
    for op in graph.ops():
        assert op not in seen
        assert seen.issuperset(graph.needs(op)), op
        seen.add(op)
    without = replace(graph, later=())
    for step, lists in (without, af_pipe(without, alive)), (graph, step_schedule(graph, Overlap("sequential"))):
        check(step, lists)
        check_lists(step, lists)
        # With one lane for every position and channel, the run ends at some time.
        times(step, lists, lambda op: ((str(graph.channel(op) or COMPUTE), 1.0),))


def test_results_go_straight_to_the_next_attention() -> None:
    graph = apart(4, 2, 2)
    for layer, (here, experts, onwards) in enumerate([(0, 2, 1), (1, 3, 0), (0, 2, 1)]):
        assert graph.where(Op("dispatch", "F", layer)) == graph.where(Op("counts", "F", layer)) == (here, experts)
        assert graph.where(Op("combine", "F", layer)) == (experts, onwards)
        assert graph.where(Op("combine", "B", layer)) == (onwards, experts)
        assert graph.where(Op("dispatch", "B", layer)) == (experts, here)
        assert graph.where(Op("merge", "F", layer)) == (onwards,)
        assert graph.where(Op("handover", "F", layer)) == (here, onwards)
        assert graph.needs(Op("handover", "F", layer)) == (Op("shared", "F", layer),)
        assert graph.needs(Op("merge", "F", layer)) == (Op("combine", "F", layer), Op("handover", "F", layer))
        assert set(graph.needs(Op("route", "B", layer))) >= {Op("dispatch", "B", layer), Op("shared", "B", layer)}
        assert Op("handover", "B", layer + 1) in graph.needs(Op("shared", "B", layer))
    # The last block's results come back to its own attention, which has the head.
    assert graph.where(Op("combine", "F", 3)) == (3, 1)
    assert graph.where(Op("merge", "F", 3)) == graph.where(Op("head", "F", 3)) == (1,)


def test_each_direction_between_two_positions_is_a_queue() -> None:
    graph = apart(2, 1, 1)
    assert graph.channel(Op("dispatch", "F", 0)) == graph.channel(Op("combine", "B", 0)) == ("tokens_up", 0, 1)
    assert graph.channel(Op("combine", "F", 0)) == graph.channel(Op("dispatch", "B", 0)) == ("tokens_down", 1, 0)


def test_a_micro_batch_goes_through_halves() -> None:
    blocks = (DENSE, MOE, MOE)
    assert [half.position for half in chain(apart(3, 2, 2, blocks=blocks))] == [0, 1, 3, 0, 2, 0]


def test_the_rows_of_a_further_token_travel_while_the_head_before_computes() -> None:
    graph = apart(2, 1, 1, further=1)
    order = [(op.kind, op.layer) for op in position_list(graph, 0, Ordering()) if op.direction == "F"]
    assert order[-5:] == [("shared", 2), ("head", 1), ("combine", 2), ("merge", 2), ("head", 2)]
    assert ("dispatch", 2) in order[:-5]


def test_evaluation_leaves_the_positions_of_further_tokens_idle() -> None:
    graph = replace(apart(1, 1, 2, further=1), stages=((MOE,),), backward=False)
    lists = step_schedule(graph, Overlap("sequential"))
    check(graph, lists)
    assert [bool(ops) for ops in lists] == [True, True, False]


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_both_halves_work_at_once(micro_batches: int) -> None:
    """With micro-batches in turns, neither half waits for the other for long."""
    graph = apart(4, 2, 2, micro_batches)
    spans = times(graph, af_pipe(graph), lambda op: ((COMPUTE, _units(graph, op)),) if _units(graph, op) else (("way", 0.01),))
    whole = max(span.end for span in spans.values())
    busy = [sum(_units(graph, op) for op in graph.ops() if graph.where(op) == (position,)) for position in range(4)]
    assert max(busy) / whole >= {1: 0.2, 2: 0.35, 4: 0.6, 8: 0.7}[micro_batches]


def _units(graph: StepGraph, op: Op) -> float:
    """Attention and experts take as long as each other, and backward twice as long."""
    return (1 if op.direction == "F" else 2) * (op.kind in ("attention", "expert"))


def test_few_micro_batches_alive_need_little_memory() -> None:
    graph = apart(4, 2, 2, 6)
    one, more = peak(graph, af_pipe(graph, 1)), peak(graph, af_pipe(graph))
    assert all(few <= many for few, many in zip(one, more, strict=True))
    assert one[2] == 2  # the experts of two blocks, of one micro-batch


@pytest.mark.parametrize(
    ("groups", "virtual", "rounds"), [(1, 2, 2), (1, 4, 4), (2, 2, 2), (2, 4, 1), (2, 4, 4), (4, 2, 2), (4, 4, 1)]
)
def test_the_bubble_is_that_of_interleaved_passes(groups: int, virtual: int, rounds: int) -> None:
    """DisagMoE, equation 3: with hidden rows and equal halves, one pass of a half for each other position."""
    micro_batches = 2 * groups * rounds
    graph = apart(virtual * groups, groups, groups, micro_batches)
    spans = times(graph, af_pipe(graph), lambda op: ((COMPUTE if not graph.channel(op) else "way", _units(graph, op)),))
    whole = max(span.end for span in spans.values())
    assert whole - 3 * virtual * micro_batches == 3 * (2 * groups - 1)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_bubble_of_1f1b_is_that_of_whole_stages(pp: int, blocks: int) -> None:
    """DisagMoE, equation 2: one pass of a stage for each other position, with its all-to-alls, which nothing hides."""
    attention, experts, way, micro_batches = 2.0, 1.0, 0.5, 2 * pp
    graph = StepGraph(((MOE,) * blocks,) * pp, WHOLE, pp, micro_batches, ragged=False)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        if graph.channel(op):
            return (("way", way if op.kind in ("dispatch", "combine") else 0.0),)
        return ((COMPUTE, (1 if op.direction == "F" else 2) * {"attention": attention, "expert": experts}.get(op.kind, 0.0)),)

    spans = times(graph, step_schedule(graph, Overlap("sequential")), cost)
    whole = max(span.end for span in spans.values())
    stage = blocks * (3 * attention + 3 * experts + 4 * way)
    assert whole - micro_batches * stage == pytest.approx((pp - 1) * stage)


@pytest.mark.parametrize(("groups", "virtual", "micro_batches"), [(1, 4, 8), (2, 4, 16), (4, 4, 32)])
def test_rows_that_travel_as_long_as_a_half_computes_stay_hidden(groups: int, virtual: int, micro_batches: int) -> None:
    graph = apart(virtual * groups, groups, groups, micro_batches)
    rows = ("dispatch", "combine")

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel = graph.channel(op)
        return ((str(channel), float(op.kind in rows)),) if channel else ((COMPUTE, _units(graph, op)),)

    whole = max(span.end for span in times(graph, af_pipe(graph), cost).values())
    assert 3 * virtual * micro_batches / whole > 0.86


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 1, 2, 5]),
)
@example([(2, 0), (0, 0)], 16, True, None)  # a way is taken whose bound is between the fastest one and a little more
@example([(0, 1), (1, 1)], 3, False, 1)  # a micro-batch begins while the last half of the one before runs
@examples(100)
def test_ways_that_do_not_run_would_not_have_been_taken(halves, micro_batches, backward, alive) -> None:
    line = _Line(tuple(halves), 4, micro_batches, backward)
    ways = _ways(line, alive)
    runs = [_run(line, priority, limit) for limit, priority in ways]
    assert all(line.least(limit) <= seconds for (limit, _), (seconds, _) in zip(ways, runs, strict=True))
    fastest = min(seconds for seconds, _ in runs)
    assert _passes(line, alive) == next(passes for seconds, passes in runs if seconds <= _NEARLY * fastest)
