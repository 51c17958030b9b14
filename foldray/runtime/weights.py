"""The weights of a token and of a sequence in a step's objective.

The objective is the mean cross-entropy over all tokens of a step that count, plus the weighted balance loss and z-loss of
all MoE blocks, mean over all sequences of the step. Ops compute losses as sums, and these two weights turn the sums into
means. So gradients get their scale here and nowhere else. The weights depend on the numbers of tokens and sequences of all
ranks. An all-reduce sums these numbers while the ranks already compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from foldray.comm import Groups
from foldray.model import IGNORED, Batch


class Weights:
    """The weights of one step. All ranks must make them together.

    Args:
        batches: all batches of the step at this rank's data-parallel place.
        dtype: type of the weights.
    """

    def __init__(self, batches: Sequence[Batch], groups: Groups, dtype: torch.dtype):
        fold = groups.fold
        self._copies, self._dtype = fold.tp * fold.cp * fold.pp, dtype  # ranks that count the same tokens
        tokens = torch.stack([(batch.target_BL != IGNORED).sum() for batch in batches]).sum()
        sequences = torch.full_like(tokens, sum(len(batch.target_BL) for batch in batches))
        self._counts = groups.control.start_all_reduce(torch.stack([tokens, sequences]).double())

    @property
    def token(self) -> torch.Tensor:
        """1 / (number of tokens that count), scalar; without such tokens, its value does not matter."""
        return self._shares[0]

    @property
    def sequence(self) -> torch.Tensor:
        """1 / (number of sequences), scalar."""
        return self._shares[1]

    def finish(self) -> None:
        """Wait for the numbers, which a rank without tokens does not read."""
        self._counts.wait()

    @cached_property
    def _shares(self) -> torch.Tensor:
        (counts,) = self._counts.wait()
        return (self._copies / counts.clamp_min(1)).to(self._dtype)
