"""Tutel's fast dispatcher as a backend: rows in equal blocks per expert, copied and summed by Tutel's kernels (float32)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from foldray.errors import MissingPackage
from foldray.kernels.permutation import sort_by_expert
from foldray.moe.router import Routing

INSTALL = "NO_CUDA=1 pip install --no-build-isolation 'foldray[tutel]' (leave NO_CUDA out on a GPU; needs a C++ compiler)"


class TutelPermutation:
    """Every expert gets as many rows as its capacity, or as the busiest expert's without one; empty rows are zero.

    Raises:
        MissingPackage: Tutel is not installed, or its compiled kernels are not.
    """

    def __init__(self) -> None:
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # Tutel logs as it is imported
        try:
            from tutel import moe
        except Exception:  # an incomplete installation fails in more ways than ImportError
            raise MissingPackage("moe.backend", "tutel", "tutel", INSTALL) from None
        finally:
            logging.disable(level)
        self._fast_dispatcher = moe.fast_dispatcher

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Needs float32 tokens; the kernels have no other type on a CPU."""
        experts = routing.count_BE.shape[1]
        _, position_TK, count_E = sort_by_expert(routing.expert_TK, routing.keep_TK, experts)
        rows = max(1, int(count_E.max())) if routing.capacity is None else routing.capacity
        place_TK = position_TK - (count_E.cumsum(0) - count_E)[routing.expert_TK]
        place_TK = place_TK.masked_fill(position_TK < 0, rows)  # beyond the block: the kernels pass over it
        dispatcher = self._fast_dispatcher(experts, rows, x_TH.shape[1], torch.float32)
        columns = [[part.contiguous() for part in table.unbind(1)] for table in (routing.expert_TK, place_TK, routing.weight_TK)]
        dispatcher.update(*columns, capacity=rows)
        return dispatcher.encode(x_TH.contiguous()), torch.full_like(count_E, rows), dispatcher

    def decode(self, y_NH: torch.Tensor, memory: Any) -> torch.Tensor:
        return memory.decode(y_NH.contiguous())
