"""Records of a training, and the history that they make.

Records are dicts rather than classes of ours so that the queue that they travel through (`cluster/mailbox.py`) need not be able
to import this package.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict  # as pydantic asks for below Python 3.12

LOAD_WINDOW = 20  # steps whose expert loads are summed: one step's load is mostly the chance of its batch


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


class Settled(TypedDict):
    """The order of pieces that rank 0 has chosen, once it knew what pieces of this degree take."""

    kind: Literal["settled"]
    degree: int
    forward: str
    backward: str
    """An overlap's kind, and its lag where it has one: `stream:2`."""
    time: NotRequired[float]


class Saved(TypedDict):
    """A checkpoint of the state after `step` steps."""

    kind: Literal["checkpoint"]
    step: int
    path: str
    time: NotRequired[float]


Record = Place | Step | Validation | Resumed | Tried | Settled | Saved
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")], config=ConfigDict(strict=True))
_FINITE = ("loss", "lr", "tokens_per_s", "step_time_s", "bits_per_byte")
_LONGEST_LINE = 1 << 28


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
        self.settled: dict[int, Settled] = {}
        """By degree, the newest."""
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
        elif record["kind"] == "settled":
            self.settled[record["degree"]] = record
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
