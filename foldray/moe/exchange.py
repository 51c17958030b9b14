"""The exchange of ranks that own both tokens and experts: all-to-alls over EP, and how rows are written for the wire.

Rows may travel in fewer bytes than they are computed in:

| `moe.wire` | rows to experts | rows back from experts | a number is off by at most |
|---|---|---|---|
| `bfloat16` | bfloat16 | bfloat16 | 1/256 of it |
| `float8` | float8 (e4m3), with a scale for each 128 numbers | bfloat16 | 1/16 of it, or 1/458752 of the largest of its 128 |

So it is for activations forward and for gradients backward: what goes out has one format, and what comes back the other, because
rows that come back are summed (DeepSeek-V3's report, section 3.3.3). In float8, NaN or infinity makes all numbers with its scale
NaN.

Legend: N rows, H hidden, G = ⌈H / 128⌉ groups of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from foldray.comm import Groups, Pending, used_here
from foldray.kernels.transfer import read_later, start_reading
from foldray.moe.contracts import Received, RowCounts, Rows, Sent

GROUP = 128
"""Numbers of a row that share a scale."""
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_TINY = torch.finfo(torch.float32).tiny


Read = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Narrow:
    """Rows in a narrower type."""

    dtype: torch.dtype
    floor: float = 0.0

    @property
    def error(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    def write(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x_NH.to(self.dtype),)

    def read(self, written: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return written[0].to(dtype)


@dataclass(frozen=True)
class Scaled:
    """Rows in float8 [N, H], as bytes, and the scales of their groups [N, G]. The largest number of a group is the largest one of
    the type."""

    error: float = torch.finfo(_FLOAT8).eps / 2
    floor: float = torch.finfo(_FLOAT8).smallest_normal * torch.finfo(_FLOAT8).eps / 2 / _LARGEST

    def write(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups_NGg = _grouped(x_NH.to(torch.float32, copy=True))
        # Communication libraries know no float8, so bytes travel. The smallest scale keeps a group of zeros from 0 / 0. A GPU
        # takes a division by a number as this product, whose last bit may differ.
        scale_NG = (torch.linalg.vector_norm(groups_NGg, torch.inf, 2) * (1 / _LARGEST)).clamp_min(_TINY)
        small_NH = groups_NGg.div_(scale_NG[..., None]).flatten(1)[:, : x_NH.shape[1]]
        return small_NH.to(_FLOAT8).view(torch.uint8), scale_NG

    def read(self, written: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        bytes_NH, scale_NG = written
        groups_NGg = _grouped(bytes_NH.view(_FLOAT8).float()).mul_(scale_NG[..., None])
        return groups_NGg.flatten(1)[:, : bytes_NH.shape[1]].to(dtype)


Format = Narrow | Scaled
"""A way to write rows: `write` makes tensors with N rows of them, and `read` the rows again.

