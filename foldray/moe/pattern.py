"""Routing by a pattern, for measurements: the same experts for a position of a sequence, under every fold and schedule.

Legend: s positions, B sequences, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import torch

from foldray.kernels.transfer import to_device

_GOLDEN = 0.6180339887498949  # multiples of the golden ratio fill the unit interval evenly


class Pattern:
    """Chooses experts by systematic sampling (Madow 1949): each has exactly its share of all tokens, up to a token or so."""

    def __init__(self, shares: Sequence[float]):
        experts, self.topk = len(shares), round(sum(shares))
        # Neighbours never go together, so the order is not that of the popularity.
        self._order = Random(0).sample(range(experts), experts)
        *bounds, _ = accumulate(shares[expert] for expert in self._order)
        self._bounds = [*bounds, float(self.topk)]
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def choose(self, position_s: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return the experts of all tokens of a piece, int64 [B·s, K], all different for a token. All sequences have the same
        positions in the piece."""
        bound_E, order_E = self._on(position_s.device)
        point_sK = (position_s.double() * _GOLDEN % 1.0).unsqueeze(1) + torch.arange(self.topk, device=position_s.device)
        return order_E[torch.searchsorted(bound_E, point_sK, right=True)].repeat(sequences, 1)

    def renumber(self, order: Sequence[int]) -> None:
        """Choose the same experts after they have changed places: `order` has the expert of each place, by its place before."""
        places = {expert: place for place, expert in enumerate(order)}
        self._order = [places[expert] for expert in self._order]
        self._tables.clear()

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._tables:
            bounds = to_device(self._bounds, device, torch.float64)
            self._tables[device] = bounds, to_device(self._order, device, torch.int64)
        return self._tables[device]
