"""The optimizer on the host (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840): its weights, moments and update.

At the end of a step, the sums that a rank owns are copied to the host. The optimizer updates there, and the weights are copied
back. What travels are the sums in their own type, and weights in that of the model. On a GPU's host both ends are pinned memory.
Every copy is complete when its call returns, so that nothing on the host changes while the device reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from foldray.runtime.gradients import GradientBuffer


class OnHost:
    """The weights that a rank's optimizer updates, and their gradients, in the memory of the host.

    Args:
        buffers: the gradient buffers of the rank.
    """

    def __init__(self, buffers: Sequence[GradientBuffer]):
        self._parts = {buffer: _Part(buffer) for buffer in buffers}
        self._part_of = {parameter: part for part in self._parts.values() for parameter in part.buffer.parameters}

    def master(self, parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
        """Return what the optimizer updates of a parameter, with these values and with its gradient, both on the host."""
        part = self._part_of[parameter]
        master = nn.Parameter(part.buffer.part(part.weights, parameter).copy_(values))
        master.grad = part.buffer.part(part.gradients, parameter)
        return master

    def fetch(self) -> None:
        """Copy the sums of all gradients from the device."""
        for part in self._parts.values():
            part.gradients.copy_(part.buffer.sums)

    def weights(self, buffer: GradientBuffer) -> torch.Tensor:
        """Return the weights that a rank owns of a buffer, in the layout of its sums, on the host in the type of the model."""
        part = self._parts[buffer]
        return part.weights if part.rounded is None else part.rounded.copy_(part.weights)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that is kept on the host beside the moments: weights, gradients, and weights in the model's type."""
        for part in self._parts.values():
            yield from (each for each in (part.weights, part.gradients, part.rounded) if each is not None)


class _Part:
    """What belongs to one gradient buffer, flat, in the layout of its sums.

    Attributes:
        rounded: the weights in the type of the model, on their way to it; None if that is the type of the sums.
    """

    def __init__(self, buffer: GradientBuffer):
        self.buffer, owned, narrow = buffer, len(buffer.sums), buffer.parameters[0].dtype
        self.weights, self.gradients = (_zeros(owned, buffer.dtype, buffer.device) for _ in range(2))
        self.rounded = None if narrow == buffer.dtype else _zeros(owned, narrow, buffer.device)


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros on the host, in pinned memory if they are for a GPU."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
