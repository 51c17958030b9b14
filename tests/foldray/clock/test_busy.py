"""What a recorded step was busy with: sums by hand, and properties for any costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import COMPUTE, Recording, Span, busy, busy_table, simulate
from foldray.clock.busy import CAUSES, HOST, OTHERS
from foldray.graph import Op, Slicing, StepGraph
from foldray.kinds import COMBINE, DISPATCH, HANDOVER, OP_KINDS
from foldray.orders import Ordering, Overlap, ordered_schedule, step_schedule
from tests.foldray.blocks import MOE
from tests.gate import examples

GRAPH = StepGraph(((MOE,),), Slicing((8,), (8,)), ragged=False, backward=False)
FIRST = {
    "embed": (0, 1), "attention": (1, 3), "route": (3, 4), "dispatch": (4, 10), "shared": (4, 5), "expert": (10.5, 12),
    "combine": (12, 17), "merge": (17, 18), "head": (18, 19),
}  # fmt: skip
SECOND = {
    "embed": (0, 1), "attention": (1, 6), "route": (6, 7), "dispatch": (7, 10), "shared": (7, 8), "expert": (10, 15),
    "combine": (15, 17), "merge": (17, 18), "head": (18, 20),
}  # fmt: skip


def recording(times: dict[str, tuple[float, float]], ahead: float = 0.0) -> Recording:
    (order,) = step_schedule(GRAPH, Overlap("sequential"))
    return Recording(order, {op: Span(*(time + ahead for time in times[op.kind])) for op in order})


@pytest.mark.parametrize("ahead", [0.0, 100.0])
def test_two_ranks_by_hand(ahead: float) -> None:
    found = busy(GRAPH, [recording(FIRST), recording(SECOND, ahead)])
    # The first rank waits for the second one from 5 to 7, from 12 to 15, and from 19 on. Its experts start half a second late.
    assert found.ranks == {
        "embed": 1, "attention": 3.5, "route": 1, "shared": 1, "dispatch": 2.5, "expert": 3.25, "combine": 2, "merge": 1,
        "head": 1.5, OTHERS: 3, HOST: 0.25,
    }  # fmt: skip
    # The second rank is the slower one all the time, and its shared expert runs while rows travel.
    assert found.path == {
        "embed": 1, "attention": 5, "route": 1, "dispatch": 3, "expert": 5, "combine": 2, "merge": 1, "head": 2,
    }  # fmt: skip


def test_the_path_goes_over_the_rank_that_comes_last() -> None:
    late = {**FIRST, "attention": (1, 8), "route": (8, 9), "dispatch": (9, 10), "shared": (9, 9.5)}
    path = busy(GRAPH, [recording(late), recording(SECOND)]).path
    assert (path["attention"], path["dispatch"], path["expert"], path["head"]) == (7, 1, 5, 2)
    slow = {**late, "expert": (10.5, 15)}
    others = {**SECOND, "expert": (10, 11), "combine": (11, 17)}
    path = busy(GRAPH, [recording(slow), recording(others)]).path
    assert (path[HOST], path["expert"]) == (0.5, 4.5)


def test_what_the_next_op_waits_for_counts_first() -> None:
    graph = StepGraph(((MOE,),), Slicing((4, 4), (4, 4)), ragged=False, backward=False)
    (order,) = step_schedule(graph, Overlap("aaam"))
    (c0, c1), (e0, e1), (d0, d1) = (graph.pieces(kind, 0) for kind in ("combine", "expert", "dispatch"))
    spans = {op: Span(0, 0) for op in order}
    spans |= {d0: Span(0, 1), d1: Span(0, 9), e0: Span(1, 2), c0: Span(2, 4), e1: Span(9, 10), c1: Span(10, 11)}
    spans |= {op: Span(11, 11) for op in order if op.kind in ("merge", "head")}
    found = busy(graph, [Recording(order, spans)]).ranks
    # From 2 to 4, the combine ends sooner, but the experts wait for the second dispatch.
    assert found == {"expert": 2, "dispatch": 8, "combine": 1}


SECONDS = st.fixed_dictionaries({kind: st.floats(0.01, 5.0) for kind in OP_KINDS})


@given(SECONDS, st.sampled_from(["sequential", "moe_only", "one_a_one_m", "stream"]), st.sampled_from([1, 2]))
@examples(60)
def test_causes_sum_to_the_step_and_a_simulated_one_has_no_gaps(seconds: dict[str, float], kind: str, positions: int) -> None:
    cuts = {"sequential": ((8,), (8,)), "moe_only": ((8,), (4, 4))}
    slicing = Slicing(*cuts.get(kind, ((4, 4), (4, 4))))
    stages = ((MOE, MOE),) if positions == 1 else ((MOE,), (MOE,))
    graph = StepGraph(stages, slicing, ragged=False, pp=positions, micro_batches=positions)

    def cost(op: Op) -> Any:
        lane = graph.channel(op)
        return ((lane[0] if lane else COMPUTE, seconds[op.kind] * (2 if op.direction == "B" else 1)),)

    schedule = ordered_schedule(graph, Ordering(Overlap(kind), Overlap(kind)))
    simulated = simulate(graph, schedule, cost)
    found = busy(graph, [Recording(ops, {op: simulated.spans[op] for op in ops}) for ops in schedule])
    assert sum(found.ranks.values()) == pytest.approx(simulated.seconds)
    assert sum(found.path.values()) == pytest.approx(simulated.seconds)
    assert set(found.path) <= set(CAUSES) - {OTHERS}
    assert found.path.get(HOST, 0.0) == pytest.approx(0.0, abs=1e-9)
    computing = sum(seconds for cause, seconds in found.ranks.items() if cause in OP_KINDS and not OP_KINDS[cause].travels)
    assert computing == pytest.approx(sum(used.compute for used in simulated.usage) / positions)
    travelling = sum(found.ranks.get(cause, 0.0) for cause in (DISPATCH, COMBINE, HANDOVER))
    assert travelling == pytest.approx(sum(used.exposed for used in simulated.usage) / positions)


def test_a_table_has_shares_of_each_step() -> None:
    lines = busy_table({"a": {"attention": 3.0, HOST: 1.0}, "a long name": {"dispatch": 5.0}}).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "a", "long", "name"], ["attention", "75.0%", "0.0%"], ["dispatch", "0.0%", "100.0%"],
        ["between", "ops", "25.0%", "0.0%"],
    ]  # fmt: skip
    assert len({len(line) for line in lines}) == 1
