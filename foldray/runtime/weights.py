"""What one token, and one sequence, count in a step's objective.

The objective is the mean cross-entropy over all tokens of a step that count, and the mean balance and z-losses over all its
sequences. Every op differentiates sums. So there is one place where gradients get their scale, the loss itself, and one thing
that it depends on: how many there are in all, which ranks tell each other while they already compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from foldray.comm import Groups
from foldray.model import IGNORED, Batch


class Weights:
    """Of one step; a collective call, in which all ranks take part.

    Args:
        batches: of this rank's data-parallel place.
        dtype: of losses.
    """

    def __init__(self, batches: Sequence[Batch], groups: Groups, dtype: torch.dtype):
        fold = groups.fold
        self._copies, self._dtype = fold.tp * fold.cp * fold.pp, dtype  # ranks that count the same
        tokens = torch.stack([(batch.target_BL != IGNORED).sum() for batch in batches]).sum()
        sequences = tokens.new_tensor(sum(len(batch.target_BL) for batch in batches))
        self._counts = groups.control.start_all_reduce(torch.stack([tokens, sequences]).double())

    @property
    def token(self) -> torch.Tensor:
        """One over the tokens that count, scalar; any number if there are none."""
        return self._shares[0]

    @property
    def sequence(self) -> torch.Tensor:
        """One over the sequences, scalar."""
        return self._shares[1]

    @cached_property
    def _shares(self) -> torch.Tensor:
        (counts,) = self._counts.wait()
        return (self._copies / counts.clamp_min(1)).to(self._dtype)
