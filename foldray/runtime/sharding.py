"""Who owns which elements of a flat buffer that several ranks share (ZeRO).

Ownership is dealt out in granules: of every n · g elements, rank i owns the i-th g. So any run of whole deals is owned evenly by
all ranks, and a buffer may be reduced in chunks of any size, another one each step, while everyone keeps what is theirs. What a
rank owns lies in one tensor, granule behind granule; what it owns of a run of the buffer, such as a parameter, is a run too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GRANULE = 256
"""Elements; a message to one rank is never shorter."""


@dataclass(frozen=True)
class Sharding:
    """A buffer's elements among `ranks` owners, as seen by number `index`; one owner owns everything, with no padding.

    Args:
        elements: of the buffer, without padding.
    """

    elements: int
    ranks: int = 1
    index: int = 0

    @property
    def deal(self) -> int:
        """Elements of one round in which every rank gets a granule; chunks are multiples of it."""
        return 1 if self.ranks == 1 else self.ranks * GRANULE

    @property
    def padded(self) -> int:
        return -(-self.elements // self.deal) * self.deal

    @property
    def owned(self) -> int:
        """Elements of a rank's part, padding included."""
        return self.padded // self.ranks

    def own(self, start: int, stop: int) -> slice:
        """Where in this rank's part those elements lie that it owns of a run of the buffer."""
        return slice(self._before(start), self._before(stop))

    def mine(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Which elements of a run of the buffer are this rank's: bool [stop - start]."""
        if self.ranks == 1:
            return torch.ones(stop - start, dtype=torch.bool, device=device)
        return torch.arange(start, stop, device=device) // GRANULE % self.ranks == self.index

    def by_owner(self, run: torch.Tensor) -> torch.Tensor:
        """A run of whole deals, sorted by owner: what a reduce-scatter takes."""
        return run.view(-1, self.ranks, GRANULE).transpose(0, 1).flatten()

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_owner`: what an all-gather gives, as it lies in the buffer."""
        return gathered.view(self.ranks, -1, GRANULE).transpose(0, 1).flatten()

    def _before(self, element: int) -> int:
        if self.ranks == 1:
            return element
        deals, rest = divmod(element, self.deal)
        return deals * GRANULE + min(max(rest - self.index * GRANULE, 0), GRANULE)
