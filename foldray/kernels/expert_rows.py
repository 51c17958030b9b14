"""How many rows each expert has: numbers that the host knows, or that only the device knows until the host asks.

Legend: N rows, sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from foldray.kernels.transfer import read_later, to_device


class ExpertRows:
    """The numbers of rows of experts whose rows follow each other.

    Grouped products read on the device where the rows of each expert end (`ends`). Whoever needs the numbers on the host reads
    `counts`; if only the device knows them, the host waits for it. So nobody asks who need not.
    """

    def __init__(self, read: Callable[[], list[int]], ends: Callable[[], Tensor] | None = None):
        """Make a record of numbers that `read` returns, and whose sums from the first one on `ends` returns, int32 [E]."""
        self._read, self._made = read, ends

    @classmethod
    def of(cls, counts: Sequence[int]) -> ExpertRows:
        """Make a record of numbers that the host knows."""
        rows = cls(lambda: list(counts))
        rows.counts = list(counts)
        return rows

    @classmethod
    def counted(cls, count_E: Tensor, known: Sequence[int] | None = None) -> ExpertRows:
        """Make a record of numbers that the device knows as whole numbers [E], and perhaps the host as well."""
        ends = partial(count_E.cumsum, 0, dtype=torch.int32)
        if known is None:
            return cls(read_later(count_E), ends)
        rows = cls.of(known)
        rows._made = ends
        return rows

    @property
    def are_known(self) -> bool:
        """Whether `counts` would not wait."""
        return "counts" in self.__dict__

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each expert. The host may wait for the device."""
        return self._read()

    def ends(self, device: torch.device) -> Tensor:
        """Return the row behind the last one of each expert, int32 [E], on the device of the rows. The host does not wait.

        Rows behind the last expert's belong to nobody. A grouped product leaves any numbers there.
        """
        if self._made is not None:
            return self._made()
        experts, first = len(self.counts), self.counts[0] if self.counts else 0
        if first and self.counts.count(first) == experts:  # of equal numbers, nothing goes from the host to the device
            return torch.arange(first, first * experts + 1, first, dtype=torch.int32, device=device)
        return to_device(list(accumulate(self.counts)), device, torch.int32)
