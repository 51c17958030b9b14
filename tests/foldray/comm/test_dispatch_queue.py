"""The queue of a communicator: operations start in order, and the caller never waits for what one of them lacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from foldray.comm import DispatchQueue, Pending
from tests.foldray.strict import AsOnGpu


@pytest.fixture
def queue() -> Iterator[DispatchQueue]:
    queue = DispatchQueue()
    yield queue
    queue.close()


class Operation:
    """Notes when it starts. It lacks something until `release` is set."""

    def __init__(self, number: int, started: list[int]):
        self.number, self.started, self.release = number, started, threading.Event()

    def begin(self) -> Pending:
        assert self.release.wait(60)
        self.started.append(self.number)
        return Pending([], (torch.tensor(self.number),))


def test_an_operation_that_lacks_nothing_starts_at_once(queue: DispatchQueue) -> None:
    started: list[int] = []
    operation = Operation(7, started)
    operation.release.set()
    pending = queue.start(operation.begin, ready=True)
    assert started == [7]
    assert not pending.is_running
    assert pending.wait()[0] == 7


def test_operations_start_in_order_while_the_caller_goes_on(queue: DispatchQueue) -> None:
    started: list[int] = []
    operations = [Operation(number, started) for number in range(4)]
    pendings = [queue.start(each.begin, ready=each.number % 2 == 1) for each in operations]
    for each in reversed(operations[1:]):
        each.release.set()
    assert started == [], "all wait behind the first one"
    assert all(pending.is_running for pending in pendings)
    operations[0].release.set()
    assert [int(pending.wait()[0]) for pending in pendings] == [0, 1, 2, 3]
    assert started == [0, 1, 2, 3]
    assert pendings == sorted(pendings, key=lambda pending: pending.began)
    assert queue.start(operations[0].begin, ready=True).wait()[0] == 0


def test_an_operation_does_not_wait_for_those_of_the_queue_beside(queue: DispatchQueue) -> None:
    started: list[int] = []
    beside, operations = DispatchQueue(queue), [Operation(number, started) for number in range(2)]
    operations[1].release.set()
    pendings = [each.start(operation.begin, ready=False) for each, operation in zip((queue, beside), operations, strict=True)]
    assert pendings[1].wait()[0] == 1
    operations[0].release.set()
    assert pendings[0].wait()[0] == 0
    assert started == [1, 0]
    beside.close()


@pytest.mark.parametrize("queues", [1, 2])
@pytest.mark.parametrize("needs", [False, True])
def test_queues_of_a_gpu_start_in_one_order(queues: int, needs: bool) -> None:
    """Also if an operation waits for the first one: those behind it must not overtake it."""
    first, started, pendings = AsOnGpu(), list[int](), list[Pending]()
    lines = [first, *(AsOnGpu(first) for _ in range(queues - 1))]

    def begin(number: int) -> Pending:
        if needs and number:
            pendings[0].wait()
        started.append(number)
        return Pending([], (torch.tensor(number),))

    for number in range(5):
        pendings.append(lines[number % queues].start(partial(begin, number), number == 3, torch.device("cpu")))
    assert started == [], "an operation that lacks nothing lines up, too"
    assert pendings[2].wait()[0] == 2
    assert started == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("asked_before", [True, False])
def test_the_end_is_told_however_early_somebody_asks(queue: DispatchQueue, asked_before: bool) -> None:
    operation, told = Operation(1, []), threading.Event()
    pending = queue.start(operation.begin, ready=False)
    if not asked_before:
        operation.release.set()
        pending.wait()
    futures = pending.when_done(told.set)
    operation.release.set()
    for future in futures:
        future.wait()
    assert told.wait(60)


def test_an_error_is_raised_where_the_result_is_needed(queue: DispatchQueue) -> None:
    def fail() -> Pending:
        raise RuntimeError("the peer is gone")

    pending = queue.start(fail, ready=False)
    (future,) = pending.when_done(lambda: None)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        pending.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        future.wait()
    operation = Operation(2, [])
    operation.release.set()
    assert queue.start(operation.begin, ready=False).wait()[0] == 2, "the queue goes on"
