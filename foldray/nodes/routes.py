"""The routes between attention and experts that have ranks of their own.

An expert position has etp · edp *copies* of its experts' inputs: each copy is one rank for every EP index. A rank of attention
sends all its rows to one copy. Ranks are spread over the copies in order, so every copy has as many senders as any other, or
one fewer. With ETP, the ranks that share an expert gather each other's rows.

If tokens travel once to each node (`Fold.ep_inside`), a copy is one rank on every node of an EP group: those with the same place
on their nodes. Each of them passes rows on inside its node. So there are ep_inside times as many copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from foldray.fold.fold import Fold


@dataclass(frozen=True)
class Routes:
    """The ranks that exchange rows under a fold whose experts have ranks of their own."""

    fold: Fold

    def receivers(self, rank: int, position: int) -> tuple[int, ...]:
        """Return the ranks of an expert position that a rank of attention sends rows to, by EP index, or node by node.

        Args:
            position: pipeline position of the experts, from 0.
        """
        return self._copies[position][self._copy_of(rank)]

    def senders(self, rank: int, position: int) -> tuple[int, ...]:
        """Return the ranks of an attention position that send rows to a rank of the experts.

        Args:
            position: pipeline position of attention, from 0.
        """
        copy, _ = self._place(rank)
        return tuple(sender for sender in self._attention[position] if self._copy_of(sender) == copy)

    def _copy_of(self, rank: int) -> int:
        senders = self._attention[self.fold.attention.coordinate(rank)["pp"]]
        return senders.index(rank) * self._count // len(senders)

    @property
    def _count(self) -> int:
        """Number of copies of a position."""
        return self.fold.etp * self.fold.edp * self.fold.ep_inside

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the copy that a rank of the experts belongs to, and its number there."""
        fold, place = self.fold, self.fold.moe.coordinate(rank)
        number, inside = divmod(place["ep"], fold.ep_inside)
        return (place["edp"] * fold.etp + place["etp"]) * fold.ep_inside + inside, number

    @cached_property
    def _attention(self) -> list[tuple[int, ...]]:
        """The ranks of every position of attention."""
        grid = self.fold.attention
        return [tuple(rank for rank in grid.ranks if grid.coordinate(rank)["pp"] == p) for p in range(self.fold.pp)]

    @cached_property
    def _copies(self) -> list[list[tuple[int, ...]]]:
        """The copies of every position of the experts: the ranks of each copy, in their order there."""
        fold, grid = self.fold, self.fold.moe
        copies = [[[0] * fold.ep_across for _ in range(self._count)] for _ in range(fold.moe_pp)]
        for rank in grid.ranks:
            copy, number = self._place(rank)
            copies[grid.coordinate(rank)["pp"]][copy][number] = rank
        return [[tuple(copy) for copy in position] for position in copies]
