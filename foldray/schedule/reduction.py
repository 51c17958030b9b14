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
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from foldray.schedule.op import Op
from foldray.spec import GradientPart, Maker

if TYPE_CHECKING:
    from foldray.schedule.step_graph import StepGraph

REDUCTIONS = ("end", "buckets", "chunks")
USUAL_BYTES = {"buckets": 25 << 20, "chunks": 5 << 19}
"""DistributedDataParallel's bucket_cap_mb; what FlowMoE found for BERT-Large-MoE."""


class Chunk(NamedTuple):
    """A run of a flat buffer of gradients that travels at once.

    Args:
        name: the buffer's gradient class.
        start, stop: its elements.
        bytes: what is reduced.
        makers: the ops that make it.
    """

    name: str
    start: int
    stop: int
    bytes: int
    makers: tuple[Maker, ...]


class Reduction(NamedTuple):
    """How gradients are reduced within a step.

    Args:
        kind: one of `REDUCTIONS`.
        bytes: of a chunk or a bucket, FlowMoE's S_p; None is the kind's usual.
    """

    kind: str = "end"
    bytes: int | None = None

    @property
    def most(self) -> int | None:
        """Bytes of a chunk at most; None is whole buffers."""
        return None if self.kind == "end" else self.bytes or USUAL_BYTES[self.kind]


def cut_buffer(name: str, parts: Sequence[GradientPart], itemsize: int, most: int | None, granule: int = 1) -> tuple[Chunk, ...]:
    """The chunks of one buffer, in the order in which backward has them.

    Args:
        parts: what the buffer holds, from its start.
        itemsize: bytes of an element.
        most: bytes of a chunk, at least one granule; None is the whole buffer.
        granule: chunks begin and end at multiples of this, the last one behind the padded end of the buffer.
    """
    total = sum(part.elements for part in parts)
    padded = -(-total // granule) * granule
    size = padded if most is None else max(granule, most // itemsize // granule * granule)
    ends, found = [0, *accumulate(part.elements for part in parts)], []
    for start in range(0, padded, max(size, 1)):
        stop = min(start + size, padded)
        inside = [
            part for part, begin, end in zip(parts, ends, ends[1:], strict=False) if begin < stop and end > max(start, begin)
        ]
        makers = tuple(dict.fromkeys(maker for part in inside for maker in part.makers))
        found.append(Chunk(name, start, stop, (stop - start) * itemsize, makers))
    return tuple(found)


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
