"""Whole sequences of which each rank holds a piece. The balance loss and full-sequence dropping need them.

Legend: B sequences, s positions of this rank's piece, L positions of the whole sequence, R ranks that share it (TP×CP).
"""

from __future__ import annotations

import torch

from foldray.blueprint import Layout
from foldray.comm import Groups
from foldray.kernels.transfer import to_device


class Sequences:
    """The ranks that share this rank's sequences, and the positions that each of them holds."""

    def __init__(self, groups: Groups):
        fold = groups.fold
        self.communicator, self.tp = groups.sequence, fold.tp
        places = (fold.attention.coordinate(rank) for rank in self.communicator.ranks)
        self._layouts = [Layout(fold.cp, fold.tp, place["cp"], place["tp"]) for place in places]
        self._made: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # by length of whole sequences

    @property
    def ranks(self) -> int:
        return self.communicator.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks."""
        return self.communicator.all_reduce(x.clone()) if self.ranks > 1 else x

    def whole(self, x_BsK: torch.Tensor) -> torch.Tensor:
        """Gather the pieces of all ranks to whole sequences, in the order of positions: [B, s, K] → [B, L, K]."""
        if self.ranks == 1:
            return x_BsK
        pieces_RBsK = self.communicator.all_gather(x_BsK).view(self.ranks, *x_BsK.shape)
        held_BLK = pieces_RBsK.movedim(0, 1).flatten(1, 2)
        _, order_L = self._positions(held_BLK)
        return held_BLK[:, order_L]

    def own(self, x_BLK: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of whole sequences: [B, L, K] → [B, s, K]."""
        return x_BLK if self.ranks == 1 else x_BLK[:, self._positions(x_BLK)[0]]

    def _positions(self, x_BLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions that this rank holds, and of each position the index among those of all ranks in turn."""
        length, device = x_BLK.shape[1], x_BLK.device
        if (length, device) not in self._made:
            held_RL = to_device([layout.piece(length) for layout in self._layouts], device, torch.int64)
            self._made[length, device] = held_RL[self.communicator.index], torch.argsort(held_RL.flatten())
        return self._made[length, device]
