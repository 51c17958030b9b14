"""Communicators: collectives among ranks for one class of traffic, and counts of the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Thread
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from foldray.comm.activity import Activity

# torch 2.13 renamed these two and warns at the old names; torch 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Count:
    """Calls of one rank, and bytes that it sent to ranks of its own node and of other nodes."""

    calls: int = 0
    inside_bytes: int = 0
    across_bytes: int = 0

    def add(self, calls: int, inside: int, across: int) -> None:
        self.calls += calls
        self.inside_bytes += inside
        self.across_bytes += across


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes that one rank sent, by class of traffic and operation.

    All-to-alls and sends are counted pair by pair. An all-reduce, all-gather or reduce-scatter is counted as a ring: each
    rank sends its share, (n − 1)/n of the whole tensor (twice for an all-reduce), to the next member. Data that stay on a
    rank are not counted. The count does not follow the route of a backend: gloo sends an all-gather's bytes straight to
    every member.
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def add(self, name: str, operation: str, inside: int, across: int) -> None:
        self.counts.setdefault((name, operation), Count()).add(1, inside, across)

    def by_name(self) -> dict[str, Count]:
        """Sum up all operations of each class of traffic."""
        totals: dict[str, Count] = {}
        for (name, _), count in self.counts.items():
            totals.setdefault(name, Count()).add(count.calls, count.inside_bytes, count.across_bytes)
        return totals

    def clear(self) -> None:
        self.counts.clear()


class Pending:
    """Tensors of an operation that is still running; `wait` returns them. Sent tensors (`kept`) live until then."""

    def __init__(
        self,
        works: Iterable[dist.Work],
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor] = (),
        name: str = "",
        activity: Activity | None = None,
        began: float | None = None,
    ):
        self._works: list[Any] = list(works)  # work, or a future
        self._tensors, self._kept = tuple(tensors), tuple(kept)
        self._name, self._activity = name, activity
        self._after: Callable[[tuple[Tensor, ...]], Sequence[Tensor]] | None = None
        self._began = perf_counter() if began is None else began

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that travel, whose data may not have arrived."""
        return self._tensors

    @property
    def began(self) -> float:
        """When the operation started, in seconds of `time.perf_counter`."""
        return self._began

    @property
    def is_running(self) -> bool:
        """Whether `wait` has something to wait for. It may be over already."""
        return bool(self._works)

    @property
    def is_over(self) -> bool:
        """Whether all operations are over. On a GPU, neither the host nor what is computed waits, as it would in `wait`."""
        return all(work.done() if isinstance(work, Future) else work.is_completed() for work in self._works)

    def when_done(self, call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> Sequence[Future]:
        """Call a function whenever a part of the tensors has arrived, the last time when all have.

        Any thread may make the call. If no operation is running, the function is called once, at once. The returned futures are
        done when the calls have returned; without one, there is no need to wait.

        Args:
            stream: a stream of a GPU. The function is then called at once, but what it puts on the stream runs when all
                tensors have arrived. On a GPU, works tell the host only that they are in a queue.
        """
        if stream is not None:
            self.use_on(stream)
            with torch.cuda.stream(stream):
                call()
            return []
        if not self._works:
            call()
        try:
            return [work.get_future().then(lambda _: call()) for work in self._works]
        except RuntimeError:  # gloo's sends and receives have no futures, and can be waited for only once
            self._works = [_watched(self._works, call)]
            return list(self._works)

    def use_on(self, stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
        """Return the tensors for use on a stream of a GPU, which waits for them. The host does not, nor do other streams."""
        with torch.cuda.stream(stream):
            for work in self._works:
                work.wait()
        return self._tensors

    def then(self, read: Callable[[tuple[Tensor, ...]], Sequence[Tensor]]) -> Pending:
        """Let `wait` return what a function makes of the tensors. It is called once, by the thread that waits."""
        self._after = read
        return self

    @classmethod
    def of(cls, parts: Iterable[Pending]) -> Pending:
        """Return several running operations as one. The parts must not be waited for any more, nor have a `then`."""
        parts = list(parts)
        works = [work for part in parts for work in part._works]
        kept = [tensor for part in parts for tensor in part._kept]
        name, activity = (parts[0]._name, parts[0]._activity) if parts else ("", None)
        return cls(works, [tensor for part in parts for tensor in part._tensors], kept, name, activity)

    def wait(self) -> tuple[Tensor, ...]:
        if self._works:
            with self._activity.waiting(self._name) if self._activity else nullcontext():
                for work in self._works:
                    work.wait()
        self._works.clear()
        self._kept = ()
        if self._after is not None:
            read, self._after = self._after, None
            self._tensors = tuple(read(used_here(self._tensors)))
        return self._tensors

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors that are sent, until somebody has waited."""
        return self._kept


def used_here(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors. Their memory is not reused before the current stream of a GPU has used them."""
    tensors = tuple(tensors)
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


def _watched(works: Sequence[dist.Work], call: Callable[[], None]) -> Future:
    """Wait for all works in a new thread, then call a function. The future is done when the call has returned."""
    done: Future = Future()

    def watch() -> None:
        try:
            for work in works:
                work.wait()
            call()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    Thread(target=watch, daemon=True).start()
    return done


@dataclass(frozen=True)
class Communicator:
    """Collectives among ranks that exchange one class of traffic.

    Members are in the order of the fold's table. A single member needs no network, and has no process group. `nodes` is empty if
    all members share a node.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    nodes: tuple[int, ...] = ()
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    activity: Activity = field(default_factory=Activity, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor, reduction: Literal["sum", "max"] = "sum") -> Tensor:
        """Replace x by the sum or the maximum over the members."""
        return self.start_all_reduce(x, reduction).wait()[0]

    def start_all_reduce(self, x: Tensor, reduction: Literal["sum", "max"] = "sum") -> Pending:
        if self.group is None:
            return Pending([], (x,))
        self._count_ring("all_reduce", 2 * _bytes(x) * (self.size - 1) // self.size)
        work = dist.all_reduce(x, _REDUCTIONS[reduction], group=self.group, async_op=True)
        return self._pending("all-reduce", [work], (x,))

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather every member's x, one after another along the first axis: [n, …] → [size · n, …]."""
        return self.start_all_gather(x).wait()[0]

    def start_all_gather(self, x: Tensor) -> Pending:
        if self.group is None:
            return Pending([], (x,))
        self._count_ring("all_gather", _bytes(x) * (self.size - 1))
        out, x = x.new_empty((self.size * x.shape[0], *x.shape[1:])), x.contiguous()
        if self._sends_first:
            return self._message_by_message("all-gather", out, out.view(self.size, *x.shape).unbind(), [x] * self.size)
        return self._pending("all-gather", [_all_gather(out, x, group=self.group, async_op=True)], (out,), (x,))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every member's value. Its bytes are not counted."""
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this member's part of the sum over all members. Parts lie along the first axis: [size · n, …] → [n, …]."""
        if self.group is None:
            return x
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        x = x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else x
        return self.start_reduce_scatter(x, out).wait()[0]

    def start_reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        """Start `reduce_scatter` into `out`. The communicator must have more than one member. On a CPU, x is overwritten."""
        self._count_ring("reduce_scatter", _bytes(x) * (self.size - 1) // self.size)
        x = x.contiguous()
        if x.device.type == "cpu":  # gloo's own operation is this one on a copy of x
            works = [dist.all_reduce(x, group=self.group, async_op=True)]
            own = x.view(self.size, *out.shape)[self.index]
            return self._pending("reduce-scatter", works, (own,)).then(lambda summed: (out.copy_(summed[0]),))
        work = _reduce_scatter(out, x, group=self.group, async_op=True)
        return self._pending("reduce-scatter", [work], (out,), (x,))

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Send rows to every member, and return the rows that every member sent here: [Σ sent, …] → [Σ received, …].

        Rows are sorted by the member that they go to, and by the one that they come from.
        """
        return self.start_all_to_all(x, received, sent).wait()[0]

    def start_all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], room: int | None = None) -> Pending:
        """Start `all_to_all` into a tensor with `room` for rows (None: for the received ones alone). Further rows are zero."""
        rows = sum(received)
        if self.group is None:
            return Pending([], (x if room in (None, rows) else torch.cat([x, x.new_zeros((room - rows, *x.shape[1:]))]),))
        row = _bytes(x) // max(1, x.shape[0])
        self._count("all_to_all", {member: rows * row for member, rows in enumerate(sent)})
        whole, x = x.new_empty((rows if room is None else room, *x.shape[1:])), x.contiguous()
        if room is not None:
            whole[rows:] = 0
        out = whole[:rows]
        if self._sends_first:
            return self._message_by_message("all-to-all", whole, out.split(list(received)), x.split(list(sent)))
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=self.group, async_op=True)
        return self._pending("all-to-all", [work], (whole,), (x,))

    @property
    def _sends_first(self) -> bool:
        """Whether the backend's own all-to-all and all-gather send before they receive, as gloo's do.

        Both directions of a pair share a connection. If a rank sends first, its receive waits behind its send. Large
        messages then go one way after the other, at half the speed of the link.
        """
        return dist.get_backend(self.group) == "gloo"

    def _message_by_message(self, operation: str, out: Tensor, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        """Start an exchange of a message with each member; receives come before sends. The received ones are views of `out`."""
        received[self.index].copy_(sent[self.index].detach())
        members = [(self.index + step) % self.size for step in range(1, self.size)]
        into, out_of = ([(i, parts[i]) for i in members] for parts in (received, sent))
        return self._messages(operation, into, out_of, (out,))

    def _messages(
        self, operation: str, into: Iterable[tuple[int, Tensor]], sent: Iterable[tuple[int, Tensor]], result: Sequence[Tensor]
    ) -> Pending:
        """Start single messages; empty ones do not travel."""
        sent = [(member, tensor) for member, tensor in sent if tensor.numel()]
        messages = [dist.P2POp(dist.irecv, tensor, self.ranks[i], self.group) for i, tensor in into if tensor.numel()]
        messages += [dist.P2POp(dist.isend, tensor, self.ranks[i], self.group) for i, tensor in sent]
        works = dist.batch_isend_irecv(messages) if messages else []
        return self._pending(operation, works, result, [tensor for _, tensor in sent])

    def send_rows(self, tensors: Sequence[Tensor], to: Mapping[int, int]) -> Pending:
        """Start to send rows to some members (member → number of rows). They are sorted by member. Nobody else takes part."""
        parts = [tensor.contiguous().split(list(to.values())) for tensor in tensors] if to else []
        messages = [(member, part[i]) for i, member in enumerate(to) for part in parts]
        self._count("send_rows", {member: sum(_bytes(part[i]) for part in parts) for i, member in enumerate(to)})
        return self._messages("send of rows", [], messages, ())

    def receive_rows(self, tensors: Sequence[Tensor], of: Mapping[int, int]) -> Pending:
        """Start to receive, into tensors of the types and widths that are sent, what other members send with `send_rows`."""
        parts = [tensor.split(list(of.values())) for tensor in tensors] if of else []
        into = [(member, part[i]) for i, member in enumerate(of) for part in parts]
        return self._messages("receive of rows", into, [], tensors)

    def shift(self, tensors: Sequence[Tensor]) -> Pending:
        """Start to send tensors to the ring's next member, and to receive tensors of their shapes from the previous one."""
        if self.group is None:
            return Pending([], tensors)
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        to, source = self.ranks[(self.index + 1) % self.size], self.ranks[self.index - 1]
        self._count("shift", {(self.index + 1) % self.size: sum(map(_bytes, sent))})
        # `_sends_first` says why receives come before sends.
        operations = [dist.P2POp(dist.irecv, tensor, source, self.group) for tensor in received]
        operations += [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        return self._pending("shift", dist.batch_isend_irecv(operations), received, sent)

    def send(self, x: Tensor, member: int) -> Pending:
        """Start to send x to a member."""
        assert self.group is not None, f"{self.name} has only one member"
        self._count("send", {member: _bytes(x)})
        x = x.contiguous()
        work = dist.isend(x, self.ranks[member], self.group)
        assert work is not None
        return self._pending(f"send to rank {self.ranks[member]}", [work], (), (x,))

    def receive(self, into: Tensor, member: int) -> Pending:
        """Start to receive a tensor from a member; `wait` returns it."""
        assert self.group is not None, f"{self.name} has only one member"
        work = dist.irecv(into, self.ranks[member], self.group)
        assert work is not None
        return self._pending(f"receive from rank {self.ranks[member]}", [work], (into,))

    def _pending(
        self, operation: str, works: Iterable[dist.Work], tensors: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> Pending:
        self.activity.start(self.name)
        name = f"{operation} {self.activity.started[self.name]} of {self.name}"
        return Pending(works, tensors, kept, name, self.activity)

    def _count_ring(self, operation: str, sent: int) -> None:
        self._count(operation, {(self.index + 1) % self.size: sent})

    def _count(self, operation: str, sent: dict[int, int]) -> None:
        """Count bytes by the member that they go to, except bytes that stay on this rank."""
        sides = [0, 0]
        for member, count in sent.items():
            if member != self.index:
                sides[bool(self.nodes) and self.nodes[member] != self.nodes[self.index]] += count
        self.traffic.add(self.name, operation, *sides)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
