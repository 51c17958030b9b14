"""Records of a training, and the history that they make up.

Records are dicts, not classes of this package, so the queue that carries them (`cluster/mailbox.py`) need not import this
package.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic requires this one below Python 3.12

from trainers.health import Course, Health, Layers, entropy, max_over_mean, unused
from trainers.speed import Speed

VALIDATED = ("validation/loss", "validation/bits_per_byte")
REPORTED = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_s", "step_time_s", "mfu", *VALIDATED)
"""Metrics that Ray gets with each checkpoint, by the names that MLflow has (`reported`)."""
LOAD_WINDOW = 20  # steps to sum expert loads over, because the load of one step depends mostly on its batch


class Place(TypedDict):
    """The node of a rank, and its seat in both grids. Every rank sends this record at the start of every attempt.

    If the experts have ranks of their own, a rank has a seat in one of the grids.
    """

    kind: Literal["place"]
    rank: int
    actor: str
    node: str
    node_ip: str
    pid: int
    attention: dict[str, int] | None
    moe: dict[str, int] | None
    placement_group: NotRequired[str | None]
    """The id of Ray's reservation for the workers."""
    time: NotRequired[float]


class Step(TypedDict):
    """One finished optimizer step; `step` counts from 1. Rank 0 sends this record and all records of the following kinds."""

    kind: Literal["step"]
    step: int
    loss: float
    """Cross entropy, nats per token that counts, without the balance and z-losses."""
    lr: float
    grad_norm: float | None
    balance_loss: float | None
    z_loss: float | None
    mtp_loss: NotRequired[float | None]
    """Cross entropy of further tokens, nats per token, mean over depths; None without multi-token prediction."""
    drop_rate: float | None
    tokens_per_s: float
    step_time_s: float
    mfu: float | None
    load: list[list[int]] | None
    """Tokens per MoE layer and global expert; None for a model without MoE layers."""
    load_max_over_mean: float | None
    """The load of the fullest expert over the mean load, in the worst layer; `rank_max_over_mean`: that of the fullest rank."""
    dead_experts: int | None
    """Number of experts of all layers without a token in this step."""
    rank_max_over_mean: NotRequired[float | None]
    load_entropy: NotRequired[float | None]
    """The entropy of the load over ln(experts), in the worst layer."""
    by_layer: NotRequired[Layers | None]
    trained_tokens: NotRequired[int]
    """Number of tokens that count in the loss."""
    traffic: NotRequired[dict[str, dict[str, int]]]
    """The calls, inside_bytes and across_bytes of all ranks together, by class of traffic (`foldray.comm.Groups`)."""
    time: NotRequired[float]


class Measured(TypedDict):
    """The loss on the validation text of one source."""

    loss: float | None
    """Cross entropy, nats per token that counts; None if it is no number and comes from a file."""
    bits_per_byte: float | None
    """None for conversations."""
    sequences: int


class Validation(TypedDict):
    """The loss on the validation text after `step` steps. With a mixture, this is the mean over sources, by their weights."""

    kind: Literal["validation"]
    step: int
    loss: float
    bits_per_byte: float | None
    """None if there are conversations."""
    sequences: int
    sources: NotRequired[dict[str, Measured]]
    """The sources of a mixture."""
    time: NotRequired[float]


class Resumed(TypedDict):
    """Training continues from the state after `step` steps. Later records of an earlier attempt become invalid."""

    kind: Literal["resumed"]
    step: int
    time: NotRequired[float]


class Tried(TypedDict):
    """A degree and a size of gradient chunks that training tried in its first steps, or the choice among them."""

    kind: Literal["tried"]
    degree: int
    sp_bytes: int | None
    """None if the recipe settles the size."""
    step_time_s: float
    """Median over the measured steps with this setting; in the record of the choice, over the steps of the run-off."""
    chosen: bool
    time: NotRequired[float]


class Settled(TypedDict):
    """The order of the pieces of one degree, which training has chosen by the measured times of ops."""

    kind: Literal["settled"]
    degree: int
    forward: str
    backward: str
    """The overlap kind of each direction, with its lag if it has one: `stream:2`."""
    time: NotRequired[float]


class Listed(TypedDict):
    """The lists of a step that were found for one degree (`finding.Found`), by the measured times of ops."""

    kind: Literal["listed"]
    degree: int
    seconds: float
    """What the simulator predicts for the step."""
    bound: float
    """The seconds that no list can beat."""
    named: str
    named_seconds: float
    """The fastest list with a name, and its seconds."""
    kept: list[int]
    """For every position, the most blocks that it keeps at once, each of one micro-batch, with gradients of weights."""
    own: list[int]
    """The same for the pipeline's own order, without overlap."""
    lists: list[list[list[Any]]]
    """For every position, its ops as [kind, direction, layer, part, micro_batch]. In the run folder, they have their own file."""
    time: NotRequired[float]


