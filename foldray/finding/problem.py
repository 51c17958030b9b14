"""A step as numbers: what its ops need, where they run, what they use, and how long. Searches of lists see nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from foldray.clock import COMPUTE, Cost
from foldray.graph import Op, Schedule, StepGraph
from foldray.kinds import COPY, EMBED, HEAD, REDUCE


class Problem:
    """The ops of a step with their costs, to be put into lists.

    Beside what the graph says, ops that add to the same gradients keep the order in which one micro-batch after the other would
    add them, so the sums have the same bits for all lists.

    Attributes:
        ops: all ops. An op comes after all ops that it needs.
        needs, users: for every op, the ops that must end before it, and the ops that wait for it.
        places: for every op, the positions that take part, the sender first.
        channel: for every op, the number of its channel; -1 if the op computes.
        lanes: for every op that travels, (lane, seconds) one after another. Each position has each lane once.
        group: for every op, the number of its micro-batch; parts that go through the stages together count as one.
        block: for every op, (its micro-batch as in `group`, its block).
        blocks: for every position, the number of blocks that compute there.
        leaves: for every op, whether it is a backward that leaves gradients of weights of a block (not of the head).
    """

    def __init__(self, graph: StepGraph, cost: Cost):
        self.graph, self.positions = graph, graph.positions
        needs = {op: dict.fromkeys(graph.needs(op)) for op in graph.ops()}
        for before, after in _in_order(graph, list(needs)):
            needs[after][before] = None
        self.ops = _sorted(needs)
        self.number = {op: i for i, op in enumerate(self.ops)}
        self.needs = [tuple(self.number[need] for need in needs[op]) for op in self.ops]
        self.users: list[list[int]] = [[] for _ in self.ops]
        for i, each in enumerate(self.needs):
            for need in each:
                self.users[need].append(i)
        self.places = [graph.where(op) for op in self.ops]
        channels: dict[object, int] = {}
        named = [graph.channel(op) for op in self.ops]
        self.channel = [-1 if each is None else channels.setdefault(each, len(channels)) for each in named]
        costs = [cost(op) for op in self.ops]
        self.seconds = [sum(seconds for _, seconds in each) for each in costs]
        numbers: dict[object, int] = {}
        self.lanes = [
            # What travels without a link has a lane of its own, so that each of its channels is a queue like all others.
            tuple((numbers.setdefault(channel if lane == COMPUTE else lane, len(numbers)), seconds) for lane, seconds in each)
            for channel, each in zip(self.channel, costs, strict=True)
        ]
        self.group = [-1 if op.kind in (COPY, REDUCE) else op.micro_batch // graph.batch_degree for op in self.ops]
        self.block = [(group, op.layer) for group, op in zip(self.group, self.ops, strict=True)]
        at = {
            (places[0], op.layer) for op, places, channel in zip(self.ops, self.places, self.channel, strict=True) if channel < 0
        }
        self.blocks = [sum(place == position for place, _ in at) for position in range(self.positions)]
        self.leaves = [op.direction == "B" and op.kind in graph.later and op.kind != HEAD for op in self.ops]

    @cached_property
    def tails(self) -> list[float]:
        """For every op, the longest path from its start to the end of the step, in seconds."""
        tails = list(self.seconds)
        for i in reversed(range(len(tails))):
            tails[i] += max((tails[user] for user in self.users[i]), default=0.0)
        return tails

    @cached_property
    def heads(self) -> list[float]:
        """For every op, the longest path from the start of the step to its start, in seconds."""
        heads = [0.0] * len(self.ops)
        for i, needs in enumerate(self.needs):
            heads[i] = max((heads[need] + self.seconds[need] for need in needs), default=0.0)
        return heads

    def relative(self, i: int) -> Op:
        """Return an op with the number of its micro-batch counted from the first part of its group."""
        op = self.ops[i]
        return op._replace(micro_batch=op.micro_batch % self.graph.batch_degree)

    def kept(self, schedule: Schedule) -> tuple[int, ...]:
        """Return, for every position, the most blocks that it keeps at once.

        A position keeps a block of a micro-batch from the first of its ops there to the last one, gradients of weights included.
        """
        computing = [channel < 0 for channel in self.channel]
        return tuple(self._most([self.number[op] for op in ops], computing) for ops in schedule)

    def left(self, schedule: Schedule) -> tuple[int, ...]:
        """Return, for every position, the most blocks at once whose backward has left gradients of weights that are not done."""
        return tuple(self._most([self.number[op] for op in ops], self.leaves) for ops in schedule)

    def _most(self, order: Sequence[int], begins: Sequence[bool]) -> int:
        """Return the most blocks at once, each from its first op that begins it to the last of all its ops that compute."""
        last = {self.block[i]: place for place, i in enumerate(order) if self.channel[i] < 0}
        now, most = set[tuple[int, int]](), 0
        for place, i in enumerate(order):
            if begins[i]:
                now.add(self.block[i])
                most = max(most, len(now))
            if self.channel[i] < 0 and last[self.block[i]] == place:
                now.discard(self.block[i])
        return most


def _in_order(graph: StepGraph, ops: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Yield pairs of ops that keep their order: (the first one, the next one)."""
    sums = defaultdict[object, list[Op]](list)
    parts = graph.together

    def turn(op: Op) -> tuple[int, ...]:
        return op.micro_batch // parts, op.layer, op.micro_batch, op.part, "FBW".index(op.direction)

    heads = sorted((op for op in ops if op.kind == HEAD), key=turn)
    if graph.backward:
        yield from pairwise(heads)  # the logits of one piece exist at a time
    for op in ops:
        if op.direction == "B" and graph.channel(op) is None and op.kind != HEAD:
            sums[op.kind, op.layer].append(op)
    for same in sums.values():  # backward reaches the last part of a micro-batch first
        same.sort(key=lambda op: (op.micro_batch // parts, -op.micro_batch, -op.part))
        yield from pairwise(same)
    # Heads, blocks of multi-token prediction and the embedding add to the same gradients in turns. If the experts have positions
    # of their own, the embedding does so at any time: otherwise each micro-batch would have to end before the next one's head.
    adding = [op for op in heads if op.direction == ("W" if HEAD in graph.later else "B")] if graph.tied else []
    further = [op for layer in reversed(graph.heads[1:]) for op in sums[graph.entry, layer]]
    embedding = sums[EMBED, 0] if graph.positions == 1 else []
    yield from pairwise(sorted((*adding, *further, *embedding), key=lambda op: op.micro_batch // parts))


def _sorted(needs: dict[Op, dict[Op, None]]) -> tuple[Op, ...]:
    """Return the ops in an order in which every op follows those that it needs, and else as given."""
    ordered: dict[Op, None] = {}
    for op in needs:
        stack = [op]
        while stack:
            missing = next((need for need in needs[stack[-1]] if need not in ordered), None)
            if missing is None:
                ordered[stack.pop()] = None
            else:
                stack.append(missing)
    return tuple(ordered)
