"""The autograd graphs of a micro-batch's ops, from forward to backward, and the gradients of weights that wait for their op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from foldray.kernels.later import Task
from foldray.kinds import ATTENTION, PROJECT
from foldray.model import Transformer
from foldray.runtime.op_graph import Compute, Computed, OpGraph, build
from foldray.schedule import Op, StepGraph

SumOf = Callable[[nn.Parameter], torch.Tensor]
"""Returns the sum of a parameter's gradients, to which ops add."""


class _Built(NamedTuple):
    """The graph of an op, and the gradients of weights that its backward leaves for later."""

    graph: OpGraph
    left: list[Task]


class OpGraphs:
    """Computes ops and their gradients.

    Args:
        graph: the graph of the step.
        sum_of: returns the sum of a parameter's gradients.
        training: whether ops go backward.
        now: returns the moment that `began` has.

    Attributes:
        began: the moment at which the last op that computes began to compute, after all waiting.
    """

    def __init__(self, model: Transformer, graph: StepGraph, sum_of: SumOf, training: bool, now: Callable[[], Any]):
        self.model, self.graph, self.sum_of, self.training, self.now = model, graph, sum_of, training, now
        self._graphs: dict[Op, _Built] = {}  # by forward op
        self._later: dict[Op, list[Task]] = {}  # by the op that computes these gradients of weights
        self._again: dict[Op, tuple[Compute, Sequence[torch.Tensor]]] = {}  # by forward op that will run again
        self.begin()

    def begin(self) -> None:
        """Say that an op begins to compute."""
        self.began = self.now()

    def compute(self, op: Op, compute: Compute, *inputs: torch.Tensor) -> Computed:
        """Compute the results of an op, detached from its graph."""
        self.begin()
        if not self.training or op.kind in self.graph.again:
            if self.training:
                # Attention that runs again takes its queries from projections that run again.
                self._again[op] = compute, () if op.kind == ATTENTION and self.graph.gathers else inputs
            with torch.no_grad():
                return compute(*inputs)
        return self._build(op, compute, inputs)

    def compute_again(self, op: Op, *inputs: torch.Tensor) -> Computed:
        """Compute the results of a forward op again, and keep its graph for its backward.

        Args:
            inputs: its inputs; none are those of the first time.
        """
        self.begin()
        compute, first = self._again.pop(op)
        return self._build(op, compute, inputs or first)

    def _build(self, op: Op, compute: Compute, inputs: Sequence[torch.Tensor]) -> Computed:
        # On a GPU, products of weights' gradients add to the sums themselves, after the rest of the op's backward.
        with self.model.later.collect(bool(self.graph.weights(op)) or next(self.model.parameters()).is_cuda) as left:
            computed, graph = build(compute, inputs)
        self._graphs[op] = _Built(graph, left)
        return computed

    def differentiate(self, op: Op, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of an op's inputs, given those of its results, and add the gradients of its parameters.

        The gradients of weights may be left to an op of their own (W).
        """
        self.begin()
        graph, left = self._graphs.pop(op._replace(direction="F"))
        parameters = self.model.parameters_of(ATTENTION if op.kind == PROJECT else op.kind, op.layer)
        found, parts = graph.differentiate(gradients, parameters)
        for parameter, part in zip(parameters, parts, strict=True):
            if part is not None:
                self.sum_of(parameter).add_(part)
        if ops := self.graph.weights(op):
            self._later.update((each, left) for each in ops)
        else:
            self._add_all(left)
        return found

    def add_left(self, op: Op) -> None:
        """Compute the gradients of weights that the backward of an op has left, and add them."""
        self.begin()
        self._add_all(self._later.pop(op))

    def _add_all(self, tasks: list[Task]) -> None:
        while tasks:  # the list must not keep what a task is computed from; nodes of the graph may hold the list
            task = tasks.pop(0)
            task.add(self.sum_of(task.weight))
