"""Two clocks: the host issues the kernels of a list, and the GPU runs them.

The host goes through a list in its order, and does not wait for the GPU, except for the row counts of a dispatch. So it gets
ahead in ops for which the GPU takes longer. Where it is not ahead, the GPU waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foldray.kinds import DISPATCH
from foldray.planner.lists import Piece
from foldray.planner.shares import Price
from foldray.schedule import COMPUTE, CompiledSchedule


class Issued(NamedTuple):
    """A list on both clocks.

    Args:
        starts, ends: start and end of each op on the GPU, by its number.
        host: when the host has issued the last op.
    """

    starts: list[float]
    ends: list[float]
    host: float


def two_clocks(compiled: CompiledSchedule[Piece], prices: Sequence[Price], issue: float, waits: bool, host: float) -> Issued:
    """Run the list of one position.

    Args:
        compiled: the list of one position; those of others are empty.
        prices: the price of every class.
        issue: seconds of the host for each of its calls.
        waits: whether the host waits for row counts.
        host: when the host begins; a negative moment if it is ahead of the GPU.
    """
    return _Run(compiled, prices, issue, waits, host).run()


class _Run:
    def __init__(self, compiled: CompiledSchedule[Piece], prices: Sequence[Price], issue: float, waits: bool, host: float):
        self.compiled, self.issue, self.waits, self.host = compiled, issue, waits, host
        self.prices = [prices[cost_class] for cost_class in compiled.class_of]
        self.starts, self.ends = [0.0] * len(compiled.ops), [0.0] * len(compiled.ops)
        self.free = 0.0  # when the GPU has done all that it has been given to compute
        self.lanes: dict[str, float] = {}
        self.channels: dict[int, float] = {}
        # Dispatches whose row counts the host does not know yet, and when the GPU has done what comes before them in the list.
        self.in_line: dict[int, float] = {}

    def run(self) -> Issued:
        for i in next(ops for ops in self.compiled.lists if ops):
            if self.compiled.channel_of[i] < 0:
                self._compute(i)
            elif self.waits and self._is_dispatch(i):
                self.in_line[i] = self.free
            else:
                self._travel(i, self.free)
        self._advance()
        return Issued(self.starts, self.ends, self.host)

    def _is_dispatch(self, i: int) -> bool:
        piece = self.compiled.classes[self.compiled.class_of[i]]
        return piece.kind == DISPATCH and not piece.back

    def _compute(self, i: int) -> None:
        needs = self.compiled.waits[i]
        if any(need in self.in_line for need in needs):
            self._advance()
        begin = max([self.free, self.host, *(self.ends[need] for need in needs)])
        self.host += self.prices[i].calls * self.issue
        self.free = max(self._use(i, begin), self.host)
        self.starts[i], self.ends[i] = begin, self.free
        self._advance()  # the host waits for row counts when it has given the GPU something to do

    def _advance(self) -> None:
        """Wait for the row counts of the dispatches in line, and start them."""
        in_line, self.in_line = self.in_line, {}
        for i, before in in_line.items():
            needs, number = self.compiled.graph.needs(self.compiled.ops[i]), self.compiled.number
            self.host = max([self.host, *(self.ends[number[op]] for op in needs if op in number)])
            self._travel(i, before)

    def _travel(self, i: int, before: float) -> None:
        """Put data in flight.

        Args:
            before: when the GPU has done what comes before it in the list.
        """
        if any(need in self.in_line for need in self.compiled.remote[i]):
            self._advance()
        channel = self.compiled.channel_of[i]
        needs = [self.ends[need] for need in self.compiled.remote[i]]
        self.starts[i] = max([before, self.host, self.channels.get(channel, 0.0), *needs])
        self.ends[i] = self.channels[channel] = self._use(i, self.starts[i])

    def _use(self, i: int, at: float) -> float:
        """Use an op's lanes one after another. Return when the last use ends."""
        for lane, seconds in self.prices[i].lanes:
            if lane != COMPUTE:
                at = max(at, self.lanes.get(lane, 0.0))
            at += seconds
            if lane != COMPUTE:
                self.lanes[lane] = at
        return at