class Drifted(TypedDict):
    """Steps take another time than was found, and have done so for long. Training measures anew."""

    kind: Literal["drifted"]
    step_time_s: float
    found_s: float
    time: NotRequired[float]


class Saved(TypedDict):
    """A checkpoint of the state after `step` steps."""

    kind: Literal["checkpoint"]
    step: int
    path: str
    time: NotRequired[float]


class Beat(TypedDict):
    """A sign of life of a rank. It goes to no file."""

    kind: Literal["beat"]
    rank: int
    doing: str
    """The op that runs, or what training does outside of its lists."""
    waits: list[str]
    """What the rank waits for, such as "all-to-all 12 of tokens"."""
    started: dict[str, int]
    """Number of started operations, by communicator."""
    still_s: float
    """Seconds since anything changed."""
    trained_s: float
    """Seconds since training began, and `waited_s` of them for other ranks."""
    waited_s: float
    time: NotRequired[float]


class Grows(TypedDict):
    """The cluster has room for more workers, and they start again from the state after `step` steps. The driver sends this."""

    kind: Literal["grows"]
    step: int
    time: NotRequired[float]


class Slow(TypedDict):
    """Other ranks wait for a rank. The driver sends this record when it sees it, and again when it is over."""

    kind: Literal["slow"]
    rank: int
    node_ip: str
    over_others: float
    """The rank's share of time without waiting, over the median share of the other ranks."""
    over_before: float | None
    """The same over its own share before."""
    goes_on: bool
    """False when the others no longer wait for it."""
    time: NotRequired[float]


class Spiked(TypedDict):
    """The loss of a step is far above the losses before it (`worker.spikes`). Training goes on."""

    kind: Literal["spiked"]
    step: int
    loss: float
    median: float
    """The median of the losses before; nats per token, like the loss."""
    time: NotRequired[float]


class Failed(TypedDict):
    """An attempt failed. The driver sends this record."""

    kind: Literal["failed"]
    step: int
    """The last step that finished."""
    failure: str
    """The kind of failure (`driver.attempts.Kind`)."""
    what: str
    ranks: list[int]
    """Where it happened, as far as known."""
    goes_on: bool
    """Whether another attempt follows, from the step `saved`; otherwise `reason` may say why none does."""
    saved: int
    reason: str
    time: NotRequired[float]


Record = Failed | Grows | Slow | Spiked | Place | Step | Validation | Resumed | Tried | Settled | Listed | Drifted | Saved
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")], config=ConfigDict(strict=True))
_FINITE = ("loss", "lr", "tokens_per_s", "step_time_s")
_LONGEST_LINE = 1 << 28


