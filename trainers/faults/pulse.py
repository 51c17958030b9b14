"""The signs of life of a rank."""

from __future__ import annotations

import math
import os
import threading
import time
from types import TracebackType

from foldray.comm import Activity
from trainers.telemetry.mailbox import Outbox

STALLED = 75  # exit code of a rank that has ended itself


class Pulse:
    """A thread that tells the driver what this rank is doing, and ends the process if it does not get on.

    Waits in torch's process groups have a timeout of their own. The thread is for all other places where a rank may stand
    still, such as a storage that does not answer. It waits longer, so the ranks that only wait for this one end first, with
    an error that names what they waited for.

    Use it as a context manager around the training.

    Args:
        rank: the number of the rank.
        activity: what the rank is doing.
        outbox: the way to the driver, which nothing else uses.
        patience: seconds without any change after which the process ends.
        period: seconds between two signs of life.
    """

    def __init__(self, rank: int, activity: Activity, outbox: Outbox, patience: float, period: float = 2.0):
        self._rank, self._activity, self._outbox = rank, activity, outbox
        self._patience, self._period = patience, period
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foldray-pulse", daemon=True)
        self._began, self._waited_s = math.inf, 0.0

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join(self._period)
        self._beat()  # the last one says where the rank was
        self._outbox.flush(self._period)

    @property
    def stops(self) -> bool:
        """Whether the driver has asked to stop."""
        return self._outbox.stops

    def trains(self) -> None:
        """Say that training begins: the rank has been built."""
        self._began, self._waited_s = time.monotonic(), self._activity.waited_s

    def _run(self) -> None:
        while True:
            self._beat()
            self._outbox.flush(self._period / 2)  # the answer may ask to stop; if the driver is gone, there is none
            if time.monotonic() - self._activity.since > (self._activity.may_take_s or self._patience):
                self._outbox.flush()
                os._exit(STALLED)
            if self._ends.wait(self._period):
                return

    def _beat(self) -> None:
        activity, now = self._activity, time.monotonic()
        self._outbox.send({
            "kind": "beat", "rank": self._rank, "doing": str(activity.doing), "waits": activity.waits,
            "started": dict(activity.started), "still_s": now - activity.since, "trained_s": max(now - self._began, 0.0),
            "waited_s": activity.waited_s - self._waited_s, "may_take_s": activity.may_take_s,
        })  # fmt: skip
