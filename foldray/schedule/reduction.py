"""The places of reductions in a list.

| kind | source | when a chunk is reduced |
|---|---|---|
| `end` | plain expert and data parallelism | after everything else, each buffer as one chunk |
| `buckets` | PyTorch's DistributedDataParallel, Megatron-LM | as soon as its gradients are complete, whatever else travels |
| `chunks` | FlowMoE, section 3.3 | when its gradients are complete and no all-to-all needs the link |

This module places `chunks` like `buckets`. If the times of the ops are known, `traffic.by_urgency` then moves reductions
behind all-to-alls.
"""

from __future__ import annotations

from collections.abc import Sequence

from foldray.blueprint import Maker
from foldray.schedule.op import Op
from foldray.schedule.step_graph import StepGraph


def place_reductions(graph: StepGraph, order: Sequence[Op], position: int, kind: str) -> tuple[Op, ...]:
    """Return a position's list with the reductions of its chunks (`graph.chunks`) inserted.

    Args:
        graph: the step.
        order: all other ops of the position, with collectives.
        position: number of the pipeline position.
        kind: `end` puts the reductions last. Every other kind puts a reduction where its gradients are complete.
    """
    chunks = list(graph.reductions(position))
    if kind == "end":
        return (*order, *chunks)
    ready = _ready(graph, order, chunks)
    return tuple(op for i, each in enumerate(order) for op in (each, *ready.get(i, ())))


def _ready(graph: StepGraph, order: Sequence[Op], chunks: Sequence[Op]) -> dict[int, list[Op]]:
    """Return {index in the list: the reductions of the chunks that the op there completes}."""
    last: dict[Maker, int] = {}  # kind and block → index of the last op that adds to its gradients
    for i, op in enumerate(order):
        if op.direction in ("B", "W"):
            last[op.kind, op.layer] = i
    found: dict[int, list[Op]] = {}
    for op in chunks:
        found.setdefault(max(last[maker] for maker in graph.makers(op)), []).append(op)
    return found
