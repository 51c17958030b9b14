"""Generators of the order of computation inside a stage. Each generator is a few lines long and looks like its figure.

A generator takes its ops from a `Run`. A run is a sequence of blocks that a group of micro-batches passes without draining.
It has one step for each piece of attention and of a head, block by block. `attend` yields the computation of a step: attention,
then the routers of the MoE micro-batches that this attention completes. `experts` yields the experts of all micro-batches that
were routed up to a step. The run inserts embeddings and the weighted sums of the previous block itself, as late as possible. If
ranks gather keys and values (`StepGraph.gathers`), it also inserts the projections, a step ahead where it can: before attention
of the step before, so that keys and values travel during that attention; or after it, so that they travel during experts.

The figures show one block in four pieces: A is attention with routers, E the experts, M the weighted sum. A backward order
is the mirror image of a forward order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from foldray.graph.op import Op
from foldray.graph.step_graph import StepGraph
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, PROJECT, ROUTE, SHARED


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
    """With a lag of 2: A0 A1 A2 E0 A3 E1 E2 E3 M0 M1 M2 M3. A run of several blocks has this end only once."""
    for step in run.steps:
        yield from run.attend(step)
        yield from run.experts(step - lag)
    yield from run.end()


class Run:
    """A sequence of blocks of a stage, and the pieces of one group of micro-batches on their way through these blocks.

    Args:
        head: whether the run has the heads of its blocks, if they have any.
        staggered: whether the last block merges each micro-batch right after the experts of the next one, instead of all
            micro-batches at the end. The mirrored backward then does not queue all combines before the first dispatch.

    Attributes:
        steps: numbers of the steps: one per piece of attention, and after the block one per piece of its head.
    """

    def __init__(self, graph: StepGraph, layers: list[int], head: bool, staggered: bool):
        self.graph, self.layers, self.head, self.staggered = graph, layers, head, staggered
        heads = graph.heads if head else ()
        kinds = [(kind, layer) for layer in layers for kind in (ATTENTION, *((HEAD,) if layer in heads else ()))]
        self._pieces = [op for kind, layer in kinds for op in group(graph, kind, layer)]
        self.steps = range(len(self._pieces))
        self._waiting: deque[tuple[int, Op]] = deque()  # (step that routed the micro-batch, its expert op)
        self._ran: dict[Op, int] = {}  # op of experts or dense FFN → the step of attention before it
        self._merged: set[Op] = set()
        self._entered = self._now = 0  # number of steps whose input has been used; the last step of attention

    def attend(self, step: int) -> Iterator[Op]:
        """Yield attention (or the head) of a step, after the embedding or sums that it needs, then dense FFN or routers (with
        shared experts)."""
        op, self._now = self._pieces[step], step
        yield from self._enter(step)
        yield from self._enter_ahead(step + 1, step - 1)
        yield op
        if op.kind == ATTENTION and not self.graph.blocks[op.layer].moe:
            self._ran[op._replace(kind=FFN)] = step
            yield op._replace(kind=FFN)
        elif op.kind == ATTENTION:
            completed = self.graph.tokens(op)
            for route in self.graph.pieces(ROUTE, op.layer, op.micro_batch):
                if completed.start < self.graph.tokens(route).stop <= completed.stop:
                    self._waiting.append((step, route._replace(kind=EXPERT)))
                    yield route
                    if self.graph.has(SHARED, op.layer):
                        yield route._replace(kind=SHARED)  # while rows travel
        yield from self._enter_ahead(step + 1, step)

    def _enter(self, step: int) -> Iterator[Op]:
        """Yield the embedding or sums that a step needs, after their experts, and its projections."""
        if step < self._entered:
            return
        self._entered = step + 1
        op = self._entry(step)
        for need in self.graph.needs(op):
            if need.kind == EMBED:
                yield need
            elif need.kind == MERGE and need.layer in self.layers:
                routed = (at for at, expert in self._waiting if _place(expert) <= _place(need))
                yield from self.experts(max(routed, default=-1))
                yield from self._merge(need)
        if op.kind == PROJECT:
            yield op

    def _enter_ahead(self, step: int, before: int) -> Iterator[Op]:
        """Do the same ahead of time if the step has projections, and if all experts for its input ran before another step.

        Their rows then had the time of an attention to travel back.
        """
        if self.graph.gathers and step in self.steps and (op := self._entry(step)).kind == PROJECT:
            needs = [need for need in self.graph.needs(op) if need.kind != EMBED and need.layer in self.layers]
            sums = [need for need in needs if need.kind == MERGE]
            fed = all(need in self._ran for need in needs if need.kind == FFN)
            if fed and all(self._ran.get(need._replace(kind=EXPERT), before) < before for need in sums):
                yield from self._enter(step)

    def _entry(self, step: int) -> Op:
        """Return the op that takes the input of a step."""
        op = self._pieces[step]
        return op._replace(kind=self.graph.entry) if op.kind == ATTENTION else op

    def experts(self, step: int) -> Iterator[Op]:
        """Yield the experts of all micro-batches that were routed up to a step, if they have not run yet."""
        while self._waiting and self._waiting[0][0] <= step:
            _, op = self._waiting.popleft()
            self._ran[op] = self._now
            yield op
            if self.staggered and not self.head and op.layer == self.layers[-1]:
                for before in group(self.graph, MERGE, op.layer):
                    if _place(before) < _place(op):
                        yield from self._merge(before)

    def end(self) -> Iterator[Op]:
        """Yield the remaining experts, then the remaining weighted sums."""
        yield from self.experts(self.steps.stop)
        if not self.head and self.graph.blocks[self.layers[-1]].moe:
            for op in group(self.graph, MERGE, self.layers[-1]):
                yield from self._merge(op)

    def _merge(self, op: Op) -> Iterator[Op]:
        if op not in self._merged:
            self._merged.add(op)
            yield op


def group(graph: StepGraph, kind: str, layer: int) -> Iterator[Op]:
    """Return all ops of a kind at a block, over the `batch_degree` parts of a micro-batch."""
    return (op for m in range(graph.batch_degree) for op in graph.pieces(kind, layer, m))


def _place(op: Op) -> tuple[int, int, int]:
    """Return a sort key: the order in which a run reaches pieces."""
    return op.layer, op.micro_batch, op.part