class History:
    """The records of a run by step. Records of steps that ran again replace the earlier ones."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.steps: dict[int, Step] = {}
        self.validations: dict[int, Validation] = {}
        self.checkpoints: dict[int, Saved] = {}
        self.resumes: list[int] = []
        self.tried: list[Tried] = []
        """Trials in order; a new search clears the trials of an earlier one."""
        self.settled: dict[int, Settled] = {}
        """The chosen order by degree; the newest counts."""
        self.listed: dict[int, Listed] = {}
        """The found lists by degree; the newest count."""
        self.drifts: list[Drifted] = []
        self.failures: list[Failed] = []
        """The failed attempts, in order."""
        self.grown: list[int] = []
        """The steps after which training went on with more workers."""
        self.spikes: dict[int, Spiked] = {}
        """Losses that stood out, by step."""
        self.slow: dict[int, Slow] = {}
        """Ranks that the others wait for."""
        self.imbalance: dict[int, np.ndarray] = {}
        """By step: the load of the busiest expert over the mean load, for every MoE layer."""
        self.entropy: dict[int, np.ndarray] = {}
        """By step: the entropy of the load over ln(experts), for every MoE layer."""
        self.unused: dict[int, tuple[int, int]] = {}
        """By step: the number of dead and of starved experts over the `LOAD_WINDOW` steps up to this one."""
        self.course, self.speed = Course(), Speed()
        self._loads: deque[tuple[int, np.ndarray]] = deque(maxlen=LOAD_WINDOW)

    @classmethod
    def read(cls, path: Path) -> History:
        """Read the history in a `metrics.jsonl`, and skip lines that a crash cut off.

        Raises:
            ValueError: a line is JSON, but not a record.
        """
        history = cls()
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
            known = {key: 0.0 if value is None and key in _FINITE else value for key, value in record.items()}
            _RECORD.validate_python(known)
            self.receive(record)
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError):
            raise ValueError(f"line {number} is not a record of a run") from None

    def receive(self, record: Record) -> None:
        """Add a record to the history."""
        self.speed.receive(record)
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
        elif record["kind"] == "listed":
            self.listed[record["degree"]] = record
        elif record["kind"] == "drifted":
            self.drifts.append(record)
        elif record["kind"] == "failed":
            self.failures.append(record)
            self.places.clear()  # the next attempt may have fewer ranks
            self.slow.clear()
        elif record["kind"] == "grows":
            self.grown.append(record["step"])
            self.places.clear()
            self.slow.clear()
        elif record["kind"] == "spiked":
            self.spikes[record["step"]] = record
        elif record["kind"] == "slow":
            self.slow.pop(record["rank"], None)
            if record["goes_on"]:
                self.slow[record["rank"]] = record
        else:
            self.resumes.append(record["step"])
            self._rewind(record["step"])

    @property
    def last_step(self) -> int:
        return next(reversed(self.steps), 0)  # the dict has the steps in order

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

    def _take_step(self, record: Step) -> None:
        step, load = record["step"], np.asarray(record["load"] or [], dtype=np.int64)
        if step <= self.last_step:  # an attempt that starts at step 0 sends no "resumed" record
            self._rewind(step - 1)
        # With many experts, the loads of all steps would fill the driver's memory. metrics.jsonl has them.
        self.steps[step] = {**record, "load": None, "by_layer": None}
        if load.size:
            self._take_load(step, load)

    def _take_load(self, step: int, load: np.ndarray) -> None:
        if load.ndim != 2 or load.min() < 0 or (self._loads and load.shape != self._loads[-1][1].shape):
            raise ValueError(f"step {step} has loads of another shape, or negative ones")
        self._loads.append((step, load))
        self.imbalance[step] = max_over_mean(load).astype(np.float32)
        self.entropy[step] = entropy(load).astype(np.float32)
        dead_M, starved_M = unused(np.sum([each for _, each in self._loads], axis=0))
        self.unused[step] = int(dead_M.sum()), int(starved_M.sum())
        self.course.add(step, load)

    def _rewind(self, step: int) -> None:
        by_steps: tuple[dict[int, Any], ...] = (
            self.steps, self.validations, self.checkpoints, self.imbalance, self.entropy, self.unused, self.spikes,
        )  # fmt: skip
        for by_step in by_steps:
            for later in [key for key in by_step if key > step]:
                del by_step[later]
        earlier = [(at, load) for at, load in self._loads if at <= step]
        self._loads.clear()
        self._loads.extend(earlier)
        self.course.rewind(step)


def reported(step: Step, validation: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics `REPORTED` of a checkpoint after this step. An older validation is not among them.

    Args:
        validation: the newest `Validation`; empty before the first one.
    """
    values: Mapping[str, Any] = {**step, "learning_rate": step["lr"]}
    if validation.get("step") == step["step"]:
        values = {**values, **{name: validation[name.rpartition("/")[2]] for name in VALIDATED}}
    return {name: values[name] for name in REPORTED if name in values}


def averaged(parts: Sequence[Measured], weights: Sequence[int]) -> Measured:
    """Return the loss and the bits per byte of a text whose tokens come from sources in the ratio of weights.

    Losses are means over tokens, and so is the number of bytes that a token stands for. So bits per byte are not averaged
    themselves.
    """
    if len(parts) == 1:
        return parts[0]
    losses, bits = ([number(part[key]) for part in parts] for key in ("loss", "bits_per_byte"))  # type: ignore[literal-required]
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    lengths = sum(loss / each * weight for loss, each, weight in zip(losses, bits, weights, strict=True))
    known = all(part["bits_per_byte"] is not None for part in parts)
    sequences = sum(part["sequences"] for part in parts)
    return {"loss": loss / sum(weights), "bits_per_byte": loss / lengths if known else None, "sequences": sequences}


def number(value: float | None) -> float:
    """Return a record's value as a number to draw or to compare. None becomes NaN, because files say null for NaN."""
    return math.nan if value is None else float(value)


def as_json(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON. Infinite numbers and NaN become null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
