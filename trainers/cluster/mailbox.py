"""The way of records from the workers to the driver.

Workers touch neither MLflow nor a file of the run: they put records (`trainers/records.py`) into a Ray queue, and the driver,
which drains it, is the one writer of everything that people look at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.records import Record

Subscriber = Callable[[Record], None]

_log = logging.getLogger(__name__)


class Outbox:
    """The workers' end: sends records in order and never waits for anybody, until `flush`.

    One batch travels at a time, for Ray may run the calls of an asynchronous actor in another order than they were made;
    what is sent meanwhile goes with the next batch. A queue that is slow or gone costs records, never training: only the
    newest `limit` wait, and no failure is raised.
    """

    def __init__(self, queue: Queue, limit: int = 10_000):
        self._actor: Any = queue.actor
        self._waiting: deque[dict[str, Any]] = deque(maxlen=limit)
        self._travelling: Any = None

    def send(self, record: Record) -> None:
        """Send a record, stamped with the time of sending."""
        self._waiting.append({"time": time.time(), **record})
        self._ship(patience=0.0)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was sent has arrived, or for `timeout` seconds; whether all has left."""
        deadline = time.monotonic() + timeout
        while self._travelling is not None or self._waiting:
            if not self._ship(patience=max(deadline - time.monotonic(), 0.0)):
                return False
        return True

    def _ship(self, patience: float) -> bool:
        """Send what waits, if the batch before has arrived."""
        try:
            if self._travelling is not None and not ray.wait([self._travelling], timeout=patience)[0]:
                return False
            batch, self._travelling = list(self._waiting), None
            if batch:
                self._travelling = self._actor.put_nowait_batch.remote(batch)
                self._waiting.clear()
        except Exception as error:  # whatever telemetry suffers, training goes on
            _log.debug("records not sent: %s", error)
            return False
        return True


class Inbox:
    """The driver's end: a thread that hands every record to the subscribers, in order.

    Use it as a context manager around the training; `queue` is what an `Outbox` is made from. A subscriber's exception is
    logged when it happens, stops neither the thread nor the other subscribers, and is raised on leaving the context unless
    something else is being raised already.

    Args:
        subscribers: called in this order with every record, from the inbox's thread.
        period: seconds between looks into the queue.
        patience: seconds to wait on leaving for records that are still queued.
    """

    def __init__(self, subscribers: Sequence[Subscriber], period: float = 0.2, patience: float = 30.0):
        self._subscribers = tuple(subscribers)
        self._period, self._patience = period, patience
        self._leaving = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="foldray-inbox", daemon=True)
        self.queue: Queue

    def __enter__(self) -> Inbox:
        # Beside the driver: elsewhere the queue would be lost with a worker's node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self.queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._leaving.set()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            _log.warning("telemetry: records were still waiting after %.0f s; the last ones are lost", self._patience)
        with suppress(Exception):  # with Ray gone, so is the queue
            self.queue.shutdown(force=True)
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                # Read before looking: a record sent before the context was left is then seen by the last look.
                leaving = self._leaving.is_set()
                records = self.queue.get_nowait_batch(self.queue.qsize())
                self._deliver(records)
                if leaving and not records:
                    return
                if not records:
                    self._leaving.wait(self._period)
        except Exception as error:
            self._keep(error, "the queue is gone; training goes on, its records are lost")

    def _deliver(self, records: Iterable[Record]) -> None:
        for record in records:
            for subscriber in self._subscribers:
                try:
                    subscriber(record)
                except Exception as error:
                    self._keep(error, f"{getattr(subscriber, '__qualname__', subscriber)} failed on a {record['kind']} record")

    def _keep(self, error: Exception, what: str) -> None:
        if self._failure is None:
            self._failure = error
            _log.warning("telemetry: %s (%s: %s)", what, type(error).__name__, error)
