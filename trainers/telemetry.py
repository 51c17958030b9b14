"""Records that flow from the workers to the driver, the way they travel, and the history they make.

Workers touch neither MLflow nor a file of the run: they put plain dicts into a Ray queue, and the driver, which drains it, is
the one writer of everything that people look at. Records are dicts rather than classes of ours so that the queue's process
need not be able to import this package.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import ray
from pydantic import ConfigDict, Field, TypeAdapter
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import TypedDict  # as pydantic asks for below Python 3.12

LOAD_WINDOW = 20  # steps whose expert loads are summed: one step's load is mostly the chance of its batch

_log = logging.getLogger(__name__)


class Place(TypedDict):
    """Where a rank runs and what it is in both views of the fold; from every rank, at the start of every attempt."""

    kind: Literal["place"]
    rank: int
    actor: str
    node: str
    node_ip: str
    pid: int
    attention: dict[str, int]
    moe: dict[str, int]
    time: NotRequired[float]


class Step(TypedDict):
    """One finished optimizer step; `step` counts from 1. From rank 0, like all that follow."""

    kind: Literal["step"]
    step: int
    loss: float
    """Cross entropy, nats per token, without the balance and z-losses."""
    lr: float
    grad_norm: float | None
    balance_loss: float | None
    z_loss: float | None
    drop_rate: float | None
    tokens_per_s: float
    step_time_s: float
    mfu: float | None
    load: list[list[int]] | None
    """Tokens per MoE layer and global expert; None on steps that do not carry it (a large model may send it now and then)."""
    load_max_over_mean: float | None
    dead_experts: int | None
    traffic: NotRequired[dict[str, dict[str, int]]]
    """By class of traffic (`foldray.comm.Groups`) what all ranks together sent: calls, inside_bytes and across_bytes."""
    time: NotRequired[float]


class Validation(TypedDict):
    """The loss on held-back text after `step` steps."""

    kind: Literal["validation"]
    step: int
    loss: float
    bits_per_byte: float
    sequences: int
    time: NotRequired[float]


class Resumed(TypedDict):
    """Training goes on from the state after `step` steps; what an earlier attempt recorded beyond it never happened."""

    kind: Literal["resumed"]
    step: int
    time: NotRequired[float]


class Tried(TypedDict):
    """A degree and a size of gradient chunks that were tried at the start of training, or those chosen."""

    kind: Literal["tried"]
    degree: int
    sp_bytes: int | None
    """None where the size is settled."""
    step_time_s: float
    """Median over the steps that were measured with it; in the record of the choice, over those of the run-off."""
    chosen: bool
    time: NotRequired[float]


class Saved(TypedDict):
    """A checkpoint of the state after `step` steps."""

    kind: Literal["checkpoint"]
    step: int
    path: str
    time: NotRequired[float]


Record = Place | Step | Validation | Resumed | Tried | Saved
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")], config=ConfigDict(strict=True))
_FINITE = ("loss", "lr", "tokens_per_s", "step_time_s", "bits_per_byte")
_LONGEST_LINE = 1 << 28
Subscriber = Callable[[Record], None]


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


class History:
    """What a run has done so far: its records by step, those of re-run steps in the place of the earlier ones."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.steps: dict[int, Step] = {}
        self.validations: dict[int, Validation] = {}
        self.checkpoints: dict[int, Saved] = {}
        self.resumes: list[int] = []
        self.tried: list[Tried] = []
        """In this order; a search that begins anew clears what was before."""
        self.imbalance: dict[int, np.ndarray] = {}
        """Per step: for every MoE layer, the busiest expert's load over the mean."""
        self._loads: deque[tuple[int, np.ndarray]] = deque(maxlen=LOAD_WINDOW)

    @classmethod
    def read(cls, path: Path) -> History:
        """The history in a `metrics.jsonl`; a line torn by a crash is passed over.

        Raises:
            ValueError: a line holds something else than a record.
        """
        history = cls()
        if path.exists():
            with path.open() as lines:
                for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), ""), 1):
                    history._read_line(number, line)
        return history

    def _read_line(self, number: int, line: str) -> None:
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"line {number} has no end")
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return
        except (RecursionError, ValueError):
            raise ValueError(f"line {number} holds no record") from None
        try:
            # Numbers that are not finite are written as null.
            known = {key: 0.0 if value is None and key in _FINITE else value for key, value in record.items()}
            _RECORD.validate_python(known)
            self.receive(record)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError):
            raise ValueError(f"line {number} holds no record of a run") from None

    def receive(self, record: Record) -> None:
        """Take in a record."""
        if record["kind"] == "place":
            self.places[record["rank"]] = record
        elif record["kind"] == "step":
            self._take_step(record)
        elif record["kind"] == "validation":
            self.validations[record["step"]] = record
        elif record["kind"] == "checkpoint":
            self.checkpoints[record["step"]] = record
        elif record["kind"] == "tried":
            if self.tried and self.tried[-1]["chosen"]:
                self.tried.clear()
            self.tried.append(record)
        else:
            self.resumes.append(record["step"])
            self._rewind(record["step"])

    @property
    def last_step(self) -> int:
        return next(reversed(self.steps), 0)  # steps are kept in order

    @property
    def load(self) -> np.ndarray | None:
        """Tokens per MoE layer and expert over the newest steps, `LOAD_WINDOW` at most; None if none carried it."""
        return np.sum([load for _, load in self._loads], axis=0) if self._loads else None

    def _take_step(self, record: Step) -> None:
        step, load = record["step"], np.asarray(record["load"] or [], dtype=np.int64)
        if step <= self.last_step:  # an attempt that began from nothing says no "resumed"
            self._rewind(step - 1)
        # The rest of a run's loads would fill the driver's memory on a model of many experts; metrics.jsonl has them.
        self.steps[step] = {**record, "load": None}
        if load.size:
            self._loads.append((step, load))
            self.imbalance[step] = (load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-12)).astype(np.float32)

    def _rewind(self, step: int) -> None:
        by_steps: tuple[dict[int, Any], ...] = (self.steps, self.validations, self.checkpoints, self.imbalance)
        for by_step in by_steps:
            for later in [key for key in by_step if key > step]:
                del by_step[later]
        kept = [(at, load) for at, load in self._loads if at <= step]
        self._loads.clear()
        self._loads.extend(kept)


def number(value: float | None) -> float:
    """A value to draw or to compare: NaN where a record has none (JSON has no NaN, so files say null)."""
    return math.nan if value is None else float(value)


def as_json(record: Mapping[str, Any]) -> str:
    """A record as one line of strict JSON; numbers that are not finite become null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
