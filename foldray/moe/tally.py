"""What a layer's router remembers from one piece of a micro-batch to the next: who competes for capacity, and balance."""

from __future__ import annotations

import torch

from foldray.blueprint import RouterSpec
from foldray.moe.sequence import Sequences


class Tally:
    """Sums over the pieces of one micro-batch in one MoE layer.

    Attributes:
        sequences, tokens: B, and how many tokens of each this rank has in all pieces.
        count_BE, score_BE, z: assignments and scores of this rank per sequence and expert, and squared log-sum-exps.
        dropped: assignments beyond capacity.
    """

    def __init__(self, sequences: int, tokens: int):
        self.sequences, self.tokens = sequences, tokens
        self.count_BE = self.score_BE = self.z = self.dropped = torch.empty(0)
        self._competed_BE: torch.Tensor | None = None
        self._share_BE: torch.Tensor | None = None
        self._pieces = 0

    def compete(self, count_BE: torch.Tensor) -> torch.Tensor | None:
        """Note the assignments of the piece at hand; those of the pieces before it."""
        before_BE = self._competed_BE
        self._competed_BE = count_BE if before_BE is None else before_BE + count_BE
        return before_BE

    def add(self, count_BE: torch.Tensor, score_BE: torch.Tensor, z: torch.Tensor, dropped: torch.Tensor) -> None:
        """Another piece."""
        if self._pieces:
            count_BE, score_BE, z, dropped = (
                self.count_BE + count_BE,
                self.score_BE + score_BE,
                self.z + z,
                self.dropped + dropped,
            )
        self.count_BE, self.score_BE, self.z, self.dropped = count_BE, score_BE, z, dropped
        self._pieces += 1

    def close(self, sequences: Sequences) -> None:
        """After the last piece: whole sequences' shares, over all ranks that hold a piece of them (a collective call)."""
        count_BE = sequences.sum(self.count_BE).to(self.score_BE.dtype)
        self._share_BE = count_BE / count_BE.sum(-1, keepdim=True)
        self._length = self.tokens * sequences.ranks

    def slopes(self) -> tuple[torch.Tensor, float]:
        """What balance_loss is per unit of score_BE, and z_loss per unit of z.

        Balance is E · Σ_e f_e · P_e of every sequence, summed over sequences, with f_e the share of a sequence's assignments
        and P_e its mean score (Switch Transformer, equation 4); evenly used experts make it 1. Shares are those of whole
        sequences, so it depends neither on the fold, nor on the micro-batch, nor on pieces. z is the mean over a sequence's
        tokens, summed over sequences.
        """
        assert self._share_BE is not None, "pieces are missing"
        return self._share_BE * (self._share_BE.shape[1] / self._length), 1 / self._length

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's contributions to balance and z-loss: sums over sequences."""
        slope_BE, slope = self.slopes()
        return (slope_BE * self.score_BE).sum(), self.z * slope

    def objective(self, spec: RouterSpec) -> torch.Tensor:
        """Both, weighted."""
        balance, z = self.losses()
        return spec.balance_loss * balance + spec.z_loss * z
