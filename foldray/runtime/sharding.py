"""The owners of the elements of a flat buffer that several ranks share (ZeRO, Rajbhandari et al. 2020).

A buffer has sections, which hold the gradients that backward completes at the same moment. Each of n ranks owns one n-th of
every section: rank i owns the i-th part. DeepSpeed's ZeRO divides its parameter groups in the same way, so with a section
for each group, both have the same owners.

A chunk takes the same share of every owner's part, so all owners receive equally much. In the order of chunks, a section
therefore counts by columns: its element c of owner 0, of owner 1 and so on come before element c + 1 of owner 0. The size
of chunks may change from step to step, and every rank still owns the same elements. The elements that a rank owns lie in one
tensor, section after section.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch


class Cut(NamedTuple):
    """The part of a section that a chunk takes.

    Args:
        section: the elements of the section in the buffer, with padding.
        columns: the elements that the chunk takes of every owner's part.
    """

    section: range
    columns: slice


@dataclass(frozen=True)
class Sharding:
    """The division of a buffer's elements among ranks. A single rank owns everything.

    Args:
        sections: number of elements of every section, without padding.
        index: this rank's number among the owners.
        granule: the parts of all owners are padded to multiples of this number of elements.
    """

    sections: tuple[int, ...]
    ranks: int = 1
    index: int = 0
    granule: int = 1

    @property
    def deal(self) -> int:
        """The length of a section, and of a chunk, is a multiple of this number of elements."""
        return self.ranks * self.granule

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of every section, and the end of the buffer."""
        return (0, *accumulate(-(-size // self.deal) * self.deal for size in self.sections))

    @property
    def padded(self) -> int:
        """Number of elements of the buffer, with padding."""
        return self.starts[-1]

    @property
    def owned(self) -> int:
        """Number of elements that a rank owns, with padding."""
        return self.padded // self.ranks

    def own(self, start: int, stop: int) -> slice:
        """Return the indices, in the tensor of this rank's elements, of those that lie in a run of one section."""
        section, first, end = self._mine(start, stop)
        offset = section.start // self.ranks - section.start - self.index * (len(section) // self.ranks)
        return slice(first + offset, end + offset)

    def within(self, start: int, stop: int) -> slice:
        """Return the elements of a run of one section that this rank owns, counted from the start of the run."""
        _, first, end = self._mine(start, stop)
        return slice(first - start, end - start) if first < end else slice(0, 0)

    def share(self, start: int, stop: int) -> slice:
        """Return the indices, in the tensor of this rank's elements, of those in a chunk."""
        return slice(start // self.ranks, stop // self.ranks)

    def cuts(self, start: int, stop: int) -> Iterator[Cut]:
        """Yield what a chunk takes of each section."""
        for begin, end in pairwise(self.starts):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                yield Cut(range(begin, end), slice((low - begin) // self.ranks, (high - begin) // self.ranks))

    def by_owner(self, section: torch.Tensor) -> torch.Tensor:
        """Return a section as one row for each owner."""
        return section.view(self.ranks, -1)

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """Put the elements of all owners, one owner after another, into the order of the buffer."""
        rows = gathered.view(self.ranks, -1)
        return torch.cat([rows[:, self.share(begin, end)].flatten() for begin, end in pairwise(self.starts)])

    def _mine(self, start: int, stop: int) -> tuple[range, int, int]:
        """Return the section of a run, and the first element of the run that this rank owns, and the end of those."""
        number = bisect_right(self.starts, start) - 1
        section = range(self.starts[number], self.starts[number + 1])
        part = len(section) // self.ranks
        first = section.start + self.index * part
        low, high = max(start, first), min(stop, first + part)
        return section, low, max(low, high)
