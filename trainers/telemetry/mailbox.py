"""Carries records from the workers to the driver, and the driver's order to stop back.

Workers never write to MLflow or to files of the run. They put records (`records.py`) into a queue, a process of Ray (`mail.py`).
The driver reads the queue, and only the driver writes metrics, files and pictures. The order travels with each read of the
driver, and with the answer to what a worker sends, so it needs no process and no message of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.telemetry.mail import Mail
from trainers.telemetry.records import Beat, Record

Subscriber = Callable[[Record], None]

_TOGETHER_S = 1.0  # records that have time wait so long for others
_PAUSE_S = 0.1  # between two tries to reach a lost queue
_ANSWER_S = 10.0  # seconds for a queue to answer; one that Ray cannot start again would never answer
_log = logging.getLogger(__name__)


class Outbox:
    """The workers' end of the queue. It sends records in order. Only `flush` waits. Each answer says whether training `stops`.

    Only one batch travels at a time. Records that are sent meanwhile go with the next batch. A batch that a lost queue has not
    taken goes again, once Ray has restarted the queue. A slow or lost queue never stops training: only the newest `limit`
    records wait, older ones are lost, and no error is raised.
    """

    def __init__(self, queue: Any, limit: int = 10_000):
        self._queue, self.stops = queue, False
        self._waiting: deque[dict[str, Any]] = deque(maxlen=limit)
        self._batch: list[dict[str, Any]] = []
        self._travelling: Any = None
        self._shipped = -math.inf  # when the last batch left

    def send(self, record: Record | Beat, urgent: bool = True) -> None:
        """Send a record with the current time, after those that wait. One that is not urgent may wait for a second."""
        self._waiting.append({"time": time.time(), **record})
        if urgent or time.monotonic() - self._shipped > _TOGETHER_S:
            self._ship(patience=0.0)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all records have arrived, for at most `timeout` seconds, and return whether they have."""
        deadline = time.monotonic() + timeout
        while self._travelling is not None or self._waiting:
            self._ship(patience=max(deadline - time.monotonic(), 0.0))
            if time.monotonic() > deadline:
                return False
        return True

    def _ship(self, patience: float) -> None:
        """Send the waiting records if the previous batch has arrived."""
        try:
            if self._travelling is not None:
                if not ray.wait([self._travelling], timeout=patience)[0]:
                    return
                self._arrived()
            if self._waiting:
                self._batch = list(self._waiting)
                self._travelling = self._queue.put.remote(self._batch)
                self._waiting.clear()
                self._shipped = time.monotonic()
        except Exception as error:  # training must continue if a record cannot be sent
            _log.debug("records not sent: %s", error)
            time.sleep(min(patience, _PAUSE_S))

    def _arrived(self) -> None:
        """Forget the batch that has travelled, or let it wait again if the queue was lost meanwhile."""
        travelled, self._travelling = self._travelling, None
        try:
            self.stops = ray.get(travelled, timeout=0)
        except Exception:
            room = self._waiting.maxlen or 0
            self._waiting.extendleft(reversed(self._batch[max(len(self._batch) + len(self._waiting) - room, 0) :]))
            raise


