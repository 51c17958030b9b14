"""The executor: runs a step's schedule on one rank.

A segment of the model (embedding, block, head) builds its own small graph going forward, and going backward that graph alone is
differentiated: what runs when is the schedule's choice, not autograd's. Gradients go to whoever adds them up, and never through
`parameter.grad`, so that no hook of another library fires before the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from foldray.comm import Groups, Pending
from foldray.model import Batch, Losses, Transformer, add_losses
from foldray.schedule import Op, PipelineGraph, pipeline

AddGradient = Callable[[nn.Parameter, torch.Tensor], None]


class Execution:
    """Runs this rank's part of every step.

    Args:
        add: takes each parameter's gradient as soon as a segment has gone backward; sums up over micro-batches.
    """

    def __init__(self, model: Transformer, groups: Groups, add: AddGradient):
        self.model, self.groups, self.add = model, groups, add
        self.segments = {stage.number: model.segments(stage) for stage in model.stages}
        self._position = groups.coordinate["attention"]["pp"]
        self._orders: dict[PipelineGraph, tuple[Op, ...]] = {}

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        """Forward and backward of one optimizer step; what this rank adds to each micro-batch's losses.

        The gradient is that of the mean over micro-batches, of this rank's share of the objective.
        """
        return _Run(self, batches, training=True).run()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Losses]:
        """Forward only."""
        return _Run(self, batches, training=False).run()

    def graph(self, micro_batches: int, backward: bool = True) -> PipelineGraph:
        return PipelineGraph(self.groups.fold.pp, micro_batches, self.model.ownership.virtual_stages, backward)

    def order(self, graph: PipelineGraph) -> tuple[Op, ...]:
        """This rank's list; made once, for every step has the same."""
        if graph not in self._orders:
            self._orders[graph] = pipeline(graph)[self._position]
        return self._orders[graph]


class _Saved(NamedTuple):
    """What a segment's backward needs."""

    parameters: list[nn.Parameter]
    x: torch.Tensor | None
    y: torch.Tensor | None
    objective: torch.Tensor | None


class _Run:
    """One pass through a schedule: what is alive between its ops, each thing until the op that uses it up."""

    def __init__(self, execution: Execution, batches: Sequence[Batch], training: bool):
        self.execution, self.batches, self.training = execution, batches, training
        self.graph = execution.graph(len(batches), training)
        self.losses = [execution.model.no_losses() for _ in batches]
        self.saved: dict[tuple[int, int], list[_Saved]] = {}
        self.leaving: dict[Op, torch.Tensor] = {}  # by the handover that takes it
        self.arriving: dict[Op, Pending] = {}
        self.sending: dict[tuple[str, int], Pending] = {}  # the last one to each neighbour

    def run(self) -> list[Losses]:
        steps = {("stage", "F"): self._forward, ("stage", "B"): self._backward}
        for op in self.execution.order(self.graph):
            steps.get((op.kind, op.direction), self._hand_over)(op)
        for pending in self.sending.values():
            pending.wait()
        return self.losses

    def _forward(self, op: Op) -> None:
        x, saved = self._arrived(op), []
        for segment in self.execution.segments[op.layer]:
            if x is not None:
                x = x.detach().requires_grad_(self.training)
            output = segment.run(x, self.batches[op.micro_batch])
            self.losses[op.micro_batch] = add_losses(self.losses[op.micro_batch], output.losses)
            saved.append(_Saved(segment.parameters, x, output.x_BsH, output.objective))
            x = output.x_BsH
        if self.training:
            self.saved[op.layer, op.micro_batch] = saved
        if x is not None:
            self.leaving[op._replace(kind="handover")] = x.detach()

    def _backward(self, op: Op) -> None:
        gradient, saved = self._arrived(op), self.saved.pop((op.layer, op.micro_batch))
        while saved:
            gradient = self._differentiate(saved.pop(), gradient)
        if gradient is not None:
            self.leaving[op._replace(kind="handover")] = gradient

    def _differentiate(self, segment: _Saved, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Give a segment's parameters their gradients; the gradient of its input."""
        ends, grads = [], []
        if segment.y is not None:
            ends.append(segment.y)
            grads.append(gradient)
        if segment.objective is not None and segment.objective.requires_grad:
            ends.append(segment.objective)
            grads.append(torch.full_like(segment.objective, 1 / len(self.batches)))
        inputs = [*segment.parameters, *([] if segment.x is None else [segment.x])]
        found = torch.autograd.grad(ends, inputs, grads, allow_unused=True)
        for parameter, part in zip(segment.parameters, found, strict=False):
            if part is not None:
                self.execution.add(parameter, part)
        return None if segment.x is None else found[-1]

    def _hand_over(self, op: Op) -> None:
        """Start to send or to receive what passes between two stages."""
        sender, receiver = self.graph.where(op)
        groups = self.execution.groups
        communicator = groups.activations if op.direction == "F" else groups.output_gradients
        if communicator.index == receiver:
            self.arriving[op] = communicator.receive(self._empty(op.micro_batch), sender)
            return
        channel = (op.direction, receiver)
        if channel in self.sending:
            self.sending[channel].wait()  # its memory is free then; the receive that it waits for stands before this op
        self.sending[channel] = communicator.send(self.leaving.pop(op), receiver)

    def _arrived(self, op: Op) -> torch.Tensor | None:
        """What a neighbour handed over for this op, if one did."""
        for need in self.graph.needs(op):
            if need.kind == "handover":
                (tensor,) = self.arriving.pop(need).wait()
                return tensor
        return None

    def _empty(self, micro_batch: int) -> torch.Tensor:
        """Room for activations, or their gradient, between stages: [B, s, H]."""
        model, (B, L) = self.execution.model, self.batches[micro_batch].token_BL.shape
        weight = next(model.parameters())
        return weight.new_empty(B, L // (model.layout.cp * model.layout.tp), model.spec.hidden)
