"""The history of a run: what its records make up, with its speed over time and what happened meanwhile."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from trainers.telemetry import records
from trainers.telemetry.expert_health import Course, Health, entropy, max_over_mean, unused
from trainers.telemetry.metrics import METRICS, Metric
from trainers.telemetry.records import Record, Sink, Step

LOAD_WINDOW = 20  # steps to sum expert loads over, because the load of one step depends mostly on its batch
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")], config=ConfigDict(strict=True))
_LONGEST_LINE = 1 << 28
_POINTS = 1024  # of a line in a picture
_ALWAYS = tuple(metric.name for metric in METRICS if metric.always)  # always numbers, even if they are not finite
_WHOLE = {"step", *(metric.name for metric in METRICS if metric.whole)}


class Steps(Mapping[int, Step]):
    """Step → its record without load, measures by layer and traffic, which `metrics.jsonl` has.

    It has the given metrics, in columns, and ignores other numbers of records. Every number takes 8 bytes. A week may have a
    million steps, and a million dicts would fill the memory of the driver.
    """

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        self._columns = {name: array("d") for name in ("step", "time", *(metric.name for metric in metrics))}

    def add(self, record: Step) -> None:
        """Add a step that comes after all others."""
        for name, column in self._columns.items():
            value = record.get(name)
            column.append(math.nan if value is None else cast(float, value))

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`."""
        keep = bisect_left(self._columns["step"], step + 1)
        for column in self._columns.values():
            del column[keep:]

    def column(self, name: str) -> np.ndarray:
        """Return a number of all steps, in their order. It is NaN where a step has none."""
        return np.array(self._columns[name])

    @property
    def last(self) -> int:
        """The newest step; 0 without steps."""
        column = self._columns["step"]
        return int(column[-1]) if column else 0

    def __getitem__(self, step: int) -> Step:
        column = self._columns["step"]
        at = bisect_left(column, step)
        if at == len(column) or column[at] != step:
            raise KeyError(step)
        numbers = {name: self._number(name, column[at]) for name, column in self._columns.items()}
        return cast(Step, {"kind": "step", **numbers, "load": None})

    def __iter__(self) -> Iterator[int]:
        return map(int, self._columns["step"])

    def __len__(self) -> int:
        return len(self._columns["step"])

    def _number(self, name: str, value: float) -> Any:
        if math.isnan(value) and name not in _ALWAYS:
            return None
        return int(value) if name in _WHOLE else value


class Event(NamedTuple):
    """Something that happened after a step, at a time in seconds since the epoch. Workers may stop for it."""

    time: float
    step: int
    what: str
    stops: bool


