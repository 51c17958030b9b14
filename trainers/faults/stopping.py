"""Ctrl-C and SIGTERM while workers train."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SAME_S = 1.0


class Stopping:
    """A context in which SIGINT and SIGTERM stop a training in order.

    The first signal asks the workers to save a checkpoint after their step, and to stop. The second one, or the first one if
    nobody can be asked, raises KeyboardInterrupt with the number of the first one. What arrives within a second of the first one
    is the same signal: `ray job stop` sends it to all processes of a job, and the parent of this process passes it on. Only the
    main thread gets signals; in other threads the context does nothing.

    `signal` is the number of the first signal. `ask` asks the workers, and returns whether they will come to it.
    """

    def __init__(self, ask: Callable[[], bool]):
        self._ask = ask
        self.signal: int | None = None
        self._began = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt) and self.signal is not None:
            error.args = (int(self.signal),)  # what waits for Ray raises a new exception, which does not know the signal

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._began = number, time.monotonic()
            if self._ask():
                return
        elif time.monotonic() - self._began < _SAME_S:
            return
        raise KeyboardInterrupt
