"""Generators of the order of computation inside a stage. Each is a few lines that read like its figure.

A generator takes its ops from a `Run`: some blocks that a group of micro-batches passes without draining. A run goes step by step
through the pieces of attention, block by block. With `attend` comes what a step computes: attention, then the routers of the MoE
micro-batches that it completes. With `experts` come the experts of micro-batches that were routed up to some step. What else
is needed (embeddings, weighted sums of the block before) comes by itself, as late as it can.

In the figures A is attention with routers, E experts, M the weighted sum, for one block in four pieces. A backward order is the
mirror of a forward one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, ROUTE
from foldray.schedule.op import Op
from foldray.schedule.step_graph import StepGraph


def all_attention_first(run: Run, lag: int) -> Iterator[Op]:
    """A0 A1 A2 A3 E0 E1 E2 E3 M0 M1 M2 M3."""
    for step in run.steps:
        yield from run.attend(step)
    yield from run.end()


def experts_one_behind(run: Run, lag: int) -> Iterator[Op]:
    """A0 A1 E0 A2 E1 A3 E2 E3 M0 M1 M2 M3."""
    for step in run.steps:
        yield from run.attend(step)
        yield from run.experts(step - 1)
    yield from run.end()


def experts_some_behind(run: Run, lag: int) -> Iterator[Op]:
    """With a lag of 2: A0 A1 A2 E0 A3 E1 E2 E3 M0 M1 M2 M3; from block to block, without the end between them."""
    for step in run.steps:
        yield from run.attend(step)
        yield from run.experts(step - lag)
    yield from run.end()


class Run:
    """Some blocks of a stage, and the pieces of one group of micro-batches on their way through.

    Args:
        layers: the blocks.
        head: whether the run ends with the head.
        staggered: at the run's end, merge each micro-batch behind the experts of the next one rather than all of them last.
            Mirrored, the first collectives of a backward then do not block those behind them.

    Attributes:
        steps: numbers of the pieces of attention, then of the head's.
    """

    def __init__(self, graph: StepGraph, layers: list[int], head: bool, staggered: bool):
        self.graph, self.layers, self.head, self.staggered = graph, layers, head, staggered
        pieces = [op for layer in layers for op in group(graph, ATTENTION, layer)]
        self._pieces = [*pieces, *(group(graph, HEAD, layers[-1]) if head else ())]
        self.steps = range(len(self._pieces))
        self._waiting: deque[tuple[int, Op]] = deque()  # experts, with the step that has routed to them
        self._merged: set[Op] = set()

    def attend(self, step: int) -> Iterator[Op]:
        """Attention of a step and what follows it at once, behind what both need."""
        op = self._pieces[step]
        for need in self.graph.needs(op):
            if need.kind == EMBED:
                yield need
            elif need.kind == MERGE and need.layer in self.layers:
                routed = (at for at, expert in self._waiting if _place(expert) <= _place(need))
                yield from self.experts(max(routed, default=-1))
                yield from self._merge(need)
        yield op
        if op.kind == ATTENTION and not self.graph.blocks[op.layer].moe:
            yield op._replace(kind=FFN)
        elif op.kind == ATTENTION:
            completed = self.graph.tokens(op)
            for route in self.graph.pieces(ROUTE, op.layer, op.micro_batch):
                if completed.start < self.graph.tokens(route).stop <= completed.stop:
                    self._waiting.append((step, route._replace(kind=EXPERT)))
                    yield route

    def experts(self, step: int) -> Iterator[Op]:
        """Experts of the micro-batches that were routed up to a step, as far as they have not run."""
        while self._waiting and self._waiting[0][0] <= step:
            _, op = self._waiting.popleft()
            yield op
            if self.staggered and not self.head and op.layer == self.layers[-1]:
                for before in group(self.graph, MERGE, op.layer):
                    if _place(before) < _place(op):
                        yield from self._merge(before)

    def end(self) -> Iterator[Op]:
        """The experts that are left, then the sums that are."""
        yield from self.experts(self.steps.stop)
        if not self.head and self.graph.blocks[self.layers[-1]].moe:
            for op in group(self.graph, MERGE, self.layers[-1]):
                yield from self._merge(op)

    def _merge(self, op: Op) -> Iterator[Op]:
        if op not in self._merged:
            self._merged.add(op)
            yield op


def group(graph: StepGraph, kind: str, layer: int) -> Iterator[Op]:
    """All ops of a kind at a block, of the micro-batches that go together."""
    return (op for m in range(graph.batch_degree) for op in graph.pieces(kind, layer, m))


def _place(op: Op) -> tuple[int, int, int]:
    """Sorts pieces as a run meets them."""
    return op.layer, op.micro_batch, op.part