@dataclass
class Speed(Sink):
    """The speed of all steps in the order in which they ran, those that ran again as well.

    Times are in seconds since the epoch. `workers` has the time of its start and its number of workers for every attempt.
    """

    times: array[float] = field(default_factory=lambda: array("d"))
    tokens_per_s: array[float] = field(default_factory=lambda: array("d"))
    workers: list[tuple[float, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _ranks: set[int] = field(default_factory=set)
    _step: int = 0

    def take(self, record: Record) -> None:
        if record.get("time") is not None:
            super().take(record)

    def take_step(self, record: Step) -> None:
        self._step = record["step"]
        self.times.append(record["time"])
        self.tokens_per_s.append(record["tokens_per_s"])

    def take_place(self, record: records.Place) -> None:
        if record["rank"] in self._ranks:  # nobody told why the attempt before has ended
            self.events.append(Event(record["time"], self._step, "the run was started again", True))
            self._ranks.clear()
        if not self._ranks:
            self.workers.append((record["time"], 0))
        self._ranks.add(record["rank"])
        self.workers[-1] = (self.workers[-1][0], len(self._ranks))

    def take_failed(self, record: records.Failed) -> None:
        then = f"; goes on from step {record['saved']}" if record["goes_on"] else "; the end"
        self._end(record, f"{record['what']}{then}")

    def take_grows(self, record: records.Grows) -> None:
        self._end(record, "the cluster has room for more workers")

    def take_spiked(self, record: records.Spiked) -> None:
        what = f"the loss is {record['loss']:.3g}, after a median of {record['median']:.3g}"
        self.events.append(Event(record["time"], record["step"], what, False))

    def take_slow(self, record: records.Slow) -> None:
        if record["goes_on"]:
            what = f"rank {record['rank']} on {record['node_ip']} is slow"
            self.events.append(Event(record["time"], self._step, what, False))

    def _end(self, record: records.Failed | records.Grows, what: str) -> None:
        self.events.append(Event(record["time"], record["step"], what, True))
        self._ranks.clear()
        self.workers.append((record["time"], 0))


class History(Sink):
    """The records of a run by step. Records of steps that ran again replace the earlier ones.

    A step adds 160 bytes, for any size of the model. Loads, and what follows from them, are kept in columns of steps
    (`Course`).
    """

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        self.places: dict[int, records.Place] = {}
        self.steps = Steps(metrics)
        self.validations: dict[int, records.Validation] = {}
        self.checkpoints: dict[int, records.Saved] = {}
        self.resumes: list[int] = []
        self.tried: list[records.Tried] = []
        """Trials in order; a new search clears the trials of an earlier one."""
        self.settled: dict[int, records.Settled] = {}
        """The chosen order by degree; the newest counts."""
        self.listed: dict[int, records.Listed] = {}
        """The found lists by degree; the newest count."""
        self.drifts: list[records.Drifted] = []
        self.failures: list[records.Failed] = []
        """The failed attempts, in order."""
        self.grown: list[int] = []
        """The steps after which training went on with more workers."""
        self.spikes: dict[int, records.Spiked] = {}
        """Losses that stood out, by step."""
        self.placed: dict[int, records.Placed] = {}
        """The steps after which experts changed places."""
        self.slow: dict[int, records.Slow] = {}
        """Ranks that the others wait for."""
        self.imbalance = Course(_POINTS)
        """The load of the busiest expert over the mean load, for every MoE layer."""
        self.entropy = Course(_POINTS)
        """The entropy of the load over ln(experts), for every MoE layer."""
        self.unused = Course(_POINTS)
        """The numbers of dead and of starved experts over the `LOAD_WINDOW` steps up to each step."""
        self.course, self.speed = Course(), Speed()
        self._loads: deque[tuple[int, np.ndarray]] = deque(maxlen=LOAD_WINDOW)

    @classmethod
    def read(cls, path: Path, metrics: Sequence[Metric] = METRICS) -> History:
        """Read the history in a `metrics.jsonl`, with these metrics of its steps, and skip lines that a crash cut off.

        A line that is JSON, but not a record, raises ValueError.
        """
        history = cls(metrics)
        if path.exists():
            with path.open() as lines:
                for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), ""), 1):
                    history._read_line(number, line)
        return history

    def _read_line(self, number: int, line: str) -> None:
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"line {number} is too long")
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return
        except (RecursionError, ValueError):
            raise ValueError(f"line {number} is not a record") from None
        try:
            # Infinite numbers and NaN are written as null.
            finite = {key: 0.0 if value is None and key in _ALWAYS else value for key, value in record.items()}
            _RECORD.validate_python(finite)
            self.take(record)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError):
            raise ValueError(f"line {number} is not a record of a run") from None

    def take(self, record: Record) -> None:
        self.speed.take(record)
        super().take(record)

    def take_place(self, record: records.Place) -> None:
        self.places[record["rank"]] = record

    def take_step(self, record: Step) -> None:
        step, load = record["step"], np.asarray(record["load"] or [], dtype=np.int64)
        if step <= self.last_step:  # an attempt that starts at step 0 sends no "resumed" record
            self._rewind(step - 1)
        self.steps.add(record)
        if load.size:
            self._add_load(step, load)

    def take_validation(self, record: records.Validation) -> None:
        self.validations[record["step"]] = record

    def take_checkpoint(self, record: records.Saved) -> None:
        self.checkpoints[record["step"]] = record

    def take_tried(self, record: records.Tried) -> None:
        if self.tried and self.tried[-1]["chosen"]:
            self.tried.clear()
        self.tried.append(record)

    def take_settled(self, record: records.Settled) -> None:
        self.settled[record["degree"]] = record

    def take_listed(self, record: records.Listed) -> None:
        self.listed[record["degree"]] = record

    def take_drifted(self, record: records.Drifted) -> None:
        self.drifts.append(record)

    def take_failed(self, record: records.Failed) -> None:
        self.failures.append(record)
        self.forget_places()  # the next attempt may have fewer ranks

    def take_grows(self, record: records.Grows) -> None:
        self.grown.append(record["step"])
        self.forget_places()

    def take_spiked(self, record: records.Spiked) -> None:
        self.spikes[record["step"]] = record

    def take_placed(self, record: records.Placed) -> None:
        self.placed[record["step"]] = record

    def take_slow(self, record: records.Slow) -> None:
        self.slow.pop(record["rank"], None)
        if record["goes_on"]:
            self.slow[record["rank"]] = record

    def take_resumed(self, record: records.Resumed) -> None:
        self.resumes.append(record["step"])
        self._rewind(record["step"])

    def forget_places(self) -> None:
        self.places.clear()
        self.slow.clear()

    @property
    def last_step(self) -> int:
        return self.steps.last

    @property
    def load(self) -> np.ndarray | None:
        """Tokens per MoE layer and expert over at most `LOAD_WINDOW` of the newest steps; None if no step has them."""
        return np.sum([load for _, load in self._loads], axis=0) if self._loads else None

    @property
    def newest(self) -> range | None:
        """The steps that `load` sums over, from the first to the last; None if no step has loads."""
        return range(self._loads[0][0], self._loads[-1][0] + 1) if self._loads else None

    def health(self, ep: int) -> Health | None:
        """Return the balance over the newest steps, with the experts on `ep` ranks; None if no step has loads."""
        return Health.of([load for _, load in self._loads], ep) if self._loads else None

    def _add_load(self, step: int, load: np.ndarray) -> None:
        if load.ndim != 2 or load.min() < 0 or (self._loads and load.shape != self._loads[-1][1].shape):
            raise ValueError(f"step {step} has loads of another shape, or negative ones")
        self._loads.append((step, load))
        self.imbalance.add(step, max_over_mean(load))
        self.entropy.add(step, entropy(load))
        self.unused.add(step, np.sum(unused(np.sum([recent for _, recent in self._loads], axis=0)), axis=1))
        self.course.add(step, load)

    def _rewind(self, step: int) -> None:
        by_steps: tuple[dict[int, Any], ...] = self.validations, self.checkpoints, self.spikes, self.placed
        for by_step in by_steps:
            for later in [key for key in by_step if key > step]:
                del by_step[later]
        earlier = [(at, load) for at, load in self._loads if at <= step]
        self._loads.clear()
        self._loads.extend(earlier)
        for columns in (self.steps, self.imbalance, self.entropy, self.unused, self.course):
            columns.rewind(step)
