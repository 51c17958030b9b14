"""Balance over the pieces of a micro-batch: sums that grow piece by piece, and the losses that they make at last.

B sequences, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foldray.blueprint import RouterSpec
from foldray.moe.sequence import Sequences


@dataclass(frozen=True)
class Tally:
    """Sums over pieces of one micro-batch in one MoE layer. The micro-batch owns it; nobody else adds to it.

    Args:
        count_BE: this rank's assignments per sequence and expert before dropping, int64.
        score_BE: this rank's scores per sequence and expert.
        z: squared log-sum-exps of this rank's logits.
        dropped: assignments beyond capacity.
        competed_BE: assignments that took a place in the experts' capacities; None where pieces do not compete.
    """

    count_BE: torch.Tensor
    score_BE: torch.Tensor
    z: torch.Tensor
    dropped: torch.Tensor
    competed_BE: torch.Tensor | None

    def __add__(self, other: Tally) -> Tally:
        competed_BE = None
        if self.competed_BE is not None and other.competed_BE is not None:
            competed_BE = self.competed_BE + other.competed_BE
        return Tally(
            self.count_BE + other.count_BE,
            self.score_BE + other.score_BE,
            self.z + other.z,
            self.dropped + other.dropped,
            competed_BE,
        )

    def detach(self) -> Tally:
        return replace(self, score_BE=self.score_BE.detach(), z=self.z.detach())

    def balance(self, sequences: Sequences, tokens: int) -> Balance:
        """Behind the last piece, the balance of the whole sequences: a collective call of all ranks that hold a piece of them.

        Args:
            tokens: of each sequence that this rank holds, in all pieces.
        """
        count_BE = sequences.sum(self.count_BE).to(self.score_BE.dtype)
        return Balance(self, count_BE / count_BE.sum(-1, keepdim=True), tokens * sequences.ranks)


@dataclass(frozen=True)
class Balance:
    """How evenly a layer uses its experts.

    Args:
        tally: of this rank's pieces.
        share_BE: each expert's share of a whole sequence's assignments.
        length: tokens of a whole sequence.
    """

    tally: Tally
    share_BE: torch.Tensor
    length: int

    def slopes(self) -> tuple[torch.Tensor, float]:
        """What balance_loss is per unit of score_BE, and z_loss per unit of z.

        Balance is E · Σ_e f_e · P_e of every sequence, summed over sequences, with f_e the share of a sequence's assignments
        and P_e its mean score (Switch Transformer, equation 4); evenly used experts make it 1. Shares are those of whole
        sequences, so balance depends neither on the fold, nor on the micro-batch, nor on pieces. z is the mean over a sequence's
        tokens, summed over sequences.
        """
        return self.share_BE * (self.share_BE.shape[1] / self.length), 1 / self.length

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's contributions to balance and z-loss: sums over sequences."""
        slope_BE, slope = self.slopes()
        return (slope_BE * self.tally.score_BE).sum(), self.tally.z * slope

    def objective(self, spec: RouterSpec) -> torch.Tensor:
        """Both losses, weighted."""
        balance, z = self.losses()
        return spec.balance_loss * balance + spec.z_loss * z
