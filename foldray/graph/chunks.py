"""Chunks of gradients: the runs of a flat buffer that are reduced at once, and the ops that produce them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from foldray.blueprint import GradientPart, Maker

REDUCTIONS = ("end", "buckets", "chunks")
USUAL_BYTES = {"buckets": 25 << 20, "chunks": 5 << 19}
"""Default bytes: `bucket_cap_mb` of DistributedDataParallel, and the chunk that FlowMoE found best for BERT-Large-MoE."""


class Chunk(NamedTuple):
    """A run of a flat gradient buffer that is reduced at once.

    Args:
        name: gradient class of the buffer.
        start, stop: the chunk's elements in the buffer, from `start` to before `stop`.
        bytes: size of the chunk, with padding.
        makers: the ops that add to the chunk's gradients, as (kind, block).
    """

    name: str
    start: int
    stop: int
    bytes: int
    makers: tuple[Maker, ...]


class Reduction(NamedTuple):
    """The time and the size of the reductions of gradients in a step.

    Args:
        kind: one of `REDUCTIONS`.
        bytes: size of a chunk or bucket (FlowMoE's S_p). None is the default of the kind (`USUAL_BYTES`).
    """

    kind: str = "end"
    bytes: int | None = None

    @property
    def gives_way(self) -> bool:
        """Whether reductions wait until no all-to-all needs the link. To decide this, the times of the ops must be known."""
        return self.kind == "chunks"

    @property
    def most(self) -> int | None:
        """Largest size of a chunk in bytes; None for whole buffers."""
        return None if self.kind == "end" else self.bytes or USUAL_BYTES[self.kind]


def cut_buffer(name: str, parts: Sequence[GradientPart], itemsize: int, most: int | None, granule: int = 1) -> tuple[Chunk, ...]:
    """Cut one buffer into chunks, from its start.

    Args:
        most: largest size of a chunk in bytes; a chunk has at least one granule. None makes one chunk of the whole buffer.
        granule: chunks begin and end at multiples of this number of elements. The last chunk includes the padding.
    """
    total = sum(part.elements for part in parts)
    padded = -(-total // granule) * granule
    size = padded if most is None else max(granule, most // itemsize // granule * granule)
    ends, chunks = [0, *accumulate(part.elements for part in parts)], []
    for start in range(0, padded, max(size, 1)):
        stop = min(start + size, padded)
        inside = [
            part for part, begin, end in zip(parts, ends, ends[1:], strict=False) if begin < stop and end > max(start, begin)
        ]
        makers = tuple(dict.fromkeys(maker for part in inside for maker in part.makers))
        chunks.append(Chunk(name, start, stop, (stop - start) * itemsize, makers))
    return tuple(chunks)
