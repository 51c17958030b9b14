"""The weights of a token and of a sequence in a step's objective.

The objective is the mean cross-entropy over all tokens of a step that count, plus the weighted balance loss and z-loss of all
MoE blocks, mean over all sequences of the step. With multi-token prediction, the same mean over each depth's own tokens is
added, with a weight (DeepSeek-V3, section 2.2). Ops compute losses as sums, and these weights turn the sums into means. So
gradients get their scale here and nowhere else. The weights depend on the numbers of tokens and sequences of all ranks. An all-
reduce sums these numbers while the ranks already compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from foldray.blueprint import ModelSpec
from foldray.comm import Groups
from foldray.model import Batch


class Weights:
    """The weights of one step. All ranks must make them together.

    Args:
        batches: all batches of the step at this rank's data-parallel place.
        model: what multi-token prediction predicts, and its weight.
    """

    def __init__(self, batches: Sequence[Batch], groups: Groups, dtype: torch.dtype, model: ModelSpec):
        fold = groups.fold
        self._copies, self._dtype = fold.tp * fold.cp * fold.pp, dtype  # ranks that count the same tokens
        self._further = model.mtp_weight / max(1, model.mtp_depth)
        depths = range(model.mtp_depth + 1)
        tokens = [torch.stack([batch.counted(depth) for batch in batches]).sum() for depth in depths]
        sequences = torch.full_like(tokens[0], sum(len(batch.target_BL) for batch in batches))
        self._counts = groups.control.start_all_reduce(torch.stack([sequences, *tokens]).double())

    def token(self, depth: int = 0) -> torch.Tensor:
        """Return the weight of a token's loss, scalar: 1 / (number of tokens that count), times the weight of further tokens.

        Without tokens that count, its value does not matter.

        Args:
            depth: number of tokens after the next one.
        """
        share = self._shares[1 + depth]
        return share * self._further if depth else share

    @property
    def sequence(self) -> torch.Tensor:
        """1 / (number of sequences), scalar."""
        return self._shares[0]

    def finish(self) -> None:
        """Wait for the numbers, which a rank without tokens does not read."""
        self._counts.wait()

    @cached_property
    def _shares(self) -> torch.Tensor:
        (counts,) = self._counts.wait()
        return (self._copies / counts.clamp_min(1)).to(self._dtype)
