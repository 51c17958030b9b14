"""The places of reductions in a list.

| kind | source | when a chunk is reduced |
|---|---|---|
| `end` | plain expert and data parallelism | after everything else, each buffer as one chunk |
| `buckets` | PyTorch's DistributedDataParallel, Megatron-LM | as soon as its gradients are complete, whatever else travels |
| `chunks` | FlowMoE, section 3.3 | when its gradients are complete and no all-to-all needs the link |

`place_reductions` places `chunks` like `buckets`. All-to-alls then wait for reductions that no op needs yet. If the times of the
ops are known, `by_urgency` holds reductions back until the link is about to be idle: FlowMoE's priority of all-to-alls. FlowMoE
polls a flag during the step. Here this is decided once, when the list is made, from times that all ranks of a pipeline position
share.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from foldray.blueprint import Maker
from foldray.clock.times import OpCosts
from foldray.graph.chunks import Reduction
from foldray.graph.op import Op
from foldray.graph.step_graph import StepGraph
from foldray.kinds import HANDOVER, REDUCE


def place_reductions(
    graph: StepGraph, order: Sequence[Op], position: int, reduction: Reduction, costs: OpCosts | None = None
) -> tuple[Op, ...]:
    """Return a position's list with the reductions of its chunks (`graph.chunks`) inserted.

    Args:
        order: all other ops of the position, with collectives.
        reduction: `end` puts the reductions last. Every other kind puts a reduction where its gradients are complete, and
            `chunks` later if the times of the ops are known.
    """
    chunks = list(graph.reductions(position))
    if reduction.kind == "end" or not chunks:
        return (*order, *chunks)
    last: dict[Maker, int] = {}  # kind and block → index of the last op that adds to its gradients
    for i, op in enumerate(order):
        if op.direction in ("B", "W"):
            last[op.kind, op.layer] = i
    ready = defaultdict[int, list[Op]](list)  # by index, the reductions of the chunks that the op there completes
    for op in chunks:
        ready[max(last[maker] for maker in graph.makers(op))].append(op)
    early = tuple(op for i, computed in enumerate(order) for op in (computed, *ready.get(i, ())))
    return by_urgency(graph, early, costs) if costs is not None and reduction.gives_way else early


def by_urgency(graph: StepGraph, order: Sequence[Op], costs: OpCosts) -> tuple[Op, ...]:
    """Return the same list with later reductions: each starts when the link would be idle before the next computation ends.

    According to `costs`, an all-to-all then waits for at most one chunk. All other ops keep their order.

    Args:
        order: a legal list that starts every reduction as soon as its gradients are complete.
    """
    seconds = dict(costs.seconds)
    now = link = 0.0  # when the started computation ends; when the link becomes idle
    arrival: dict[Op, float] = {}
    waiting: deque[Op] = deque()  # reductions whose gradients are complete
    moved: list[Op] = []

    def duration(op: Op) -> float:
        if op.kind == REDUCE:
            return costs.startup + costs.per_byte * graph.chunk(op).bytes
        return seconds.get((op.kind, op.direction, op.part), 0.0)

    def travel(op: Op) -> None:
        nonlocal link
        moved.append(op)
        if op.kind != HANDOVER:  # handovers wait for other positions, and this clock has only one position
            arrival[op] = link = max(link, now) + duration(op)

    for op in order:
        if op.kind == REDUCE:
            waiting.append(op)
        elif graph.channel(op) is not None:
            travel(op)
        else:
            end = max([now, *(arrival[need] for need in graph.needs(op) if need in arrival)]) + duration(op)
            while waiting and max(link, now) < end:
                travel(waiting.popleft())
            moved.append(op)
            now = end
    for op in waiting:
        travel(op)
    return tuple(moved)
