"""The autograd graph of one op, which begins at its inputs and ends at its results. It keeps only what its backward needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Computed(NamedTuple):
    """The results of an op.

    Args:
        ends: tensors that may have a gradient. Whole numbers among them have none.
        aside: other results.
    """

    ends: Sequence[torch.Tensor]
    aside: Any = None


Compute = Callable[..., Computed]


class _Input(NamedTuple):
    """An input of an op: the end of its graph, and what a gradient of zeros would be like."""

    edge: GradientEdge
    like: tuple[torch.Size, torch.dtype, torch.device]

    def zeros(self) -> torch.Tensor:
        shape, dtype, device = self.like
        return torch.zeros(shape, dtype=dtype, device=device)


class _Source(torch.autograd.Function):
    """Begins the graph of an op at an input. The graph of a leaf would keep the input, even if no backward needs it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class OpGraph(NamedTuple):
    """The autograd graph of an op, which its backward needs.

    Args:
        ends: edges of the results; None for a result without a gradient. An edge does not keep the result in memory.
        inputs: the edges at which the gradients of the inputs are taken. They do not keep the inputs either.
    """

    ends: list[GradientEdge | None]
    inputs: list[_Input]

    def differentiate(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Return the gradients of the inputs, and those of parameters; None for a parameter that was not used.

        Args:
            gradients: the gradients of the results, but not of whole numbers. Nor do these have gradients among the inputs.
        """
        ends = [(edge, gradient) for edge, gradient in zip(self.ends, gradients, strict=False) if edge is not None]
        wanted: list[Any] = [*(each.edge for each in self.inputs), *parameters]
        found = torch.autograd.grad([edge for edge, _ in ends], wanted, [gradient for _, gradient in ends], allow_unused=True)
        count = len(self.inputs)
        own = [each.zeros() if part is None else part for each, part in zip(self.inputs, found[:count], strict=True)]
        return own, found[count:]


def build(compute: Compute, inputs: Sequence[torch.Tensor]) -> tuple[Computed, OpGraph]:
    """Return the detached results of `compute(*inputs)`, and the graph that goes back to the inputs."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        sources = [_Source.apply(anchor, x.detach()) if x.is_floating_point() else x for x in inputs]
        results, aside = compute(*sources)
    edges = [get_gradient_edge(x) if x.requires_grad else None for x in results if x.is_floating_point()]
    starts = [_Input(get_gradient_edge(x), (x.shape, x.dtype, x.device)) for x in sources if x.is_floating_point()]
    return Computed([result.detach() for result in results], aside), OpGraph(edges, starts)
