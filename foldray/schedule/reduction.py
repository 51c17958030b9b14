"""Gradients on their way: into which chunks flat buffers are cut, and where the chunks' reductions stand in a list.

| kind | source | when a chunk leaves |
|---|---|---|
| `end` | plain expert and data parallelism | behind everything else, each buffer as one chunk |
| `buckets` | PyTorch's DistributedDataParallel, Megatron-LM | as soon as all of it is there, whatever else travels |
| `chunks` | FlowMoE, section 3.3 | once it is there and no all-to-all wants the link |

`chunks` are placed as `buckets` first; that all-to-alls go before them is the work of `traffic.by_urgency`, which needs to know
what ops cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from foldray.blueprint import Maker
from foldray.schedule.op import Op
from foldray.schedule.step_graph import StepGraph


def place_reductions(graph: StepGraph, order: Sequence[Op], position: int, kind: str) -> tuple[Op, ...]:
    """A position's list with the reductions of its chunks (`graph.chunks`): behind everything, or each as soon as it is there.

    Args:
        order: all else that the position does, collectives included.
    """
    chunks = list(graph.reductions(position))
    if kind == "end":
        return (*order, *chunks)
    ready = _ready(graph, order, chunks)
    return tuple(op for i, each in enumerate(order) for op in (each, *ready.get(i, ())))


def _ready(graph: StepGraph, order: Sequence[Op], chunks: Sequence[Op]) -> dict[int, list[Op]]:
    """Place in the list → chunks whose last contribution is made there; later ones of a buffer never before earlier ones."""
    last: dict[Maker, int] = {}
    for i, op in enumerate(order):
        if op.direction == "B":
            last[op.kind, op.layer] = i
    found: dict[int, list[Op]] = {}
    latest: dict[str, int] = {}  # by buffer
    for op in chunks:
        chunk = graph.chunk(op)
        at = max([latest.get(chunk.name, 0), *(last[maker] for maker in chunk.makers)])
        latest[chunk.name] = at
        found.setdefault(at, []).append(op)
    return found
