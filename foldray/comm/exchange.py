"""The all-to-all as a differentiable step: its gradient is the all-to-all back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foldray.comm.groups import Communicator


def exchange(x_NH: torch.Tensor, communicator: Communicator, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
    """Rows to their members and rows from them, as `Communicator.all_to_all`, with a gradient."""
    if communicator.size == 1:
        return x_NH
    return _Exchange.apply(x_NH, communicator, received, sent)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: torch.Tensor, communicator: Communicator, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        ctx.way_back = communicator, sent, received
        return communicator.all_to_all(x_NH, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        communicator, received, sent = ctx.way_back
        return communicator.all_to_all(grads[0], received, sent), None, None, None
