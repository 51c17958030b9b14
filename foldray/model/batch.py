"""What goes into the model, and the losses that come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foldray.comm import Communicator

IGNORED = -100
"""A target that does not count, as PyTorch's cross-entropy has it: padding, say, or what a user says in a conversation."""


class Batch(NamedTuple):
    """Whole sequences of one micro-batch; all ranks of a data-parallel place get the same, and each takes its piece.

    Shapes: token_BL, target_BL int64, targets that do not count `IGNORED`; segment_BL document numbers that attention does not
    cross, or None.
    """

    token_BL: torch.Tensor
    target_BL: torch.Tensor
    segment_BL: torch.Tensor | None = None

    def cut(self, parts: int) -> list[Batch]:
        """The same in so many equal parts along the batch.

        Raises:
            ValueError: it cannot be shared out evenly.
        """
        size, rest = divmod(len(self.token_BL), parts)
        if rest:
            raise ValueError(f"{len(self.token_BL)} sequences cannot be cut into {parts} equal parts")
        ranges = [slice(part * size, (part + 1) * size) for part in range(parts)]
        documents = self.segment_BL
        return [Batch(self.token_BL[at], self.target_BL[at], None if documents is None else documents[at]) for at in ranges]


class Losses(NamedTuple):
    """What a rank adds to the losses of a micro-batch, or of several: all are sums, over tokens that count or over sequences.

    Shapes: language float64 scalar, cross-entropy summed over the tokens that count; balance and z float64 scalars, summed over
    sequences, means over MoE blocks; tokens, sequences int64 scalars, how many those are. count_ME int64, assignments per MoE
    block and expert; dropped int64 scalar.
    """

    language: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    tokens: torch.Tensor
    sequences: torch.Tensor
    count_ME: torch.Tensor
    dropped: torch.Tensor

    def means(self) -> torch.Tensor:
        """[language, balance, z] by token or sequence, float64."""
        sums = torch.stack([self.language, self.balance, self.z])
        return sums / torch.stack([self.tokens, self.sequences, self.sequences]).clamp_min(1)


def add_losses(total: Losses, more: Losses | None) -> Losses:
    return total if more is None else Losses(*(a + b for a, b in zip(total, more, strict=True)))


def all_losses(losses: Sequence[Losses], control: Communicator) -> Losses:
    """The sum over micro-batches and ranks: one collective call, in float64, where counts are exact."""
    own = Losses(*(torch.stack(parts).sum(0) for parts in zip(*losses, strict=True)))
    flat = control.all_reduce(torch.cat([part.double().flatten() for part in own]))
    parts = flat.split([part.numel() for part in own])
    return Losses(*(part.view_as(like).to(like.dtype) for part, like in zip(parts, own, strict=True)))
