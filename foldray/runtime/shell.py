"""A whole step as one ordinary module, whose `loss.backward()` works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import Gradients
from foldray.schedule import Ordering


class StepModule(nn.Module):
    """Runs a step's list, all micro-batches and both directions, in its forward; its backward hands the gradients over.

    So the list's order is its own, not autograd's, hooks of other libraries fire once per parameter and step, and losses of
    several steps add up in `parameter.grad` as usual. There is no double backward.

    Args:
        reduced: whether the list reduces gradients too, as the ordering says; else they are those of this rank's share of the
            loss, and who sums them over ranks is up to the engine around.

    Attributes:
        losses: of the last list, by micro-batch.
    """

    def __init__(self, model: Transformer, groups: Groups, ordering: Ordering | None = None, reduced: bool = False):
        super().__init__()
        self.model, self.groups = model, groups
        self.gradients = Gradients(model, groups)
        self.execution = Execution(model, groups, self.gradients, ordering, reduces=reduced)
        self.losses: list[Losses] = []

    def forward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """What this rank adds to the step's language loss, with the gradients of the step's objective behind it."""
        return _Shell.apply(self, batches, *self.model.parameters())

    def run(self, batches: Sequence[Batch]) -> torch.Tensor:
        with torch.enable_grad():
            self.losses = self.execution.train(batches)
        assert self.execution.weights is not None
        language = torch.stack([losses.language for losses in self.losses]).sum()
        return language.float() * self.execution.weights.token.float()

    def hand_over(self, scale: torch.Tensor) -> list[torch.Tensor]:
        """This rank's gradients in the parameters' precision; sums start anew."""
        # New tensors: an engine may let those that it is given point into its own buffers.
        found = [(self.gradients.views[parameter] * scale).to(parameter.dtype) for parameter in self.model.parameters()]
        self.gradients.zero()
        return found


class _Shell(torch.autograd.Function):
    """A step's list as one node of autograd's graph, behind which each parameter gets one gradient."""

    @staticmethod
    def forward(ctx: Any, step: StepModule, batches: Sequence[Batch], *_: nn.Parameter) -> torch.Tensor:
        ctx.step = step
        return step.run(batches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.step.hand_over(scale)
