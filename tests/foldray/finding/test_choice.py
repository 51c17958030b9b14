"""The choice among orders, on machines whose ops take a time to start and a time for each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest

from foldray.blueprint import ModelSpec, Ownership
from foldray.clock import COMPUTE, Cost, OpCosts, simulate
from foldray.finding import find
from foldray.finding.choice import MOST_TRIED, Choice, PieceTimes
from foldray.fold import Fold
from foldray.graph import Op, Reduction, SliceCost, StepGraph
from foldray.kinds import ATTENTION, EMBED, EXPERT, HEAD, MERGE, OP_KINDS
from foldray.orders import Ordering, named_ordering, step_schedule
from tests.foldray.parity import MODEL as SIZES

LENGTH = 64
NAMES = (
    "sequential", "moe_only:2", "one_a_one_m:2", "stream:2", "one_a_one_m:4", "stream:4", "stream:4/2", "stream:4/1", "weave",
    "list:1", "list:2",
)  # fmt: skip
MODEL = ModelSpec(**{**SIZES, "layers": 3, "shared_hidden": 0})
SLICES = SliceCost(0.02, 1.0)


class Machine(NamedTuple):
    """A machine. A whole op of experts takes a second forward.

    Args:
        link: seconds of a whole all-to-all.
        start: seconds until an op begins to compute or to send.
        slower: what ops take longer in pieces than when they are timed alone, as a share.
        quarters: the same for four pieces, beside that.
    """

    link: float
    start: float
    slower: float = 0.0
    quarters: float = 0.0

    def cost(self, graph: StepGraph) -> Cost:
        whole = SLICES.before(LENGTH)

        def cost(op: Op) -> tuple[tuple[str, float], ...]:
            channel, tokens = graph.channel(op), graph.tokens(op)
            share = len(tokens) / LENGTH
            if op.kind == ATTENTION:
                share = (SLICES.before(tokens.stop) - SLICES.before(tokens.start)) / whole
            apart = op.kind in graph.later
            way = {"F": 1.0, "R": 1.0, "B": 1.0 if apart or channel else 2.0, "W": 1.0}[op.direction]
            size = {ATTENTION: 1.0, EXPERT: 1.0, MERGE: 0.1, EMBED: 0.0, HEAD: 0.0}.get(op.kind, 0.1)
            if OP_KINDS[op.kind].travels:
                size = self.link if OP_KINDS[op.kind].travels == "tokens" else 0.0
            return ((channel[0] if channel else COMPUTE, way * (self.start + size * share) if size else 0.0),)

        return cost

    def costs(self, graph: StepGraph) -> OpCosts:
        cost = self.cost(graph)
        return OpCosts(tuple({(op.kind, op.direction, op.part): cost(op)[0][1] for op in graph.ops()}.items()), 0.0, 0.0)

    def step(self, ordering: Ordering, graph: StepGraph) -> float:
        cost = self.cost(graph)
        if ordering.forward.row.found:
            seconds = find(graph, cost, moves=False).seconds
        else:
            seconds = simulate(graph, step_schedule(graph, ordering.forward, ordering.backward), cost).seconds
        return seconds * (1 + self.slower * (ordering.slicing is not None) + self.quarters * (ordering.degree == 4))


ORDERINGS = tuple(named_ordering(name, LENGTH, SLICES) for name in NAMES)


@cache
def graph_of(ordering: Ordering, passes: int) -> StepGraph:
    ownership = Ownership(MODEL, Fold(1))
    stages = (tuple(MODEL.block(layer) for layer in range(MODEL.layers)),)
    return ordering.graph(ownership, stages, LENGTH, passes, ragged=True)


def chosen(machine: Machine, passes: int, orderings: Sequence[Ordering] = ORDERINGS) -> tuple[Choice, list[float]]:
    """Let a choice measure steps until it asks for no more. Return it, and the seconds of all orderings."""
    seconds = [machine.step(ordering, graph_of(ordering, passes)) for ordering in orderings]
    choice = Choice(orderings, graph_of, PieceTimes(SLICES), passes)
    while (number := choice.ask()) is not None:
        graph = graph_of(orderings[number], passes)
        choice.tell(number, seconds[number], graph, machine.costs(graph))
    return choice, seconds


@pytest.mark.gate(6)
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("slower", [0.0, 0.15])
@pytest.mark.parametrize("start", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("link", [0.1, 0.4, 0.8, 1.3])
def test_the_fastest_order_is_found_in_few_steps(link: float, start: float, slower: float, passes: int) -> None:
    choice, seconds = chosen(Machine(link, start, slower), passes)
    assert seconds[choice.ranked[0]] <= 1.02 * min(seconds)
    assert choice.measured[0] == seconds[0], "the plain order is always among those that were tried"
    assert len(choice.measured) <= MOST_TRIED


@pytest.mark.parametrize("link", [0.2, 0.3, 0.4])
@pytest.mark.parametrize(("start", "quarters"), [(0.0, 0.05), (0.01, 0.1), (0.02, 0.05)])
def test_half_pieces_are_tried_where_quarters_disappoint(link: float, start: float, quarters: float) -> None:
    orderings = [
        named_ordering(name, LENGTH, SLICES) for name in ("sequential", "stream:2", "stream:4", "list:1", "list:2", "list:4")
    ]
    choice, seconds = chosen(Machine(link, start, quarters=quarters), 1, orderings)
    assert seconds[choice.ranked[0]] <= 1.005 * min(seconds)


def test_nothing_is_tried_where_nothing_travels() -> None:
    choice, _ = chosen(Machine(0.0, 0.0), 1)
    assert list(choice.measured) == [0]


def test_pieces_that_cost_more_than_they_hide_are_left() -> None:
    choice, seconds = chosen(Machine(0.2, 0.5), 1)
    assert ORDERINGS[choice.ranked[0]].slicing is None
    assert seconds[choice.ranked[0]] == min(seconds)


def test_times_of_other_pieces_follow_from_those_that_were_measured() -> None:
    machine, times = Machine(0.4, 0.02), PieceTimes(SLICES)
    for name in ("sequential", "stream:2"):
        graph = graph_of(ORDERINGS[NAMES.index(name)], 1)
        times.learn(graph, machine.costs(graph))
    graph = graph_of(ORDERINGS[NAMES.index("stream:4")], 1)
    told, true = times.cost(graph), machine.cost(graph)
    for op in graph.ops():
        if op.kind not in (EMBED, HEAD):
            assert told(op)[0][1] == pytest.approx(true(op)[0][1], rel=1e-6), op


def test_the_fastest_order_is_tried_with_every_way_to_sum_gradients() -> None:
    machine, kinds = Machine(0.8, 0.02), ("buckets", "chunks")
    orderings = [*ORDERINGS, *(order._replace(reduction=Reduction(kind)) for kind in kinds for order in ORDERINGS)]
    choice = Choice(orderings, graph_of, PieceTimes(SLICES), 1)
    while (number := choice.ask()) is not None:
        plain = orderings[number]._replace(reduction=Reduction())
        graph = graph_of(plain, 1)
        faster = 0.9 if orderings[number].reduction.kind == "chunks" else 1.0
        choice.tell(number, faster * machine.step(plain, graph), graph, machine.costs(graph))
    best, second, *_ = (orderings[number] for number in choice.ranked)
    assert best == second._replace(reduction=Reduction("chunks"))
    assert len(choice.measured) <= MOST_TRIED + len(kinds)


def test_parts_of_a_micro_batch_take_their_share_of_the_times_of_whole_ones() -> None:
    machine, times = Machine(0.4, 0.0), PieceTimes(SLICES)
    whole = graph_of(ORDERINGS[0], 1)
    times.learn(whole, machine.costs(whole))
    parts = graph_of(named_ordering("stream@2", LENGTH, SLICES), 2)
    told, true = times.cost(parts), machine.cost(whole)
    for op in parts.ops():
        if op.kind not in (EMBED, HEAD):
            assert told(op)[0][1] == pytest.approx(true(op._replace(micro_batch=0))[0][1] / 2), op


def test_gradients_of_weights_of_whole_sequences_are_not_judged_by_those_of_pieces() -> None:
    """Pieces compute half as fast here. A list of whole sequences has products as large as those that ran."""
    machine, times = Machine(0.2, 0.0), PieceTimes(SLICES)
    whole, pieces = (graph_of(named_ordering(name, LENGTH, SLICES), 1) for name in ("sequential", "list:4"))
    times.learn(whole, machine.costs(whole))
    slow = machine.costs(pieces)
    times.learn(pieces, slow._replace(seconds=tuple((key, 2 * seconds) for key, seconds in slow.seconds)))
    graph = graph_of(named_ordering("list", LENGTH, SLICES), 1)
    told = times.cost(graph)
    backward = Op(EXPERT, "B", 0, 0, 0)
    apart = sum(told(backward._replace(direction=direction))[0][1] for direction in "BW")
    assert apart == pytest.approx(machine.cost(whole)(backward)[0][1])
