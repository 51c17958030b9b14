"""Which positions of a sequence a rank holds. No torch.

A sequence is cut into slices first, one after another. Context parallelism cuts each slice into 2·cp equal chunks and gives rank
i the chunks i and 2·cp − 1 − i, so that under a causal mask every rank has the same work (zigzag; Llama 3, section 3.3.2).
Sequence parallelism cuts what a rank then has of a slice into tp pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from foldray.errors import UserError, multiples_near


@dataclass(frozen=True)
class Layout:
    """Where a rank stands among those that share a sequence.

    Args:
        slices: lengths of the slices, which sum to a sequence's; None is one slice, of any length.
    """

    cp: int = 1
    tp: int = 1
    cp_rank: int = 0
    tp_rank: int = 0
    slices: tuple[int, ...] | None = None

    def cut(self, length: int) -> list[range]:
        """The slices of a sequence.

        Raises:
            ValueError: sequences have another length than the slices.
        """
        if self.slices is not None and sum(self.slices) != length:
            raise ValueError(f"slices {self.slices} are of sequences of {sum(self.slices)} tokens, not {length}")
        ends = accumulate(self.slices or (length,))
        return [range(end - size, end) for end, size in zip(ends, self.slices or (length,), strict=True)]

    def chunks(self, part: range) -> tuple[range, ...]:
        """Positions of a slice in this context-parallel rank's shard, in the order in which it holds them."""
        check_length(len(part), self.cp, self.tp)
        if self.cp == 1:
            return (part,)
        chunk, last = len(part) // (2 * self.cp), 2 * self.cp - 1
        return tuple(part[i * chunk : (i + 1) * chunk] for i in (self.cp_rank, last - self.cp_rank))

    def shard(self, part: range) -> list[int]:
        """Positions of a slice in this context-parallel rank's shard: 1 / cp of them."""
        return [position for chunk in self.chunks(part) for position in chunk]

    def piece(self, length: int) -> list[int]:
        """Positions of this rank's own piece of a sequence, slice by slice: length / (cp·tp) of them."""
        return list(self._piece(length))

    def _piece(self, length: int) -> Iterator[int]:
        for part in self.cut(length):
            size = len(part) // (self.cp * self.tp)
            yield from self.shard(part)[self.tp_rank * size : (self.tp_rank + 1) * size]


def smallest_slice(cp: int, tp: int) -> int:
    """Slices must be multiples of this to be shared out evenly."""
    return tp if cp == 1 else math.lcm(2 * cp, tp * cp)


def check_length(length: int, cp: int, tp: int) -> None:
    """Raise a UserError unless sequences of this length can be shared out evenly."""
    unit = smallest_slice(cp, tp)
    if length % unit:
        rule = f"must be a multiple of {unit} to be cut for cp={cp} (2·cp chunks) and tp={tp}"
        raise UserError("data.seq_len", length, rule, multiples_near(length, unit))
