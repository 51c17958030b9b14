"""Records of a training.

Records are dicts, not classes of this package, so the queue that carries them (`mail.py`) need not import this package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, get_args, get_type_hints

from typing_extensions import TypedDict  # pydantic requires this one below Python 3.12

from trainers.telemetry.expert_health import Layers

VALIDATED = ("validation/loss", "validation/bits_per_byte")
"""What Ray gets with a checkpoint after a validation."""


class _Sent(TypedDict):
    time: NotRequired[float]
    """When it was sent, in seconds since 1970."""


class Place(_Sent):
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


class Step(_Sent):
    """One finished optimizer step; `step` counts from 1. Rank 0 sends this record and all records of the following kinds.

    It has all metrics (`metrics.METRICS`), and those of the recipe. Here are the ones that code reads by name.
    """

    kind: Literal["step"]
    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    step_time_s: float
    mtp_loss: NotRequired[float | None]
    skipped_steps: NotRequired[int]
    load: list[list[int]] | None
    """Tokens per MoE layer and global expert; None for a model without MoE layers. Files have it, and `by_layer`, for every n-th
    step of a large model."""
    by_layer: NotRequired[Layers | None]
    traffic: NotRequired[dict[str, dict[str, int]]]
    """The calls, inside_bytes and across_bytes of all ranks together, by class of traffic (`foldray.comm.Groups`)."""


class Measured(TypedDict):
    """The loss on the validation text of one source."""

    loss: float | None
    """Cross entropy, nats per token that counts; None if it is no number and comes from a file."""
    bits_per_byte: float | None
    """None for conversations."""
    sequences: int


class Validation(_Sent):
    """The loss on the validation text after `step` steps. With a mixture, this is the mean over sources, by their weights."""

    kind: Literal["validation"]
    step: int
    loss: float
    bits_per_byte: float | None
    """None if there are conversations."""
    sequences: int
    sources: NotRequired[dict[str, Measured]]
    """The sources of a mixture."""


class Resumed(_Sent):
    """Training continues from the state after `step` steps. Later records of an earlier attempt become invalid."""

    kind: Literal["resumed"]
    step: int


class Tried(_Sent):
    """An order and a size of gradient chunks that training tried in its first steps, or the choice among them."""

    kind: Literal["tried"]
    order: str | None
    """Short name of the order (`stream:4`); None if the recipe leaves the degree alone open."""
    degree: int
    sp_bytes: int | None
    """None if the recipe settles the size."""
    step_time_s: float
    """Median over the measured steps with this setting; in the record of the choice, over the steps of the run-off."""
    chosen: bool


class Settled(_Sent):
    """The order of the pieces of one degree, which training has chosen by the measured times of ops."""

    kind: Literal["settled"]
    degree: int
    forward: str
    backward: str
    """The overlap kind of each direction, with its lag if it has one: `stream:2`."""


class Listed(_Sent):
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


class Drifted(_Sent):
    """Steps take another time than was found, and have done so for long. Training measures anew."""

    kind: Literal["drifted"]
    step_time_s: float
    found_s: float


class Saved(_Sent):
    """A checkpoint of the state after `step` steps."""

    kind: Literal["checkpoint"]
    step: int
    path: str


class Beat(_Sent):
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
    may_take_s: NotRequired[float | None]
    """Seconds that the present work may take without a change; None is the usual limit."""
    ends: NotRequired[bool]
    """Whether this is the last sign of life of the rank's attempt."""


class Grows(_Sent):
    """The cluster has room for more workers, and they start again from the state after `step` steps. The driver sends this."""

    kind: Literal["grows"]
    step: int


class Slow(_Sent):
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


class Spiked(_Sent):
    """The loss of a step is far above the losses before it (`faults/guard.py`). Training goes on."""

    kind: Literal["spiked"]
    step: int
    loss: float
    median: float
    """The median of the losses before; nats per token, like the loss."""


class Placed(_Sent):
    """After a step, experts changed places between ranks, so that these get more even loads."""

    kind: Literal["placed"]
    step: int
    experts: int
    """Experts that changed places, in all blocks."""
    overload: float
    """Load of the fullest rank over the mean in the steps before, mean over the blocks."""
    expected: float
    """The same with the new places."""


class Failed(_Sent):
    """An attempt failed. The driver sends this record."""

    kind: Literal["failed"]
    step: int
    """The last step that finished."""
    failure: str
    """The kind of failure (`faults.attempts.FailureKind`)."""
    what: str
    ranks: list[int]
    """Where it happened, as far as known."""
    goes_on: bool
    """Whether another attempt follows, from the step `saved`; otherwise `reason` may say why none does."""
    saved: int
    reason: str


Record = (
    Failed | Grows | Slow | Spiked | Placed | Place | Step | Validation | Resumed | Tried | Settled | Listed | Drifted | Saved
)


KINDS = tuple(get_args(get_type_hints(kind)["kind"])[0] for kind in get_args(Record))


class Sink:
    """Where records go: a record goes to the method of its kind, `take_step` for one, if the sink has such a method."""

    def __init_subclass__(cls) -> None:
        if wrong := [name for name in vars(cls) if name.startswith("take_") and name.removeprefix("take_") not in KINDS]:
            raise TypeError(f"{cls.__name__}.{wrong[0]} takes no kind of record")

    def take(self, record: Record) -> None:
        if (takes := getattr(self, f"take_{record['kind']}", None)) is not None:
            takes(record)


def validated(step: int, validation: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what Ray gets of the newest validation, if it came after this step. It is empty before the first one."""
    return {name: validation[name.rpartition("/")[2]] for name in VALIDATED} if validation.get("step") == step else {}


def averaged(parts: Sequence[Measured], weights: Sequence[int]) -> Measured:
    """Return the loss and the bits per byte of a text whose tokens come from sources in the ratio of weights.

    Losses are means over tokens, and so is the number of bytes that a token stands for. So bits per byte are not averaged
    themselves.
    """
    if len(parts) == 1:
        return parts[0]
    losses, bits = ([number(part[key]) for part in parts] for key in ("loss", "bits_per_byte"))  # type: ignore[literal-required]
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    lengths = sum(loss / per_byte * weight for loss, per_byte, weight in zip(losses, bits, weights, strict=True))
    has_bits = all(part["bits_per_byte"] is not None for part in parts)
    sequences = sum(part["sequences"] for part in parts)
    return {"loss": loss / sum(weights), "bits_per_byte": loss / lengths if has_bits else None, "sequences": sequences}


def number(value: float | None) -> float:
    """Return a record's value as a number to draw or to compare. None becomes NaN, because files say null for NaN."""
    return math.nan if value is None else float(value)


def as_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a record as strict JSON, on one line without `indent`. Infinite numbers and NaN become null."""
    return json.dumps(_finite(record), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
