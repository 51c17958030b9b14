"""A whole step as one module, for libraries that call `loss.backward()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.orders import Ordering
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import Gradients


class StepModule(nn.Module):
    """Its forward runs a step's list, with all micro-batches in both directions. Its backward returns the gradients.

    So the list, not autograd, orders the ops. Hooks of other libraries fire once per parameter and step. The gradients of
    several steps add up in `parameter.grad` as usual. There is no double backward.

    Args:
        gradients: where the list sums gradients; None makes buffers that are not sharded.
        reduced: whether the list reduces gradients. If not, they are those of this rank's share of the loss, and the caller
            must sum them over ranks.

    Attributes:
        losses: this rank's contributions to the losses of the last step, one for each part of a micro-batch.
    """

    def __init__(
        self,
        model: Transformer,
        groups: Groups,
        ordering: Ordering | None = None,
        gradients: Gradients | None = None,
        reduced: bool = False,
    ):
        super().__init__()
        self.model, self.groups = model, groups
        self.gradients = gradients or Gradients(model, groups)
        self.execution = Execution(model, groups, self.gradients, ordering, reduces=reduced)
        self.losses: list[Losses] = []

    def forward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return this rank's contribution to the step's language loss, scalar float32.

        Its backward gives the gradient of the step's whole objective.
        """
        return _Shell.apply(self, batches, *self.model.trained_parameters)

    def run(self, batches: Sequence[Batch]) -> torch.Tensor:
        with torch.enable_grad():
            self.losses = self.execution.train(batches)
        assert self.execution.weights is not None
        language = torch.stack([losses.language for losses in self.losses]).sum()
        return language.float() * self.execution.weights.token().float()

    def hand_over(self, scale: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's gradients times `scale`, in the parameters' types, and set the sums to zero."""
        # These must be new tensors, because an engine may make views of its own buffers from them.
        gradients = [(self.gradients.views[parameter] * scale).to(parameter.dtype) for parameter in self.model.trained_parameters]
        self.gradients.zero()
        return gradients


class _Shell(torch.autograd.Function):
    """A step's list as one node of autograd's graph. Its backward gives each parameter one gradient."""

    @staticmethod
    def forward(ctx: Any, step: StepModule, batches: Sequence[Batch], *_: nn.Parameter) -> torch.Tensor:
        ctx.step = step
        return step.run(batches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.step.hand_over(scale)
