"""Whether ranks start their operations in one total order, as communicators need that share a device; how much they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from foldray.graph import Op, Schedule
from foldray.graph.pipeline_graph import Graph


class Meeting(NamedTuple):
    """A collective, or a message between two ranks.

    Args:
        communicator: the class of traffic.
        kind: name of the operation, with the type of its numbers.
        ranks: all members of a collective; sender and receiver of a message.
        number: how many of the communicator's collectives, or of its messages from this sender to this receiver, came before.
    """

    communicator: str
    kind: str
    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.communicator} among ranks {self.ranks}"


class Started(NamedTuple):
    """An operation that a rank has started.

    Args:
        meetings: one collective, or all messages that start together.
        where: the line of code that has started it.
    """

    meetings: tuple[Meeting, ...]
    where: str


class Unordered(AssertionError):
    """There is no total order of the operations of all ranks."""


def check_order(logs: Mapping[int, Sequence[Started]]) -> None:
    """Play what all ranks have started on devices that run one operation at a time.

    An operation ends on a rank when everybody it meets has started it there, and only then the next one starts. If all
    operations end, there is a total order. If not, kernels of several NCCL communicators can wait for each other for ever.

    Args:
        logs: rank → its operations in the order in which they started.

    Raises:
        Unordered: some operations never end. The message names a cycle of operations, or a partner that never comes.
    """
    at = {rank: {meeting: i for i, each in enumerate(log) for meeting in each.meetings} for rank, log in logs.items()}
    done = dict.fromkeys(logs, 0)

    def missing(rank: int) -> tuple[int, Meeting] | None:
        """Return whom the running operation of a rank still waits for, and in which meeting."""
        for meeting in logs[rank][done[rank]].meetings:
            for other in meeting.ranks:
                if meeting not in at[other]:
                    raise Unordered(f"rank {rank} has started {_running(rank)}, but rank {other} never starts {meeting}")
                if done[other] < at[other][meeting]:
                    return other, meeting
        return None

    def _running(rank: int) -> str:
        each = logs[rank][done[rank]]
        return f"{' and '.join(map(str, each.meetings))} at {each.where}"

    moving = True
    while moving:
        moving = False
        for rank, log in logs.items():
            while done[rank] < len(log) and missing(rank) is None:
                done[rank] += 1
                moving = True
    stuck = [rank for rank, log in logs.items() if done[rank] < len(log)]
    if not stuck:
        return
    way = [stuck[0]]
    while way[-1] not in way[:-1]:
        found = missing(way[-1])
        assert found is not None
        way.append(found[0])
    cycle = way[way.index(way[-1]) : -1]
    waits = [f"rank {rank} runs {_running(rank)}, and waits for rank {missing(rank)[0]}" for rank in cycle]  # type: ignore[index]
    raise Unordered("a cycle of operations: " + "; ".join(waits))


def check_lists(graph: Graph, schedule: Schedule) -> None:
    """Check that the lists of all positions have what travels between positions in one total order."""
    logs: dict[int, list[Started]] = {}
    for position, ops in enumerate(schedule):
        travelling = [op for op in ops if len(graph.where(op)) > 1]
        logs[position] = [
            Started((Meeting(str(graph.channel(op)), str(op), graph.where(op), 0),), "its list") for op in travelling
        ]
    check_order(logs)


def peak(graph: Graph, schedule: Schedule) -> tuple[int, ...]:
    """Return, for every position, the largest number of ops whose saved state is alive at once.

    The state of an op is alive from the op until another op frees it. Ops that no op frees do not count.
    """
    kept = {op for freeing in graph.ops() for op in graph.frees(freeing)}

    def peak_of(ops: tuple[Op, ...]) -> int:
        alive, most = set[Op](), 0
        for op in ops:
            alive |= {op} & kept
            most = max(most, len(alive))
            alive.difference_update(graph.frees(op))
        return most

    return tuple(map(peak_of, schedule))
