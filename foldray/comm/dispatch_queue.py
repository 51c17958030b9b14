"""A queue in front of a communicator: operations start in order, without making the caller wait for what they need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch
from torch import Tensor
from torch.futures import Future, collect_all

from foldray.comm.communicator import Pending, used_here


class DispatchQueue:
    """Starts operations in the order in which they come.

    An operation may need something that is still on its way, such as the sizes of its messages. Then a thread waits for it
    and starts the operation. Operations that come later line up behind it, because the members of a communicator must start
    their operations in the same order.

    On a GPU there is no thread. The caller goes on with what it can give the GPU, and then calls `advance`. An operation waits
    only for what the GPU had to do when it came into the queue, on a stream of its own.

    Args:
        beside: the queue of another communicator. On a GPU, operations of both start in the order in which they come, because all
            ranks must start all operations in one order; but no stream waits for the other queue's operations.
    """

    def __init__(self, beside: DispatchQueue | None = None) -> None:
        self._later: deque[_QueuedOperation] = deque() if beside is None else beside._later  # on a GPU
        self._stream: torch.cuda.Stream | None = None
        self._queue: SimpleQueue[_QueuedOperation | None] = SimpleQueue()
        self._lock, self._waiting = Lock(), 0
        self._thread: Thread | None = None

    def start(self, begin: Callable[[], Pending], ready: bool, device: torch.device | None = None) -> Pending:
        """Start an operation at once, or put it at the end of the queue. If it is `ready`, `begin` would not wait."""
        if device is not None and device.type == "cuda":
            return begin() if ready and not self._later else self._line_up(self._beside(begin, device))
        with self._lock:
            alone = ready and not self._waiting
            self._waiting += not alone
        if alone:
            return begin()
        if self._thread is None:
            self._thread = Thread(target=self._serve, daemon=True)  # a lost peer must not keep the process from ending
            self._thread.start()
        queued = _QueuedOperation(begin)
        self._queue.put(queued)
        return queued

    def advance(self) -> None:
        """On a GPU, start all operations in the queue. The host waits for what they need."""
        while self._later:
            self._later.popleft().begin()

    def _line_up(self, begin: Callable[[], Pending]) -> Pending:
        self._later.append(queued := _QueuedOperation(begin, self.advance))
        return queued

    def _beside(self, begin: Callable[[], Pending], device: torch.device) -> Callable[[], Pending]:
        """Return what starts the operation on another stream, which waits for what the current stream has to do by now."""
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        now = torch.cuda.current_stream(device).record_event()

        def begin_beside() -> Pending:
            stream.wait_event(now)
            with torch.cuda.stream(stream):
                pending = begin()
            used_here([*pending.tensors, *pending.kept])  # they are of the other stream's memory
            return pending

        return begin_beside

    def close(self) -> None:
        """End the thread, after the operations in the queue."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (queued := self._queue.get()) is not None:
            queued.begin()
            del queued  # the thread must not keep what has arrived while it waits for the next operation
            with self._lock:
                self._waiting -= 1


class _QueuedOperation(Pending):
    """An operation in the queue. `wait` waits until it has started (`advance` starts all of the queue), and then for its end."""

    def __init__(self, begin: Callable[[], Pending], advance: Callable[[], None] | None = None):
        super().__init__([], ())
        self._advance = advance
        self._begin: Callable[[], Pending] | None = begin
        self._started, self._lock = Event(), Lock()
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._asked: list[tuple[Callable[[], None], torch.cuda.Stream | None, Future]] = []  # `when_done` before the start

    @property
    def is_running(self) -> bool:
        return not self._started.is_set() or (self._pending is not None and self._pending.is_running)

    @property
    def began(self) -> float:
        assert self._pending is not None, "the operation has not started"
        return self._pending.began

    def begin(self) -> None:
        """Start the operation."""
        assert self._begin is not None
        try:
            pending = self._begin()
        except BaseException as error:  # `wait` raises it, in the thread that needs the result
            self._error = error
        with self._lock:
            if self._error is None:
                self._pending = pending
            for call, stream, done in self._asked:
                if self._error is None:
                    _end_after(pending.when_done(call, stream), done)
                else:
                    done.set_exception(self._error)  # type: ignore[arg-type]
            self._begin = None
        self._started.set()

    def when_done(self, call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> Sequence[Future]:
        with self._lock:
            if self._pending is not None:
                return self._pending.when_done(call, stream)
            done: Future = Future()
            self._asked.append((call, stream, done))
            return [done]

    def wait(self) -> tuple[Tensor, ...]:
        if self._advance is not None and not self._started.is_set():
            self._advance()
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        return self._pending.wait()


def _end_after(parts: Sequence[Future], done: Future) -> None:
    if parts:
        collect_all(list(parts)).then(lambda _: done.set_result(None))
    else:
        done.set_result(None)
