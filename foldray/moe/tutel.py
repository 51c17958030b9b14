"""Tutel's fast dispatcher as a backend. Every expert gets equally many rows. Tutel's float32 kernels copy and sum them."""

from __future__ import annotations

import logging

import torch

from foldray.errors import MissingPackage
from foldray.kernels.permutation import sort_by_expert
from foldray.moe.contracts import Sent
from foldray.moe.router import Routing

INSTALL = "NO_CUDA=1 pip install --no-build-isolation 'foldray[tutel]' (leave NO_CUDA out on a GPU; needs a C++ compiler)"


class TutelPermutation:
    """Every expert gets `Routing.capacity` rows, or as many as the busiest expert if that is None. Empty rows are zero.

    Raises:
        MissingPackage: Tutel is not installed, or its compiled kernels are not.
    """

    def __init__(self) -> None:
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # Tutel logs while it is imported
        try:
            from tutel import moe
        except Exception:  # an incomplete installation fails in more ways than ImportError
            raise MissingPackage("moe.backend", "tutel", "tutel", INSTALL) from None
        finally:
            logging.disable(level)
        self._fast_dispatcher = moe.fast_dispatcher

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        """Copy tokens to rows. The tokens must be float32, the only type of Tutel's kernels on a CPU."""
        experts = routing.tally.count_BE.shape[1]
        _, position_TK, count_E = sort_by_expert(routing.expert_TK, routing.keep_TK, experts)
        rows = max(1, int(count_E.max())) if routing.capacity is None else routing.capacity
        place_TK = position_TK - (count_E.cumsum(0) - count_E)[routing.expert_TK]
        place_TK = place_TK.masked_fill(position_TK < 0, rows)  # beyond the expert's last row: the kernels skip it
        dispatcher = self._fast_dispatcher(experts, rows, x_TH.shape[1], torch.float32)
        slots = _columns(routing.expert_TK), _columns(place_TK)
        dispatcher.update(*slots, _columns(routing.weight_TK.detach()), capacity=rows)
        return dispatcher.encode(x_TH.contiguous()), Sent(torch.full_like(count_E, rows), (dispatcher, slots, rows))

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        dispatcher, slots, rows = sent.memory
        dispatcher.update(*slots, _columns(weight_TK), capacity=rows)
        return dispatcher.decode(y_NH.contiguous())


def _columns(table_TK: torch.Tensor) -> list[torch.Tensor]:
    return [column.contiguous() for column in table_TK.unbind(1)]
