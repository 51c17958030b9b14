"""Gradients cut into chunks: which runs of a flat buffer travel at once, and which ops make them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from foldray.blueprint import GradientPart, Maker

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
    def gives_way(self) -> bool:
        """Whether gradients leave when no all-to-all wants the link, which takes knowing what ops take."""
        return self.kind == "chunks"

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