class Inbox:
    """The driver's end of the queue: a thread that passes every record to the subscribers, in order.

    Use it as a context manager around the training, and make an `Outbox` from its `queue`.
    If a subscriber raises an exception, the exception is logged, and the thread and the other subscribers continue. The first
    such exception is raised at the end of the context, unless another exception is already raised. If the queue's process
    ends, Ray starts it again; a queue that is still lost at the end raises an exception, too.

    Args:
        looks: takes the signs of life of every read of the queue, even if there are none; the subscribers do not get them.
        period: seconds between two reads of the queue.
        patience: seconds to wait at the end of the context for records that are still in the queue.

    Attributes:
        stops: whether the workers are asked to save a checkpoint after their step, and to stop.
        delivering: held while records and signs of life are passed on. Who reads what they change holds it, too.
    """

    def __init__(
        self,
        subscribers: Sequence[Subscriber],
        looks: Callable[[Sequence[Beat]], None] | None = None,
        period: float = 0.2,
        patience: float = 30.0,
    ):
        self._subscribers, self._looks = tuple(subscribers), looks
        self._period, self._patience = period, patience
        self._leaving, self._emptied, self.delivering = threading.Event(), threading.Condition(), threading.RLock()
        self._coming: Any = None  # the answer to the newest read of the queue, until it is here
        self._reads = self._empty = 0  # the number of reads, and of the last one that found nothing
        self._failure: Exception | None = None
        self._deaf = False  # to signs of life, which has been told
        self._lost: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="foldray-inbox", daemon=True)
        self.queue: Any
        self.stops = False

    def __enter__(self) -> Inbox:
        # The queue runs on the driver's node. On another node it would be lost with that node. Ray puts an actor without CPUs on
        # any node, unless its affinity is hard.
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
        # Ray's head would keep a history of these calls, which come several times a second (docs/notebook/faults.md).
        self.queue = ray.remote(Mail).options(**options, enable_task_events=False).remote()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._leaving.set()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            _log.warning("telemetry: records were still waiting after %.0f s; the last ones are lost", self._patience)
        with suppress(Exception):  # a queue is lost if Ray has stopped
            ray.kill(self.queue)
        if (failure := self._failure or self._lost) is not None and error is None:
            raise failure

    def settle(self) -> None:
        """Wait until all records that have arrived in the queue are delivered, or until the queue does not answer."""
        with self._emptied:
            later = self._reads + 1  # what is under way may have left the queue before the newest record came
            self._emptied.wait_for(lambda: self._empty >= later or self._lost is not None, self._patience)

    def deliver(self, *records: Record | Beat) -> None:
        with self.delivering:
            for record in records:
                if record["kind"] != "beat":
                    self.tell(record)
            if self._looks is not None:
                self._look(self._looks, [record for record in records if record["kind"] == "beat"])

    def tell(self, record: Record) -> None:
        """Pass a record to the subscribers. A function that takes signs of life may call this."""
        for subscriber in self._subscribers:
            try:
                subscriber(record)
            except Exception as error:
                self._keep(error, f"{getattr(subscriber, '__qualname__', subscriber)} failed on a {record['kind']} record")

    def mute(self) -> None:
        with self.delivering:
            self._subscribers = ()

    def _look(self, looks: Callable[[Sequence[Beat]], None], beats: Sequence[Beat]) -> None:
        """Use signs of life. What fails there costs neither the records nor the training."""
        try:
            looks(beats)
        except Exception as error:
            if not self._deaf:
                _warn("signs of life cannot be used", error)
            self._deaf = True
        else:
            self._deaf = False

    def _run(self) -> None:
        lost_since: float | None = None
        while True:
            # This is read before the queue, so the last read still gets records that were sent before the context ended.
            leaving = self._leaving.is_set()
            try:
                records = self._taken()
            except Exception as error:
                lost_since = lost_since or time.monotonic()
                if leaving or time.monotonic() - lost_since > self._patience:
                    if self._lost is None:
                        _warn("the queue is lost; training continues without records", error)
                    self._lost = error
                    self._wake(self._empty)
                if leaving:
                    return
                time.sleep(_PAUSE_S)
                continue
            if self._lost is not None:
                _log.warning("telemetry: the queue is back")
            lost_since = self._lost = None
            self.deliver(*records)
            if not records:
                self._wake(self._reads)
                if leaving:
                    return
                self._leaving.wait(self._period)

    def _taken(self) -> list[Any]:
        """Return what is in the queue, or was when the last call gave up."""
        if self._coming is None:
            self._reads += 1
            self._coming = self.queue.take.remote(self.stops)
        try:
            taken = ray.get(self._coming, timeout=_ANSWER_S)
        except GetTimeoutError:
            raise  # the answer may still come, and the queue no longer has these records
        except Exception:
            self._coming = None
            raise
        self._coming = None
        return taken

    def _wake(self, empty: int) -> None:
        """Let `settle` look again, after a read that found nothing, or the loss of the queue."""
        with self._emptied:
            self._empty = empty
            self._emptied.notify_all()

    def _keep(self, error: Exception, what: str) -> None:
        if self._failure is None:
            self._failure = error
            _warn(what, error)


def _warn(what: str, error: Exception) -> None:
    _log.warning("telemetry: %s (%s: %s)", what, type(error).__name__, error)
