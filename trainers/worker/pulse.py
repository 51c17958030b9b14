"""The signs of life of a rank."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.queue import Queue

from foldray.comm import Activity
from trainers.cluster.mailbox import Outbox

STALLED = 75  # exit code of a rank that has ended itself


class Pulse:
    """A thread that tells the driver what this rank is doing, and ends the process if it does not get on.

    Waits in torch's process groups have a timeout of their own. The thread is for all other places where a rank may stand
    still, such as a storage that does not answer. It waits longer, so the ranks that only wait for this one end first, with
    an error that names what they waited for.

    Use it as a context manager around the training.

    Attributes:
        stops: whether the driver has asked to stop.

    Args:
        rank: the number of the rank.
        activity: what the rank is doing.
        outbox: the way to the driver, which nothing else uses.
        orders: the way back; None has no orders.
        patience: seconds without any change after which the process ends.
        period: seconds between two signs of life.
    """

    def __init__(self, rank: int, activity: Activity, outbox: Outbox, orders: Queue | None, patience: float, period: float = 2.0):
        self._rank, self._activity, self._outbox, self._orders = rank, activity, outbox, orders
        self._patience, self._period = patience, period
        self.stops = False
        self._asked: Any = None
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

    def trains(self) -> None:
        """Say that training begins: the rank has been built."""
        self._began, self._waited_s = time.monotonic(), self._activity.waited_s

    def _run(self) -> None:
        while True:
            self._beat()
            self._read_orders()
            if time.monotonic() - self._activity.since > (self._activity.may_take_s or self._patience):
                self._outbox.flush()
                os._exit(STALLED)
            if self._ends.wait(self._period):
                return

    def _read_orders(self) -> None:
        """Ask whether to stop. An answer that does not come at once is read at a later beat, because the driver may be gone."""
        if self._orders is None or self.stops:
            return
        with suppress(RayError):
            if self._asked is None:
                self._asked = self._orders.actor.qsize.remote()
            if ray.wait([self._asked], timeout=self._period / 2)[0]:
                asked, self._asked = self._asked, None
                self.stops = ray.get(asked, timeout=0) > 0

    def _beat(self) -> None:
        activity, now = self._activity, time.monotonic()
        self._outbox.send({
            "kind": "beat", "rank": self._rank, "doing": str(activity.doing), "waits": activity.waits,
            "started": dict(activity.started), "still_s": now - activity.since, "trained_s": max(now - self._began, 0.0),
            "waited_s": activity.waited_s - self._waited_s,
        })  # fmt: skip
