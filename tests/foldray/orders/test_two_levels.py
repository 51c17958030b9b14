"""Rows that go between nodes and inside them: edges and lists of both legs, and what travels at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foldray.clock import COMPUTE, Recording, Span, check, length, merged, recorded_cost, simulate
from foldray.finding import find
from foldray.graph import Chunk, Op, Reduction, SliceCost, Slicing, StepGraph, slice_sequence
from foldray.kinds import EXCHANGES, EXPERT, OP_KINDS
from foldray.orders import OVERLAPS, Overlap, step_schedule
from tests.foldray.blocks import DENSE, MOE
from tests.foldray.order import check_lists

LEGS = ("intra_dispatch", "intra_combine")


def graph_of(degree: int = 4, **more: Any) -> StepGraph:
    stages = more.pop("stages", ((MOE, MOE),))
    cut = Slicing((64,), (64,)) if degree == 1 else slice_sequence("token_uniform", 64, degree, SliceCost.of_model(64, 4))
    return StepGraph(stages, cut, **{"passes_on": True, **more})


@pytest.mark.parametrize("again", [False, True])
def test_rows_go_from_leg_to_leg_and_gradients_the_other_way(again: bool) -> None:
    graph = graph_of(2, recompute=(EXPERT,) if again else ())

    def needs(direction: Any) -> dict[str, set[str]]:
        ops = [Op(kind, direction, 1, 1) for kind in (*EXCHANGES, EXPERT)]
        assert all(need.part == 1 for op in ops for need in graph.needs(op))
        return {op.kind: {f"{need.direction} {need.kind}" for need in graph.needs(op)} for op in ops}

    assert needs("F") == {
        "dispatch": {"F route", "F counts"}, "intra_dispatch": {"F dispatch"}, "expert": {"F intra_dispatch"},
        "intra_combine": {"F expert"}, "combine": {"F intra_combine"},
    }  # fmt: skip
    assert needs("B") == {
        "combine": {"B merge"}, "intra_combine": {"B combine"}, "intra_dispatch": {"B expert"}, "dispatch": {"B intra_dispatch"},
        "expert": {"B intra_combine", "R expert" if again else "F expert"},
    }  # fmt: skip
    merge, route = graph.needs(Op("merge", "F", 1, 1)), graph.needs(Op("route", "B", 1, 1))
    assert {need.kind for need in merge} == {"route", "shared", "combine"}
    assert {str(need) for need in route} >= {"dispatch B1.0/1", "merge B1.0/1"}


def test_each_leg_has_a_queue_of_its_own_and_other_folds_have_no_such_leg() -> None:
    graph = graph_of(stages=((MOE,), (DENSE, MOE)), pp=2)
    channels = {op.kind: graph.channel(Op(op.kind, "F", 2)) for op in graph.ops() if op.kind in EXCHANGES}
    assert channels["dispatch"] == channels["combine"] != channels["intra_dispatch"] == channels["intra_combine"]
    assert not any(op.kind in LEGS and op.layer == 1 for op in graph.ops())
    assert not any(op.kind in LEGS for op in replace(graph, passes_on=False).ops())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 4, "batch_degree": 2},
    {"micro_batches": 3, "recompute": ("attention", "expert"), "later": ("attention", "expert")},
    {"stages": ((MOE, MOE), (DENSE, MOE)), "pp": 2, "micro_batches": 4, "later": ("expert", "shared"), "whole": True},
    {"stages": ((MOE,),) * 4, "pp": 2, "micro_batches": 4, "ragged": False, "backward": False},
    {"chunks": ((Chunk("expert", 0, 8, 8, ((EXPERT, 1),)), Chunk("expert", 8, 16, 8, ((EXPERT, 0),))),), "micro_batches": 2},
]


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", OVERLAPS)
def test_lists_are_those_of_one_leg_with_the_others_beside_it(kind: str, settings: dict[str, Any], degree: int) -> None:
    """So nothing is computed at another place, and each leg is in the queue as soon as the one before it is."""
    graph = graph_of(degree, **settings)
    lists = step_schedule(graph, Overlap(kind), reduction=Reduction("buckets"))
    check(graph, lists)
    check_lists(graph, lists)
    alone = step_schedule(replace(graph, passes_on=False), Overlap(kind), reduction=Reduction("buckets"))
    assert tuple(tuple(op for op in each if op.kind not in LEGS) for each in lists) == alone
    beside = {("intra_dispatch", "F"): -1, ("intra_combine", "F"): 1, ("intra_combine", "B"): -1, ("intra_dispatch", "B"): 1}
    for ops in lists:
        for i, op in enumerate(ops):
            if op.kind in LEGS:
                outer = "dispatch" if op.kind == "intra_dispatch" else "combine"
                assert ops[i + beside[op.kind, op.direction]] == op._replace(kind=outer)


def cost_of(across: float, inside: float) -> Any:
    """Return costs: an op that computes takes 1, backward 2; every leg has the lane of its link."""

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        travels = OP_KINDS[op.kind].travels
        if travels in ("tokens", "tokens_inside"):
            return (("across", across) if travels == "tokens" else ("inside", inside),)
        return ((COMPUTE, 0.0 if travels else {"B": 2.0}.get(op.direction, 1.0)),)

    return cost


@pytest.mark.parametrize("kind", ["aaam", "one_a_one_m", "stream", "flow", "weave"])
def test_one_piece_is_inside_a_node_while_another_one_is_between_nodes(kind: str) -> None:
    """A step is shorter than if both legs shared a link, and than if the experts waited for what is inside the node."""
    graph = graph_of(1 if kind == "weave" else 4, micro_batches=4, batch_degree=2 if kind == "flow" else 1, ragged=False)
    lists, cost = step_schedule(graph, Overlap(kind)), cost_of(2.0, 2.0)
    step = simulate(graph, lists, cost)
    by_link = {
        link: merged(span for op, span in step.spans.items() if OP_KINDS[op.kind].travels == link)
        for link in ("tokens", "tokens_inside")
    }
    both = sum(map(length, by_link.values())) - length(merged([*by_link["tokens"], *by_link["tokens_inside"]]))
    assert both > 0.02 * step.seconds
    shared = simulate(graph, lists, lambda op: tuple(("link" if lane != COMPUTE else lane, each) for lane, each in cost(op)))
    assert step.seconds < shared.seconds
    alone = replace(graph, passes_on=False)

    def waiting(op: Op) -> tuple[tuple[str, float], ...]:
        return (("inside", 2.0), *cost(op), ("inside", 2.0)) if op.kind == EXPERT and op.direction in "FB" else cost(op)

    assert step.seconds < 0.9 * simulate(alone, step_schedule(alone, Overlap(kind)), waiting).seconds


def test_one_piece_takes_as_long_as_all_its_ops() -> None:
    graph = graph_of(1, ragged=False, stages=((replace(MOE, moe=MOE.moe._replace(shared=None)),) * 2,))
    cost, lists = cost_of(4.0, 3.0), step_schedule(graph, Overlap("sequential"))
    assert simulate(graph, lists, cost).seconds == sum(seconds for op in lists[0] for _, seconds in cost(op))


def test_a_recorded_leg_counts_from_the_end_of_the_one_before() -> None:
    """On a GPU, its span begins when it lines up."""
    graph = graph_of(1, ragged=False, backward=False, stages=((MOE,),))
    lists = step_schedule(graph, Overlap("sequential"))
    spans = simulate(graph, lists, cost_of(4.0, 3.0)).spans
    leg = Op("intra_dispatch", "F", 0)
    early = spans | {leg: Span(spans[leg._replace(kind="dispatch")].start, spans[leg].end)}
    assert early[leg].end - early[leg].start == 7
    assert recorded_cost(graph, [Recording(lists[0], early)])(leg) == (("tokens_inside", 3.0),)


def test_a_found_list_is_faster_than_those_by_name() -> None:
    graph, cost = graph_of(2, stages=((MOE,),), micro_batches=2, later=(EXPERT,), ragged=False), cost_of(4.0, 3.0)
    found = find(graph, cost, 1, moves=False)
    check(graph, found.schedule)
    named = min(simulate(graph, step_schedule(graph, Overlap(kind)), cost).seconds for kind in ("one_a_one_m", "stream"))
    assert found.bound <= found.seconds <= named
