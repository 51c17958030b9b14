"""The list of a pipeline position, written pass by pass, with all that follows from the order of the passes.

The graph says what an op needs. An op that no generator orders begins once the list has all of that, at one of these places:

- A piece of a head goes backward right after its forward, so that the logits of one piece exist at a time.
- Gradients of weights that backwards leave (W) are computed while the next op travels, and before the end of the pass. Those of
  a head need the gradients of its logits, so they come before its next piece.
- Weights of experts leave for their copies when the forward of their block begins. The gradients come home once the last
  micro-batch has added to them; meanwhile the block before goes backward, and only then are they reduced.
- Gradients are reduced as the kind of reduction says:

| kind | source | when a chunk is reduced |
|---|---|---|
| `end` | plain expert and data parallelism | after everything else, each buffer as one chunk |
| `buckets` | PyTorch's DistributedDataParallel, Megatron-LM | as soon as its gradients are complete, whatever else travels |
| `chunks` | FlowMoE, section 3.3 | when its gradients are complete and no all-to-all needs the link |

While the times of the ops are not known, `chunks` leave like `buckets`, and all-to-alls then wait for reductions that no op needs
yet. If the times are known, a reduction is held back until the link is about to be idle before the next computation ends:
FlowMoE's priority of all-to-alls, which then wait for at most one chunk. FlowMoE polls a flag during the step. Here this is
decided once, when the list is made, from times that all ranks of a pipeline position share.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from itertools import zip_longest

from foldray.blueprint import Maker
from foldray.clock.times import OpCosts
from foldray.graph.chunks import Reduction
from foldray.graph.op import Op
from foldray.graph.step_graph import StepGraph
from foldray.kinds import COPY, EXCHANGES, EXPERT, HANDOVER, HEAD, OFFLOAD, OP_KINDS, REDUCE


def goes_on(op: Op, following: Op | None) -> bool:
    """Whether the rows that an op sends go on in the next op of a list: between nodes, then inside one, or the reverse."""
    if following is None or not {op.kind, following.kind} <= set(EXCHANGES):
        return False
    return op._replace(kind=following.kind) == following


class PositionList:
    """The list of a position, while it is being written.

    Args:
        reduction: when the position's chunks (`graph.chunks`) are reduced.
        costs: the times of the ops, if they are known.
    """

    def __init__(self, graph: StepGraph, position: int, reduction: Reduction, costs: OpCosts | None = None):
        self.graph, self.costs, self._ops = graph, costs if reduction.gives_way else None, list[Op]()
        chunks, at_the_end = list(graph.reductions(position)), reduction.kind == "end"
        self._weights, self._reductions = list[Op](), deque[Op]()  # what can begin
        self._last = chunks if at_the_end else []
        # Of what cannot begin yet, how much it needs, and how much of this is in the list.
        self._wanted, self._there = dict[Op | Maker, int](), Counter[Op | Maker]()
        self._completed_by: dict[Maker, list[Op]] = defaultdict(list)
        self._copying = {layer for layer in graph.copied if graph.at[layer].experts == position}  # whose weights have not left
        self._home = list[Op]()  # chunks whose last gradients are on their way home
        for layer in self._copying:
            self._expect((EXPERT, layer), Op(COPY, "B", layer))
        for op in () if at_the_end else chunks:
            makers = graph.makers(op)
            self._wanted[op] = len(makers)
            for maker in makers:
                self._expect(maker, op)
        # By the times of the ops: when the computation that has begun ends, when the link is idle, when that inside a node is,
        # and when ops arrive.
        self._now = self._link = self._inside = 0.0
        self._arrival: dict[Op, float] = {}
        self._seconds = dict(costs.seconds) if costs else {}

    def write(self, ops: Iterable[Op]) -> None:
        """Write the ops of a pass, with all that travels but the chunks of gradients."""
        ops = tuple(ops)
        for op, following in zip_longest(ops, ops[1:]):
            if op.kind == HEAD and self.graph.backward:
                if op.direction == "F":
                    self._compute_weights()
                    self._put(op)
                    self._put(op._replace(direction="B"))
                continue
            self._put(op)
            # Nobody waits at once for what is fetched.
            if OP_KINDS[op.kind].travels and op.kind != OFFLOAD and not goes_on(op, following):
                self._compute_weights()
        self._compute_weights(heads=False)

    def end(self) -> tuple[Op, ...]:
        """Return the list with all that has not begun."""
        self._compute_weights()
        return (*self._ops, *self._reductions, *self._home, *self._last)

    def _expect(self, maker: Maker, op: Op) -> None:
        """Let an op begin once all ops of a maker have added to gradients."""
        self._completed_by[maker].append(op)
        self._wanted[maker] = len(self.graph.adding(*maker))

    def _compute_weights(self, heads: bool = True) -> None:
        weights, self._weights = self._weights, []
        for op in weights:
            if heads or op.kind != HEAD:
                self._put(op)
            else:
                self._weights.append(op)

    def _put(self, op: Op) -> None:
        """Put an op into the list, and what can begin with it to what can begin."""
        if op.direction == "F" and op.layer in self._copying and op.kind not in (COPY, HANDOVER):
            self._copying.remove(op.layer)
            self._put(Op(COPY, "F", op.layer))
        if self.costs is not None:
            self._take_time(op, self.costs)
        self._ops.append(op)
        if op.direction == "B":
            for left in self.graph.weights(op):
                self._wanted[left] = len(self.graph.left_by(left))
                self._weights += filter(self._is_last, [left])
        maker = op.kind, op.layer
        if maker in self._completed_by and op.direction == self.graph.adds(op.kind) and self._is_last(maker):
            self._complete(op)

    def _complete(self, last: Op) -> None:
        """Put what can begin after the last op that adds to gradients: their way home, or chunks of them."""
        for op in self._completed_by[last.kind, last.layer]:
            if op.kind == COPY:
                self._reductions += self._home
                self._home.clear()
                self._put(op)
            elif self._is_last(op):
                (self._home if last.kind == COPY else self._reductions).append(op)
        if self.costs is None:
            self._ops += self._reductions
            self._reductions.clear()

    def _is_last(self, key: Op | Maker) -> bool:
        """Count one more of what something needs. Return whether it was the last one."""
        self._there[key] += 1
        return self._there[key] == self._wanted[key]

    def _take_time(self, op: Op, costs: OpCosts) -> None:
        """Run an op on a clock with one computation and one link, after the reductions that begin before it ends."""
        if op.kind in (HANDOVER, OFFLOAD):
            return  # one waits for other positions, and the other one has links of its own; this clock has one of each
        if op.kind == REDUCE:
            seconds = costs.startup + costs.per_byte * self.graph.chunk(op).bytes
        else:
            seconds = self._seconds.get((op.kind, op.direction, op.part), 0.0)
        ready = max([self._now, *(self._arrival[need] for need in self.graph.needs(op) if need in self._arrival)])
        if OP_KINDS[op.kind].travels == "tokens_inside":
            self._arrival[op] = self._inside = max(self._inside, ready) + seconds
            return
        if OP_KINDS[op.kind].travels:
            self._arrival[op] = self._link = max(self._link, ready) + seconds
            return
        end = ready + seconds
        while self._reductions and max(self._link, self._now) < end:
            self._put(self._reductions.popleft())
        self._now = end
