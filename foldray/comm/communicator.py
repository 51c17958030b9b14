"""Ranks that exchange one class of traffic, and the count of what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.futures import Future

# torch 2.13 renamed these two and warns at the old names; torch 2.11 has the old ones only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Count:
    """What one rank sent: calls, and bytes to ranks of its own node and of other nodes."""

    calls: int = 0
    inside_bytes: int = 0
    across_bytes: int = 0


@dataclass(frozen=True)
class Traffic:
    """Everything one rank sent, by class of traffic and operation.

    All-to-alls and sends are counted pair by pair. An all-reduce, all-gather or reduce-scatter is counted as a ring: each rank
    sends its share, (n − 1)/n of the whole (twice for an all-reduce), to the next member. What a rank keeps is not counted,
    nor which way a backend takes: over gloo, an all-gather's bytes go straight to every member.
    """

    counts: dict[tuple[str, str], Count] = field(default_factory=dict)

    def add(self, name: str, operation: str, inside: int, across: int) -> None:
        count = self.counts.setdefault((name, operation), Count())
        count.calls += 1
        count.inside_bytes += inside
        count.across_bytes += across

    def by_name(self) -> dict[str, Count]:
        """All operations of a class of traffic together."""
        found: dict[str, Count] = {}
        for (name, _), count in self.counts.items():
            total = found.setdefault(name, Count())
            total.calls += count.calls
            total.inside_bytes += count.inside_bytes
            total.across_bytes += count.across_bytes
        return found

    def clear(self) -> None:
        self.counts.clear()


class Pending:
    """Tensors on their way; `wait` returns them."""

    def __init__(self, works: Iterable[dist.Work], tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor] = ()):
        self._works: list[Any] = list(works)  # work, or a future
        self._tensors, self._kept = tuple(tensors), tuple(kept)

    def when_done(self, call: Callable[[], None]) -> list[Future]:
        """Call whenever a part has arrived, last of all when everything has, from whichever thread finds out.

        Returns what is done when the calls are; nothing, after one call, if nothing is on its way.
        """
        if not self._works:
            call()
        try:
            return [work.get_future().then(lambda _: call()) for work in self._works]
        except RuntimeError:  # gloo's sends and receives tell nobody but who waits for them, and him once
            self._works = [_watched(self._works, call)]
            return list(self._works)

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept = ()  # what is being sent must live until here
        return self._tensors


def _watched(works: Sequence[dist.Work], call: Callable[[], None]) -> Future:
    """Wait for all in a thread of its own, and call; done when that is."""
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
    """Ranks that exchange one class of traffic.

    Args:
        name: what travels.
        ranks: members, in the order of the fold's table.
        index: this process's place among them.
        group: None for a single member, which needs no network.
        nodes: the node of each member; empty when all share one.
        traffic: where what is sent is counted.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    nodes: tuple[int, ...] = ()
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: torch.Tensor, reduction: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Sum or largest over the members, in place."""
        return self.start_all_reduce(x, reduction).wait()[0]

    def start_all_reduce(self, x: torch.Tensor, reduction: Literal["sum", "max"] = "sum") -> Pending:
        """`all_reduce` on its way."""
        if self.group is None:
            return Pending([], (x,))
        self._count_ring("all_reduce", 2 * _bytes(x) * (self.size - 1) // self.size)
        work = dist.all_reduce(x, _REDUCTIONS[reduction], group=self.group, async_op=True)
        return Pending([work], (x,))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every member's x, one after another along the first axis: [n, …] → [size · n, …]."""
        return self.start_all_gather(x).wait()[0]

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        """`all_gather` on its way."""
        if self.group is None:
            return Pending([], (x,))
        self._count_ring("all_gather", _bytes(x) * (self.size - 1))
        out, x = x.new_empty((self.size * x.shape[0], *x.shape[1:])), x.contiguous()
        if self._sends_first:
            return self._message_by_message(out, out.view(self.size, *x.shape).unbind(), [x] * self.size)
        return Pending([_all_gather(out, x, group=self.group, async_op=True)], (out,), (x,))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This member's part of the sum over all, parts along the first axis: [size · n, …] → [n, …]."""
        if self.group is None:
            return x
        return self.start_reduce_scatter(x, x.new_empty((x.shape[0] // self.size, *x.shape[1:]))).wait()[0]

    def start_reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> Pending:
        """`reduce_scatter` into `out`, on its way; there is more than one member."""
        self._count_ring("reduce_scatter", _bytes(x) * (self.size - 1) // self.size)
        x = x.contiguous()
        return Pending([_reduce_scatter(out, x, group=self.group, async_op=True)], (out,), (x,))

    def all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Send `sent[i]` leading rows of x to member i and return the rows that came, member by member.

        Shapes: x [Σ sent, …] → [Σ received, …].
        """
        return self.start_all_to_all(x, received, sent).wait()[0]

    def start_all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """`all_to_all` on its way."""
        if self.group is None:
            return Pending([], (x,))
        row = _bytes(x) // max(1, x.shape[0])
        self._count("all_to_all", {member: rows * row for member, rows in enumerate(sent)})
        out, x = x.new_empty((sum(received), *x.shape[1:])), x.contiguous()
        if self._sends_first:
            return self._message_by_message(out, out.split(list(received)), x.split(list(sent)))
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=self.group, async_op=True)
        return Pending([work], (out,), (x,))

    @property
    def _sends_first(self) -> bool:
        """Gloo does, and what a rank asks for then stands behind what it gives, on the same connection: large
        messages of all-to-alls and all-gathers go one way after the other, at half the speed of the link.
        """
        return dist.get_backend(self.group) == "gloo"

    def _message_by_message(self, out: torch.Tensor, here: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> Pending:
        """Receives, then sends.

        Args:
            out: of which `here` is, member by member, what comes.
            there: member by member, what goes.
        """
        here[self.index].copy_(there[self.index].detach())
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        messages = [dist.P2POp(dist.irecv, here[i], self.ranks[i], self.group) for i in others if here[i].numel()]
        messages += [dist.P2POp(dist.isend, there[i], self.ranks[i], self.group) for i in others if there[i].numel()]
        return Pending(dist.batch_isend_irecv(messages) if messages else [], (out,), there)

    def shift(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """Start to send tensors to the ring's next member and to receive as many, of the same shapes, from the one before."""
        if self.group is None:
            return Pending([], tensors)
        here = [tensor.contiguous() for tensor in tensors]
        there = [torch.empty_like(tensor) for tensor in here]
        to, source = self.ranks[(self.index + 1) % self.size], self.ranks[self.index - 1]
        self._count("shift", {(self.index + 1) % self.size: sum(map(_bytes, here))})
        # Receives first: see `_sends_first`.
        operations = [dist.P2POp(dist.irecv, tensor, source, self.group) for tensor in there]
        operations += [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in here]
        return Pending(dist.batch_isend_irecv(operations), there, here)

    def send(self, x: torch.Tensor, member: int) -> Pending:
        """Start to send x to a member."""
        assert self.group is not None, f"{self.name} has one member only"
        self._count("send", {member: _bytes(x)})
        x = x.contiguous()
        work = dist.isend(x, self.ranks[member], self.group)
        assert work is not None
        return Pending([work], (), (x,))

    def receive(self, into: torch.Tensor, member: int) -> Pending:
        """Start to receive into a tensor what a member sends; `wait` returns it."""
        assert self.group is not None, f"{self.name} has one member only"
        work = dist.irecv(into, self.ranks[member], self.group)
        assert work is not None
        return Pending([work], (into,))

    def _count_ring(self, operation: str, sent: int) -> None:
        self._count(operation, {(self.index + 1) % self.size: sent})

    def _count(self, operation: str, sent: dict[int, int]) -> None:
        """Count bytes by the member they go to; what stays here is not counted."""
        sides = [0, 0]
        for member, count in sent.items():
            if member != self.index:
                sides[bool(self.nodes) and self.nodes[member] != self.nodes[self.index]] += count
        self.traffic.add(self.name, operation, *sides)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
