"""Lists with what goes to the host: legal for every kind, cut and pipeline, early enough, and with few blocks on their way."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, ScheduleError, check, simulate
from foldray.finding import find
from foldray.graph import Op, Schedule, SliceCost, StepGraph, slice_sequence
from foldray.kinds import OFFLOAD, OP_KINDS
from foldray.orders import OVERLAPS, Overlap, step_schedule
from tests.foldray.blocks import DENSE, FURTHER, MOE
from tests.foldray.order import check_lists
from tests.foldray.random_lists import lists_at_random, random_cost
from tests.gate import examples

FLAT = SliceCost(0, 1)
KINDS = ("attention", "expert", "ffn", "shared")
STAGES = [
    ((MOE, DENSE, MOE, MOE),),
    ((MOE, DENSE), (MOE, MOE, DENSE)),
    ((MOE,), (DENSE,), (MOE,), (MOE,)),
    ((MOE, MOE, FURTHER),),
]


def most_fetched(graph: StepGraph, schedule: Schedule) -> int:
    """Return the most blocks of a stage, for one part of its micro-batches, that a list has fetched and not taken backward."""
    most = 0
    for ops in schedule:
        there: dict[tuple, set[int]] = {}
        for op in ops:
            unit = graph.stage_of[op.layer], op.micro_batch % graph.together
            block = op.layer, op.micro_batch
            if op.kind == OFFLOAD and op.direction == "B":
                there.setdefault((*unit, op.part), set()).add(block)  # type: ignore[arg-type]
                most = max(most, *map(len, there.values()))
            if (op.kind, op.direction, op.part) == (graph.entry, "B", 0):
                for blocks in there.values():
                    blocks.discard(block)  # type: ignore[arg-type]
    return most


def most_unsent(graph: StepGraph, schedule: Schedule) -> int:
    """Return the most blocks of a stage and micro-batch that have computed an op and not begun to send what it keeps."""
    most = 0
    for ops in schedule:
        there: dict[tuple, set[int]] = {}
        for op in ops:
            unit = graph.stage_of[op.layer], op.micro_batch
            if op.direction == "F" and (goes := graph.offload_of(op)) is not None:
                there.setdefault((*unit, goes.part), set()).add(op.layer)
                most = max(most, *map(len, there.values()))
            if op.kind == OFFLOAD and op.direction == "F":
                there[*unit, op.part].remove(op.layer)
    return most


def graph_of(stages: Any = STAGES[0], degree: int = 1, fewer: int | None = None, parts: int = 1, **more: Any) -> StepGraph:
    cut = slice_sequence("token_uniform", 16, degree, FLAT, attention_degree=fewer)
    pp = 1 if len(stages) == 1 else 2
    given = {"ragged": True, "offloaded": KINDS, "micro_batches": 4 * parts, "batch_degree": parts, **more}
    return StepGraph(stages, cut, pp, **given)


@given(
    st.sampled_from(list(OVERLAPS)), st.sampled_from(STAGES), st.integers(1, 4), st.booleans(), st.integers(1, 3), st.booleans(),
    st.sampled_from([(), ("expert", "attention", "ffn")]), st.booleans(),
    st.lists(st.sampled_from(KINDS), min_size=1, unique=True), st.integers(1, 3),
)  # fmt: skip
@examples(200)
def test_every_named_list_is_legal(kind, stages, degree, fewer, parts, gathers, later, whole, offloaded, lag) -> None:
    cut = {"degree": degree, "fewer": 1 if fewer else None, "parts": 1 if kind in ("sequential", "weave") else parts}
    graph = graph_of(stages, gathers=gathers, later=later, whole=whole, offloaded=tuple(offloaded), **cut)
    schedule = step_schedule(graph, Overlap(kind, lag))
    check(graph, schedule)
    check_lists(graph, schedule)
    assert most_fetched(graph, schedule) <= 2
    assert most_unsent(graph, schedule) <= 1 + (degree > 1)
    moves = [op for ops in schedule for op in ops if op.kind == OFFLOAD]
    assert (
        len(moves)
        == len(set(moves))
        == 2 * sum(len([*graph.offloads(layer)]) for layer in range(len(graph.blocks))) * (graph.micro_batches)
    )


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("stages", STAGES, ids=len)
def test_found_lists_have_few_blocks_on_their_way(stages: Any, seed: int) -> None:
    graph = graph_of(stages, 1 + seed % 2, later=("expert", "attention", "ffn") if seed % 3 else ())
    found = find(graph, random_cost(graph, seed, shared=bool(seed % 2)), ahead=seed % 4 / 2, moves=False)
    check(graph, found.schedule)
    check_lists(graph, found.schedule)
    assert most_fetched(graph, found.schedule) <= 2
    assert most_unsent(graph, found.schedule) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_any_legal_list_has_few_blocks_on_their_way(seed: int) -> None:
    """Whatever order the needs leave open."""
    graph = graph_of(((MOE, MOE, DENSE) * 2,) if seed else ((MOE,) * 4, (MOE, DENSE)), micro_batches=3)
    schedule = lists_at_random(graph, seed)
    check(graph, schedule)
    assert most_fetched(graph, schedule) <= 2
    assert most_unsent(graph, schedule) <= 2


@pytest.mark.parametrize("stage", [(MOE, MOE, DENSE) * 2, (MOE,) * 6], ids=["some dense", "all alike"])
def test_no_list_can_send_late_and_fetch_early(stage: Any) -> None:
    """The list that sends only if nothing else may run, and fetches whatever may be fetched."""
    graph = graph_of((stage,), micro_batches=3)
    left, order = dict.fromkeys(graph.ops()), dict[Op, None]()
    while left:
        free = [op for op in left if all(need in order for need in graph.needs(op))]
        free.sort(key=lambda op: (op.kind == OFFLOAD and op.direction == "F") - (op.kind == OFFLOAD and op.direction == "B"))
        order[free[0]] = None
        del left[free[0]]
    check(graph, (tuple(order),))
    assert most_unsent(graph, (tuple(order),)) == most_fetched(graph, (tuple(order),)) == 2


def test_a_block_is_fetched_as_the_backward_of_the_block_behind_it_begins() -> None:
    graph = graph_of(((MOE, MOE, MOE, MOE),), micro_batches=2, offloaded=("expert", "attention"))
    (order,) = step_schedule(graph, Overlap("sequential"))
    names = [str(op) for op in order]
    for layer in range(3):
        computed = names.index(f"expert F{layer}.1")
        assert names[computed + 1 : computed + 3] == [f"combine F{layer}.1", f"offload F{layer}.1"], "rows go first"
        assert names[names.index(f"attention F{layer}.1") + 1] == f"offload F{layer}.1/1"
    assert not any(name.startswith("offload F3") for name in names), "the last block goes backward at once"
    behind = names.index("attention B3.1")
    assert names[behind + 1 : behind + 3] == ["offload B1.1/1", "offload B1.1"]
    first = min(i for i, op in enumerate(order) if op.micro_batch == 1 and op.direction == "B")
    assert {*names[first : first + 3]} == {"head B3.1", "offload B2.1", "offload B2.1/1"}, "a pass begins with its first block"


def test_what_is_fetched_travels_beside_the_backward_of_a_block() -> None:
    """With copies as long as a block, the step takes no longer than without them; three times as long, they set its pace."""
    plain = graph_of(((DENSE,) * 8,), micro_batches=2, offloaded=())
    moving = replace(plain, offloaded=("attention", "ffn"))

    def seconds(graph: StepGraph, copy: float) -> float:
        def cost(op: Op) -> Any:
            if op.kind == OFFLOAD:
                return ((str(graph.channel(op)), copy),)
            return ((COMPUTE, {"attention": 1.0, "ffn": 1.0}.get(op.kind, 0.0) * (2 if op.direction == "B" else 1)),)

        return simulate(graph, step_schedule(graph, Overlap("sequential")), cost).seconds

    assert seconds(moving, 1.0) == seconds(plain, 0.0) == 2 * 8 * 6
    assert seconds(moving, 4.0) > 1.3 * seconds(plain, 0.0)


@pytest.mark.parametrize(
    ("late", "before", "message"),
    [
        ("offload B0.0", "attention B0.0", r"attention B0.0 before offload B0.0, which it needs"),
        ("attention F0.0", "offload F0.0", r"offload F0.0 before attention F0.0, which it needs|attention F0.0, which it needs"),
        ("offload F1.0", "attention F3.0", r"attention F3.0 before offload F1.0, which it needs"),
        ("attention B3.0", "offload B1.0", r"offload B1.0 before attention B3.0, which it needs"),
    ],
    ids=["fetched after its backward", "sent before it is there", "sent too late", "fetched too early"],
)
def test_a_wrong_list_is_refused(late: str, before: str, message: str) -> None:
    graph = graph_of(((MOE,) * 5,), micro_batches=1, offloaded=("attention",))
    (order,) = step_schedule(graph, Overlap("sequential"))
    moved = next(op for op in order if str(op) == late)
    rest = [op for op in order if op != moved]
    place = next(i for i, op in enumerate(rest) if str(op) == before) + 1
    with pytest.raises(ScheduleError, match=message):
        check(graph, ((*rest[:place], moved, *rest[place:]),))


def test_it_travels_both_ways_at_once() -> None:
    graph = graph_of()
    out, back = (graph.channel(Op(OFFLOAD, way, 0)) for way in ("F", "B"))
    assert out != back
    assert re.match("host", str(OP_KINDS[OFFLOAD].travels))
