"""The checker names every kind of fault, and works with any class that has the protocol of graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from foldray.clock import ScheduleError, check, unit_times
from foldray.graph import Channel, Direction, Op, PipelineGraph, Schedule, handover, stage
from foldray.orders import pipeline, with_handovers
from tests.foldray.order import peak

GRAPH = PipelineGraph(2, 2)
# position 0: F0.0 | handover F0.0 | F0.1 | handover F0.1 | handover B1.0 | B0.0 | handover B1.1 | B0.1
# position 1: handover F0.0 | handover F0.1 | F1.0 | B1.0 | handover B1.0 | F1.1 | B1.1 | handover B1.1
GOOD = pipeline(GRAPH)


def change(position: int, edit: Callable[[list[Op]], object]) -> Schedule:
    """Return the good schedule with an edited list of one position."""
    lists = [list(ops) for ops in GOOD]
    edit(lists[position])
    return tuple(map(tuple, lists))


def move(op: Op, to: int) -> Callable[[list[Op]], object]:
    return lambda ops: ops.insert(to, ops.pop(ops.index(op)))


DIRECTIONS: tuple[Direction, ...] = ("F", "B")
F0, F1, B0, B1 = ([stage(direction, layer, m) for m in range(2)] for direction in DIRECTIONS for layer in range(2))
SEND_F, SEND_B = [handover("F", 0, m) for m in range(2)], [handover("B", 1, m) for m in range(2)]

FAULTS = {
    "a list too few": (GOOD[:1], "1 lists for 2 positions"),
    "a list too many": ((*GOOD, ()), "3 lists for 2 positions"),
    "a stage is missing": (change(1, lambda ops: ops.remove(B1[1])), "position 1 lacks B1.1"),
    "a handover is missing at its sender": (change(0, lambda ops: ops.remove(SEND_F[1])), "position 0 lacks handover F0.1"),
    "a handover is missing at its receiver": (change(0, lambda ops: ops.remove(SEND_B[0])), "position 0 lacks handover B1.0"),
    "a stage twice": (change(0, lambda ops: ops.append(F0[1])), "position 0 has F0.1 twice"),
    "a handover twice": (change(1, lambda ops: ops.insert(0, SEND_F[0])), "position 1 has handover F0.0 twice"),
    "a stage of another position": (change(0, lambda ops: ops.append(F1[0])), "position 0 has F1.0, which belongs at position 1"),
    "a layer too high": (
        change(1, lambda ops: ops.append(stage("F", 3, 0))),
        "position 1 has F3.0, which the graph does not know",
    ),
    "a micro-batch too high": (change(0, lambda ops: ops.append(stage("F", 0, 2))), "F0.2, which the graph does not know"),
    "a part too high": (change(0, lambda ops: ops.append(F0[0]._replace(part=1))), "F0.0/1, which the graph does not know"),
    "an unknown kind": (
        change(0, lambda ops: ops.append(Op("dispatch", "F", 0))),
        "dispatch F0.0, which the graph does not know",
    ),
    "the last stage hands over": (
        change(1, lambda ops: ops.append(handover("F", 1, 0))),
        "handover F1.0, which the graph does not know",
    ),
    "backward before its forward": (change(1, move(B1[1], 2)), "position 1 has B1.1 before F1.1, which it needs"),
    "sent before it is made": (change(0, move(SEND_F[0], 0)), "position 0 has handover F0.0 before F0.0, which it needs"),
    "used before it is received": (change(1, move(F1[0], 0)), "position 1 has F1.0 before handover F0.0, which it needs"),
    "a gradient used before it is received": (
        change(0, move(B0[0], 4)),
        "position 0 has B0.0 before handover B1.0, which it needs",
    ),
    "sent after it is freed": (
        change(0, move(SEND_F[0], 7)),
        "position 0 has handover F0.0 after B0.0, which frees F0.0 that it uses",
    ),
    "activations in two orders": (
        change(1, move(SEND_F[1], 0)),
        "the channel of handovers_up between positions 0 and 1 has two orders: "
        "position 0 has handover F0.0 where position 1 has handover F0.1",
    ),
    "gradients in two orders": (
        change(0, move(SEND_B[1], 4)),
        "the channel of handovers_down between positions 1 and 0 has two orders: "
        "position 0 has handover B1.1 where position 1 has handover B1.0",
    ),
    "positions wait for each other": (
        (
            (F0[0], SEND_F[0], SEND_B[0], B0[0], F0[1], SEND_F[1], SEND_B[1], B0[1]),
            (SEND_F[0], SEND_F[1], F1[1], F1[0], B1[0], SEND_B[0], B1[1], SEND_B[1]),
        ),
        "the positions wait for each other: position 0 in B0.0 for handover B1.0; position 1 in F1.1 for handover F0.1",
    ),
}


@pytest.mark.parametrize(("schedule", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named(schedule, words):
    with pytest.raises(ScheduleError) as caught:
        check(GRAPH, schedule)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_good_schedule_is_accepted():
    check(GRAPH, GOOD)


def test_the_clock_alone_finds_channels_with_two_orders():
    with pytest.raises(ScheduleError, match=r"wait for each other: position 0 in B0.0 for handover B1.0; position 1 in F1.0 for"):
        unit_times(GRAPH, change(1, move(SEND_F[1], 0)))


def test_the_clock_alone_finds_a_handover_with_one_end():
    graph = PipelineGraph(2, 1, backward=False)
    with pytest.raises(ScheduleError, match=r"wait for each other: position 0 for the end of handover F0.0$"):
        unit_times(graph, ((F0[0], SEND_F[0]), ()))


def test_a_handover_waits_for_its_later_end():
    sent_late, received_late = change(0, move(SEND_F[0], 2)), change(1, move(SEND_F[1], 3))
    for schedule, times in ((GOOD, (1, 2)), (sent_late, (2, 2)), (received_late, (1, 4))):
        check(GRAPH, schedule)
        assert tuple(unit_times(GRAPH, schedule)[op].end for op in SEND_F) == times


@pytest.mark.parametrize(
    ("orders", "alive"),
    [
        ("F0 F1 F2 B0 B1 B2", 3),
        ("F0 B0 F1 B1 F2 B2", 1),
        ("F0 F1 B0 F2 B1 B2", 2),
        ("F0 F1 B1 B0 F2 B2", 2),
    ],
)
def test_peak_counts_forwards_until_their_backward(orders, alive):
    ops = tuple(stage(name[0], 0, int(name[1])) for name in orders.split())  # type: ignore[arg-type]
    assert peak(PipelineGraph(1, 3), (ops,)) == (alive,)


@dataclass(frozen=True)
class Exchange:
    """A graph of two positions (`part`): attention, one collective for tokens, experts, their recomputation and backward."""

    positions: int = 2

    def ops(self) -> Iterator[Op]:
        yield from (Op("attend", "F", 0, part) for part in range(2))
        yield Op("exchange", "F", 0)
        for part in range(2):
            yield from (Op("experts", direction, 0, part) for direction in ("F", "R", "B"))  # type: ignore[arg-type]

    def needs(self, op: Op) -> tuple[Op, ...]:
        exchange = Op("exchange", "F", 0)
        if op.kind == "exchange":
            return Op("attend", "F", 0, 0), Op("attend", "F", 0, 1)
        if op.kind == "attend":
            return ()
        return {"F": (exchange,), "R": (exchange,), "B": (op._replace(direction="R"),)}[op.direction]

    def where(self, op: Op) -> tuple[int, ...]:
        return (0, 1) if op.kind == "exchange" else (op.part,)

    def channel(self, op: Op) -> Channel | None:
        return ("tokens", 0, 1) if op.kind == "exchange" else None

    def frees(self, op: Op) -> tuple[Op, ...]:
        return {"F": (), "R": (Op("exchange", "F", 0),), "B": (op._replace(direction="R"),)}[op.direction]


def steps(part: int, text: str) -> tuple[Op, ...]:
    kinds = {"A": ("attend", "F"), "E": ("experts", "F"), "R": ("experts", "R"), "B": ("experts", "B")}
    return tuple(Op("exchange", "F", 0) if step == "X" else Op(*kinds[step], 0, part) for step in text)  # type: ignore[arg-type]


def test_any_graph_can_be_checked():
    graph, good = Exchange(), (steps(0, "AXERB"), steps(1, "AXERB"))
    check(graph, good)
    assert peak(graph, good) == (2, 2)  # during recomputation: the received tokens, and their results
    with pytest.raises(ScheduleError, match=r"position 1 has experts F0.0/1 after experts R0.0/1, which frees exchange F0.0"):
        check(graph, (steps(0, "AXERB"), steps(1, "AXREB")))
    with pytest.raises(ScheduleError, match=r"position 1 has exchange F0.0 before attend F0.0/1, which it needs"):
        check(graph, (steps(0, "AXERB"), steps(1, "XAERB")))


def test_any_graph_can_be_woven():
    assert with_handovers(Exchange(), (steps(0, "AERB"), steps(1, "AERB"))) == (steps(0, "AXERB"), steps(1, "AXERB"))
