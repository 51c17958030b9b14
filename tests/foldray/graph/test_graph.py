"""Ops, the pipeline's graph, and `with_handovers`, which adds communication to orders of computation."""

import re
from pathlib import Path

import pytest

from foldray.clock import COMPUTE, ScheduleError, check, times
from foldray.graph import Direction, Op, PipelineGraph, Place, Slicing, StepGraph, handover, stage
from foldray.orders import pipeline, with_handovers
from tests.foldray.blocks import MOE
from tests.foldray.order import peak


@pytest.mark.parametrize(
    "graph",
    [PipelineGraph(1, 3), PipelineGraph(2, 3), PipelineGraph(3, 2, 2), PipelineGraph(2, 4, 4, backward=False)],
    ids=str,
)
def test_the_graph_names_each_op_once_after_what_it_needs(graph):
    seen: set[Op] = set()
    for op in graph.ops():
        assert op not in seen
        assert seen.issuperset(graph.needs(op))
        assert seen.issuperset(graph.frees(op))
        seen.add(op)
    passes = 2 if graph.backward else 1
    assert len(seen) == passes * graph.micro_batches * (2 * graph.stages - 1)


def test_what_the_graph_says_of_handovers():
    graph = PipelineGraph(3, 1, 2)
    assert graph.where(handover("F", 2, 0)) == (2, 0)
    assert graph.where(handover("B", 3, 0)) == (0, 2)
    assert graph.channel(handover("F", 2, 0)) == ("handovers_down", 2, 0)
    assert graph.channel(handover("B", 3, 0)) == ("handovers_up", 0, 2)
    assert graph.needs(handover("B", 3, 0)) == (stage("B", 3, 0),)
    assert graph.needs(stage("B", 2, 0)) == (stage("F", 2, 0), handover("B", 3, 0))
    assert graph.needs(stage("B", 5, 0)) == (stage("F", 5, 0),)
    assert graph.channel(stage("F", 2, 0)) is None


def test_one_position_hands_nothing_over():
    graph = PipelineGraph(1, 2)
    assert [" ".join(map(str, ops)) for ops in pipeline(graph)] == ["F0.0 B0.0 F0.1 B0.1"]
    assert {op.kind for op in graph.ops()} == {"stage"}


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (stage("F", 3, 1), "F3.1"),
        (handover("B", 3, 1), "handover B3.1"),
        (Op("dispatch", "R", 2, part=3, micro_batch=4), "dispatch R2.4/3"),
    ],
)
def test_ops_read_well(op, text):
    assert str(op) == text


DIRECTIONS: tuple[Direction, ...] = ("F", "B")
F0, F1, B0, B1 = ([stage(direction, layer, m) for m in range(2)] for direction in DIRECTIONS for layer in range(2))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (
            ((F0[0], B0[0], F0[1], B0[1]), (F1[1], B1[1], F1[0], B1[0])),
            "wait for each other: position 0 in B0.0 for B1.0; position 1 in F1.1 for F0.1$",
        ),
        (((*F0, *B0), (*F1, B1[0])), "position 1 lacks B1.1"),
        (((*F0, *B0), (*F1, *B1, handover("F", 0, 0))), "position 1 has handover F0.0, which the graph does not know"),
    ],
)
def test_orders_that_cannot_be_woven(orders, words):
    with pytest.raises(ScheduleError, match=words):
        with_handovers(PipelineGraph(2, 2), orders)


def test_other_orders_can_be_woven():
    graph = PipelineGraph(2, 2)
    gpipe = with_handovers(graph, ((*F0, *B0), (*F1, *B1)))
    check(graph, gpipe)
    assert peak(graph, gpipe) == (2, 2)


AF = tuple(Place(layer % 2, 2 + layer % 3) for layer in range(4))


def test_halves_of_a_block_may_stand_apart() -> None:
    """Attention is on two positions, and the experts on three others. Collectives name both positions, sender first."""
    graph = StepGraph(((MOE,),) * 4, Slicing((4, 4), (4, 4)), 5, micro_batches=2, places=AF)
    assert graph.where(Op("attention", "F", 3)) == graph.where(Op("merge", "B", 3)) == (1,)
    assert graph.where(Op("expert", "B", 2)) == (4,)
    for op in (Op("counts", "F", 2), Op("dispatch", "F", 2)):
        assert graph.where(op) == (0, 4)
    assert graph.where(Op("dispatch", "B", 2)) == (4, 0)
    assert graph.where(Op("combine", "B", 2)) == (1, 4)
    assert graph.where(Op("combine", "F", 2)) == (4, 1)
    assert graph.channel(Op("combine", "F", 2)) == ("tokens_down", 4, 1)
    assert graph.where(Op("handover", "F", 0)) == (0, 1)
    assert graph.where(Op("handover", "B", 2)) == (0, 1)
    lists = tuple(tuple(op for op in graph.ops() if position in graph.where(op)) for position in range(5))
    check(graph, lists)
    times(graph, lists, lambda op: ((COMPUTE, 1.0),))


def test_one_function_counts_positions() -> None:
    """The positions of stages are data, so only `stage_positions` computes a number modulo pp."""
    root = Path(__file__).parents[3]
    found = {
        path.relative_to(root).as_posix(): lines
        for folder in ("foldray", "trainers", "tuners")
        for path in sorted((root / folder).rglob("*.py"))
        if (lines := re.findall(r"%\s*(?:\w+\.)*pp\b|::\s*(?:\w+\.)*pp\]", path.read_text()))
    }
    assert found == {"foldray/blueprint/stages.py": ["% pp"]}
