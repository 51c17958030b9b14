"""Which positions of a sequence a rank holds. No torch.

Context parallelism cuts a sequence into 2·cp equal chunks and gives rank i the chunks i and 2·cp − 1 − i, so that under a causal
mask every rank has the same work (zigzag; Llama 3, section 3.3.2). Sequence parallelism cuts what a rank then has into tp pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foldray.errors import UserError, multiples_near


@dataclass(frozen=True)
class Layout:
    """Where a rank stands among those that share a sequence."""

    cp: int = 1
    tp: int = 1
    cp_rank: int = 0
    tp_rank: int = 0

    def chunks(self, length: int) -> tuple[range, ...]:
        """Positions of this context-parallel rank's shard, in the order in which it holds them."""
        check_length(length, self.cp, self.tp)
        if self.cp == 1:
            return (range(length),)
        chunk, last = length // (2 * self.cp), 2 * self.cp - 1
        return tuple(range(i * chunk, (i + 1) * chunk) for i in (self.cp_rank, last - self.cp_rank))

    def shard(self, length: int) -> list[int]:
        """Positions of this context-parallel rank's shard: length / cp of them."""
        return [position for chunk in self.chunks(length) for position in chunk]

    def piece(self, length: int) -> list[int]:
        """Positions of this rank's own piece of the shard: length / (cp·tp) of them."""
        size = length // (self.cp * self.tp)
        return self.shard(length)[self.tp_rank * size : (self.tp_rank + 1) * size]


def check_length(length: int, cp: int, tp: int) -> None:
    """Raise a UserError unless sequences of this length can be shared out evenly."""
    unit = tp if cp == 1 else math.lcm(2 * cp, tp * cp)
    if length % unit:
        rule = f"must be a multiple of {unit} to be cut for cp={cp} (2·cp chunks) and tp={tp}"
        raise UserError("data.seq_len", length, rule, multiples_near(length, unit))
