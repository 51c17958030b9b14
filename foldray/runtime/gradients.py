"""One gradient rule and one norm rule.

Every gradient is scaled by 1/(DP·CP) and summed over the ranks that have seen other data with the same weights:

| class | who holds it | summed over |
|---|---|---|
| dense | cut over TP | DP×CP |
| replicated | whole on every TP rank, which sees only its piece of the sequence | TP×DP×CP |
| expert | its EP×ETP place; the all-to-all has brought it that whole group's tokens | EDP |

An embedding that the first and the last stage share is then summed over the two. The norm counts every element of the model once:
each is counted by the first rank that holds it, and the counts are summed over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from foldray.comm import Communicator, Groups
from foldray.model import Transformer


class GradientBuffer:
    """The gradients of one class, flat, in at least float32."""

    def __init__(self, parameters: Sequence[nn.Parameter], communicator: Communicator):
        self.parameters, self.communicator = list(parameters), communicator
        example = self.parameters[0] if self.parameters else torch.empty(0)
        dtype = torch.promote_types(example.dtype, torch.float32)
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=dtype, device=example.device)
        pieces = self.flat.split([p.numel() for p in self.parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def reduce(self, scale: float) -> None:
        """Scale, then sum over the class's communicator."""
        self.communicator.all_reduce(self.flat.mul_(scale))


class Gradients:
    """The gradient buffers of a rank, their reduction and their norm."""

    def __init__(self, model: Transformer, groups: Groups):
        self.groups = groups
        self.dense = GradientBuffer(model.by_class("dense"), groups.dense_gradients)
        self.replicated = GradientBuffer(model.by_class("replicated"), groups.replicated_gradients)
        self.expert = GradientBuffer(model.by_class("expert"), groups.expert_gradients)
        self.buffers = (self.dense, self.replicated, self.expert)
        self.views = {p: view for buffer in self.buffers for p, view in zip(buffer.parameters, buffer.views, strict=True)}
        self._tied, self._counted = model.tied(), model.counted()

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self.views[parameter].add_(gradient)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.flat.zero_()

    def reduce(self) -> None:
        """Make every buffer hold the gradient of the mean loss over all data."""
        for buffer in self.buffers:
            buffer.reduce(1.0 / self.groups.dense_gradients.size)
        for parameter in self._tied:
            # Last of all, as a sum of two numbers: it has the same bits on both stages, which therefore never drift apart.
            self.groups.tied_gradients.all_reduce(self.views[parameter])

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the reduced gradients over the whole model, float64 scalar."""
        return gradient_norm([self.views[parameter] for parameter in self._counted], self.dense.flat.device, self.groups)

    def clip(self, limit: float | None) -> float:
        """Scale all gradients so that their norm is at most `limit`; the norm before."""
        norm = float(self.norm())
        if limit is not None and norm > limit:
            for buffer in self.buffers:
                buffer.flat.mul_(limit / (norm + 1e-6))
        return norm


def gradient_norm(counted: Iterable[torch.Tensor], device: torch.device, groups: Groups) -> torch.Tensor:
    """Euclidean norm over the whole model, float64 scalar, the same on every rank.

    Args:
        counted: the reduced gradients that this rank counts (`Transformer.counted`).
    """
    parts = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in counted]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
    return groups.control.all_reduce(total).sqrt()
