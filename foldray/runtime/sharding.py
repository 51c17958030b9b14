"""The owners of the elements of a flat buffer that several ranks share (ZeRO, Rajbhandari et al. 2020).

The elements are dealt out in granules of g elements. A deal is n · g consecutive elements, one granule for each of n ranks;
rank i owns the i-th granule. So all ranks own equally much of a run of whole deals. The size of chunks may change from step
to step, and every rank still owns the same elements. The elements that a rank owns lie in one tensor, granule after granule.
Its elements of a run of the buffer, such as a parameter, are a run of this tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GRANULE = 256
"""Elements of a granule. Messages to a rank are not shorter than this."""


@dataclass(frozen=True)
class Sharding:
    """The division of a buffer's elements among ranks. A single rank owns everything, without padding.

    Args:
        elements: number of elements of the buffer, without padding.
        ranks: number of owners.
        index: this rank's number among the owners.
    """

    elements: int
    ranks: int = 1
    index: int = 0

    @property
    def deal(self) -> int:
        """Elements of one deal. The length of a chunk is a multiple of it."""
        return 1 if self.ranks == 1 else self.ranks * GRANULE

    @property
    def padded(self) -> int:
        return -(-self.elements // self.deal) * self.deal

    @property
    def owned(self) -> int:
        """Number of elements that a rank owns, with padding."""
        return self.padded // self.ranks

    def own(self, start: int, stop: int) -> slice:
        """Return the indices, in the tensor of this rank's elements, of those that lie in a run of the buffer."""
        return slice(self._before(start), self._before(stop))

    def mine(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Return which elements of a run of the buffer this rank owns: bool [stop - start]."""
        if self.ranks == 1:
            return torch.ones(stop - start, dtype=torch.bool, device=device)
        return torch.arange(start, stop, device=device) // GRANULE % self.ranks == self.index

    def by_owner(self, run: torch.Tensor) -> torch.Tensor:
        """Sort a run of whole deals by owner, as a reduce-scatter needs it."""
        return run.view(-1, self.ranks, GRANULE).transpose(0, 1).flatten()

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """Undo `by_owner`: put the result of an all-gather into the order of the buffer."""
        return gathered.view(self.ranks, -1, GRANULE).transpose(0, 1).flatten()

    def _before(self, element: int) -> int:
        if self.ranks == 1:
            return element
        deals, rest = divmod(element, self.deal)
        return deals * GRANULE + min(max(rest - self.index * GRANULE, 0), GRANULE)
