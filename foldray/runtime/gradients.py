"""One gradient rule and one norm rule.

Every gradient is scaled by 1/(DP·CP). Dense gradients are summed over DP×CP; expert gradients over EDP, for the all-to-all
has brought an expert the tokens of its whole EP group already. The norm counts each logical parameter once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from foldray.comm import Communicator, Groups


class GradientBuffer:
    """The gradients of one class, flat, in at least float32.

    Where a parameter has the buffer's precision, autograd accumulates straight into its slice; a narrower parameter's
    gradient is added as soon as it is complete and then freed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], communicator: Communicator):
        self.parameters, self.communicator = list(parameters), communicator
        example = self.parameters[0] if self.parameters else torch.empty(0)
        dtype = torch.promote_types(example.dtype, torch.float32)
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=dtype, device=example.device)
        pieces = self.flat.split([p.numel() for p in self.parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.dtype == dtype:
                parameter.grad = view
            else:
                parameter.register_post_accumulate_grad_hook(_into(view))

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, scale: float) -> None:
        """Scale, then sum over the class's communicator."""
        self.communicator.all_reduce(self.flat.mul_(scale))


def _into(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def accumulate(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            view.add_(parameter.grad)
            parameter.grad = None

    return accumulate


class Gradients:
    """The gradient buffers of a rank, their reduction and their norm."""

    def __init__(self, parameters: Iterable[nn.Parameter], expert_parameters: Iterable[nn.Parameter], groups: Groups):
        expert = set(expert_parameters)
        everything = list(parameters)
        self.groups = groups
        self.dense = GradientBuffer([p for p in everything if p not in expert], groups.dense_gradients)
        self.expert = GradientBuffer([p for p in everything if p in expert], groups.expert_gradients)
        self.buffers = (self.dense, self.expert)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero()

    def reduce(self) -> None:
        """Make every buffer hold the gradient of the mean loss over all data."""
        for buffer in self.buffers:
            buffer.reduce(1.0 / self.groups.dense_gradients.size)

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the reduced gradients over the whole model, float64 scalar."""
        return gradient_norm([self.dense.flat], [self.expert.flat], self.groups)

    def clip(self, limit: float | None) -> float:
        """Scale all gradients so that their norm is at most `limit`; the norm before."""
        norm = float(self.norm())
        if limit is not None and norm > limit:
            for buffer in self.buffers:
                buffer.flat.mul_(limit / (norm + 1e-6))
        return norm


def gradient_norm(dense: Sequence[torch.Tensor], expert: Sequence[torch.Tensor], groups: Groups) -> torch.Tensor:
    """Euclidean norm over the whole model, float64 scalar, the same on every rank.

    Reduced dense gradients are whole on every rank; each EP rank adds its own experts' squares.
    """

    def squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensors]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=dense[0].device)

    return (groups.tokens.all_reduce(squares(expert)) + squares(dense)).sqrt()