`error` is the largest error of a number as a share of it; `floor` that of a number near zero, as a share of the largest one with
the same scale (0 without scales).
"""


@dataclass(frozen=True)
class Wire:
    """The formats of rows to experts, and of rows back."""

    out: Format
    back: Format


_BACK = Narrow(torch.bfloat16)
WIRES: Mapping[str, Wire] = MappingProxyType({"bfloat16": Wire(_BACK, _BACK), "float8": Wire(Scaled(), _BACK)})


def _grouped(x_NH: torch.Tensor) -> torch.Tensor:
    """Cut rows into groups; zeros fill the last one: [N, G, 128]."""
    missing = -x_NH.shape[1] % GROUP
    return (F.pad(x_NH, (0, missing)) if missing else x_NH).unflatten(1, (-1, GROUP))


def write(rows: Sequence[torch.Tensor], form: Format | None) -> tuple[list[torch.Tensor], Read]:
    """Write rows in a format (None leaves them as they are), and what is beside them.

    Each message takes time to start. So what is beside the rows travels side by side in one tensor, as bytes.

    Returns:
        What travels, and what makes tensors like `rows` of it where it has arrived. The latter keeps no tensor.
    """
    first, *scales = rows[:1] if form is None else form.write(rows[0])
    beside = [*scales, *rows[1:]]
    columns = [(x.dtype, x.shape[1]) for x in beside] if len(beside) > 1 else []
    if columns:
        beside = [torch.cat([x.contiguous().view(torch.uint8) for x in beside], 1)]
    return [first, *beside], partial(_read, form=form, dtype=rows[0].dtype, scales=len(scales), columns=columns)


def _read(
    tensors: Sequence[torch.Tensor], form: Format | None, dtype: torch.dtype, scales: int, columns: list[tuple[torch.dtype, int]]
) -> list[torch.Tensor]:
    first, *beside = tensors
    if columns:
        parts = beside[0].split([kind.itemsize * width for kind, width in columns], 1)
        # A single row counts as contiguous whatever its stride is, and only a copy has the stride of other types.
        copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        beside = [copy.view(kind) for copy, (kind, _) in zip(copies, columns, strict=True)]
    return [first if form is None else form.read((first, *beside[:scales]), dtype), *beside[scales:]]


class AllToAll:
    """Rows travel in all-to-all-vs over EP, or between nodes. Row counts travel in an all-gather over ETP×EP, on another
    communicator. A dispatch whose counts are still on their way waits in the queue of the tokens' communicator, while the caller
    goes on. On a GPU, counts go on to the host on a stream of their own, beside what is computed.

    A rank that has all experts needs no counts to send rows, so they stay on the device until somebody asks for them.
    """

    def __init__(self, groups: Groups, wire: Wire | None = None):
        self.tokens, self.counts = groups.tokens, groups.counts
        wire = wire if self.tokens.size > 1 else None
        self._out, self._back = wire.out if wire else None, wire.back if wire else None
        self._slices, self._queue = groups.expert_slices, groups.tokens_queue
        self._stream: torch.cuda.Stream | None = None
        self._fold, grid = groups.fold, groups.fold.moe
        places = [grid.coordinate(rank) for rank in self.counts.ranks]
        self._member = {(place["etp"], place["ep"]): member for member, place in enumerate(places)}
        self._here = grid.coordinate(groups.rank)["ep"]

    def start_counts(self, sent: Sent) -> Received:
        coming, experts, stays = self.counts.start_all_gather(sent.counts), len(sent.rows_E), self._stays(sent)
        reading = read_later(sent.counts) if stays else self._start_reading(coming) if sent.rows_E.is_cuda else None
        ends = partial(self._ends, experts)
        return Received(coming, partial(self._arrange, experts), self._slices.index, reading, ends, stays)

    def _stays(self, sent: Sent) -> bool:
        """Whether a dispatch sends nothing. Rows for ranks have room, and only their counts say how many there are."""
        return self.counts.size == 1 and sent.rows_R is None

    def _start_reading(self, coming: Pending) -> Callable[[], list[int]]:
        stream = self._stream_after(*coming.tensors)
        (rows,) = coming.use_on(stream)
        with torch.cuda.stream(stream):
            return start_reading(rows)

    def _ends(self, experts: int, counts: torch.Tensor) -> torch.Tensor:
        """Return where the rows of each expert of this rank end, from what all members have sent of their rows."""
        local = experts // self._fold.ep
        own_ME = counts.view(self.counts.size, -1)[:, self._here * local : (self._here + 1) * local]
        rows_E = own_ME[0] if len(own_ME) == 1 else own_ME.sum(0)
        return rows_E.cumsum(0, dtype=torch.int32)

    def _stream_after(self, counts: torch.Tensor) -> torch.cuda.Stream:
        """Return a stream of a GPU beside the current one, which waits until the counts are known."""
        self._stream = self._stream or torch.cuda.Stream(counts.device)
        self._stream.wait_stream(torch.cuda.current_stream(counts.device))
        return self._stream

    def equal_counts(self, sent: Sent) -> Received:
        assert sent.known_E is not None, "the host does not know how many rows leave"
        return Received.of(self._arrange(len(sent.known_E), sent.known_E * self.counts.size), self._slices.index)

    def _arrange(self, experts: int, numbers: list[int]) -> RowCounts:
        ranks, inside, slices = self._fold.ep, self._fold.ep_inside, range(self._slices.size)
        counts, mine, here = _ExchangedCounts(numbers, self._member, experts, ranks), self._slices.index, self._here
        if inside == 1:
            return RowCounts(
                [[counts.of_experts(x, rank, here) for rank in range(ranks)] for x in slices],
                [counts.to_rank(mine, here, to) for to in range(ranks)],
                [[counts.to_rank(x, rank, here) for rank in range(ranks)] for x in slices],
            )
        node, place = divmod(here, inside)
        # A rank passes on the rows of all ranks with its place on their nodes.
        passed = [range(first, ranks, inside) for first in range(inside)]
        within = RowCounts(
            [[_sum_all(counts.of_experts(x, rank, here) for rank in of) for of in passed] for x in slices],
            [sum(counts.to_rank(mine, rank, node * inside + to) for rank in passed[place]) for to in range(inside)],
            [[sum(counts.to_rank(x, rank, here) for rank in of) for of in passed] for x in slices],
        )
        leaving = [counts.to_node(mine, here, to) for to in range(self._fold.ep_across)]
        arriving = [[counts.to_node(x, rank, node) for rank in passed[place]] for x in slices]
        return RowCounts(within.rows_XRE, leaving, arriving, within)

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        def send(x: torch.Tensor) -> Pending:
            if received.stays:
                return Pending([], (x,))
            leaving = received.leaving_by_rank
            return self.tokens.start_all_to_all(x[: sum(leaving)], received.rows_by_rank, leaving)

        return self._start(Pending([], rows), self._out, send, received.are_here, sent.rows_E.device)

    def start_back(self, rows: Pending, sent: Sent, received: Received, room: int | None = None) -> Pending:
        def send(x: torch.Tensor) -> Pending:
            if received.stays:
                return Pending([], (x,))
            return self.tokens.start_all_to_all(x, received.leaving_by_rank, received.rows_by_rank, room)

        return self._start(rows, self._back, send, True, sent.rows_E.device)

    def _start(
        self, rows: Pending, form: Format | None, send: Callable[[torch.Tensor], Pending], ready: bool, device: torch.device
    ) -> Pending:
        written = None if rows.is_running else write(rows.wait(), form)

        def begin() -> Pending:
            travels, read = written or write(used_here(rows.wait()), form)
            return Pending.of(map(send, travels)).then(read)

        return self._queue.start(begin, ready and written is not None, device)


class _ExchangedCounts(NamedTuple):
    """What all members of a group have sent of their rows: `Sent.counts`, one after another. A member's number is that of its
    places in its ETP group and in its EP group.
    """

    numbers: list[int]
    member: Mapping[tuple[int, int], int]
    experts: int
    ranks: int

    def of_experts(self, x: int, rank: int, of: int) -> list[int]:
        """Return the rows that a rank has for each expert of an EP rank."""
        local = self.experts // self.ranks
        return self.numbers[(first := self._first(x, rank) + of * local) : first + local]

    def to_rank(self, x: int, rank: int, to: int) -> int:
        """Return the number of rows that a rank sends to an EP rank, or that others pass on to it."""
        if self._length == self.experts:
            return sum(self.of_experts(x, rank, to))
        return self.numbers[self._first(x, rank) + self.experts + to]

    def to_node(self, x: int, rank: int, node: int) -> int:
        """Return the number of rows that a rank sends to a node."""
        return self.numbers[self._first(x, rank) + self.experts + self.ranks + node]

    @property
    def _length(self) -> int:
        return len(self.numbers) // len(self.member)

    def _first(self, x: int, rank: int) -> int:
        return self.member[x, rank] * self._length


def _sum_all(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*rows, strict=True)]
