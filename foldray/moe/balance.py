"""The balance of experts in a micro-batch: sums over its pieces, and the losses that follow from them.

Legend: B sequences, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foldray.blueprint import RouterSpec
from foldray.moe.sequence import Sequences


@dataclass(frozen=True)
class Tally:
    """Sums over pieces of one micro-batch in one MoE layer. `+` joins the sums of different pieces.

    Args:
        count_BE: this rank's assignments per sequence and expert before dropping, int64.
        score_BE: this rank's scores (`router.scores`) per sequence and expert, summed over tokens.
        z: squared log-sum-exp of the logits, summed over this rank's tokens, scalar.
        dropped: number of this rank's dropped assignments, int64 scalar.
        competed_BE: assignments that competed for capacity, kept or dropped, int64. They are those of the whole sequences
            with `drop_scope: sequence`, else this rank's. None if pieces do not compete with each other.
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
        """Return the balance of the whole sequences, once this tally has all pieces: `tokens` of each sequence on this rank.

        All ranks that hold a piece of the sequences must call this.
        """
        count_BE = sequences.sum(self.count_BE).to(self.score_BE.dtype)
        return Balance(self, count_BE / count_BE.sum(-1, keepdim=True), tokens * sequences.ranks)


@dataclass(frozen=True)
class Balance:
    """How evenly a layer uses its experts: each expert's share of the assignments of a whole sequence of `length` tokens (the
    shares of a sequence sum to 1), and the sums over this rank's pieces.
    """

    tally: Tally
    share_BE: torch.Tensor
    length: int

    def slopes(self) -> tuple[torch.Tensor, float]:
        """Return the derivatives of the balance loss by score_BE [B, E], and of the z-loss by z.

        The balance loss of a sequence is E · Σ_e f_e · P_e, where f_e is an expert's share of the sequence's assignments and
        P_e its mean score (Switch Transformer, equation 4). It is 1 if all experts are used evenly. The shares are those of
        whole sequences, so the loss depends neither on the fold, nor on the micro-batch, nor on pieces. The z-loss of a
        sequence is the mean of the squared log-sum-exp over its tokens (ST-MoE, Zoph et al. 2022). Both losses are summed
        over sequences.
        """
        return self.share_BE * (self.share_BE.shape[1] / self.length), 1 / self.length

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's contributions to the balance loss and to the z-loss, summed over sequences: two scalars."""
        slope_BE, slope = self.slopes()
        return (slope_BE * self.tally.score_BE).sum(), self.tally.z * slope

    def objective(self, spec: RouterSpec) -> torch.Tensor:
        """Return the weighted sum of both losses, scalar."""
        balance, z = self.losses()
        return spec.balance_loss * balance + spec.z_loss * z
