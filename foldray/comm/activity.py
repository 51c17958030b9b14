"""What a rank is doing, for another thread that watches whether training gets on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic


class Activity:
    """What the ops and communicators of one rank are doing. The thread that makes it is the one that trains.

    Attributes:
        doing: the op that runs, or a word for what training does outside of a list.
        waited_s: seconds for which the thread that trains has waited for operations.
        since: when something changed last, in seconds of `time.monotonic`.
        may_take_s: seconds that the present work may take without a change; None is the usual limit.
    """

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()
        self.waited_s = 0.0
        self.may_take_s: float | None = None
        self._trains = get_ident()
        self._waits: dict[int, str] = {}
        self.doing = "starts"

    @property
    def doing(self) -> object:
        return self._doing

    @doing.setter
    def doing(self, what: object) -> None:
        self._doing, self.since = what, monotonic()

    @property
    def waits(self) -> list[str]:
        """The operations that threads of this rank wait for."""
        return list(self._waits.values())

    def start(self, communicator: str) -> None:
        """Count an operation that a communicator starts."""
        self.started[communicator] += 1
        self.since = monotonic()

    @contextmanager
    def during(self, what: str, may_take_s: float) -> Iterator[None]:
        """While the context is open, training does something that may take longer than usual. If it fails, its name stays."""
        self.doing, self.may_take_s = what, may_take_s
        yield
        self.doing, self.may_take_s = what, None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While the context is open, this thread waits for an operation. If it fails, what it waited for stays."""
        thread = get_ident()
        self._waits[thread], began = what, monotonic()
        yield
        self.since = monotonic()
        del self._waits[thread]
        if thread == self._trains:
            self.waited_s += self.since - began
