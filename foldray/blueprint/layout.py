"""The positions of a sequence that a rank holds. No torch.

First, a sequence is cut into slices. Then context parallelism cuts each slice into 2·cp equal chunks. Rank i gets the chunks
i and 2·cp − 1 − i, its shard of the slice, so that all ranks have the same work under a causal mask (zigzag; Llama 3,
section 3.3.2). Last, sequence parallelism cuts the shard into tp pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from foldray.errors import UserError, multiples_near


@dataclass(frozen=True)
class Layout:
    """The place of a rank among the ranks that share a sequence. Without lengths of slices, there is one slice, of any length."""

    cp: int = 1
    tp: int = 1
    cp_rank: int = 0
    tp_rank: int = 0
    slices: tuple[int, ...] | None = None

    def cut(self, length: int) -> list[range]:
        """Return the positions of each slice of a sequence of `length` tokens."""
        if self.slices is not None and sum(self.slices) != length:
            raise ValueError(f"slices {self.slices} are of sequences of {sum(self.slices)} tokens, not {length}")
        ends = accumulate(self.slices or (length,))
        return [range(end - size, end) for end, size in zip(ends, self.slices or (length,), strict=True)]

    def chunks(self, part: range) -> tuple[range, ...]:
        """Return this rank's shard of a slice, chunk by chunk, in the order in which the rank holds the positions."""
        check_length(len(part), self.cp, self.tp, "data.seq_len" if self.slices is None else "schedule.slices")
        if self.cp == 1:
            return (part,)
        chunk, last = len(part) // (2 * self.cp), 2 * self.cp - 1
        return tuple(part[i * chunk : (i + 1) * chunk] for i in (self.cp_rank, last - self.cp_rank))

    def shard(self, part: range) -> list[int]:
        """Return the positions of this rank's shard of a slice: 1 / cp of the slice."""
        return [position for chunk in self.chunks(part) for position in chunk]

    def piece(self, length: int) -> list[int]:
        """Return the positions of this rank's piece of a sequence, slice by slice: length / (cp·tp) positions."""
        positions: list[int] = []
        for part in self.cut(length):
            size = len(part) // (self.cp * self.tp)
            positions += self.shard(part)[self.tp_rank * size : (self.tp_rank + 1) * size]
        return positions


def smallest_slice(cp: int, tp: int) -> int:
    """Return the number that divides the length of every slice that can be shared out evenly."""
    return tp if cp == 1 else math.lcm(2 * cp, tp * cp)


def check_length(length: int, cp: int, tp: int, key: str = "data.seq_len") -> None:
    """Check that sequences or slices of this length, which the recipe's `key` sets, can be shared out evenly."""
    unit = smallest_slice(cp, tp)
    if length % unit:
        rule = f"must be a multiple of {unit} to be cut for cp={cp} (2·cp chunks) and tp={tp}"
        raise UserError(key, length, rule, multiples_near(length, unit))
