"""The executor: runs a step's schedule on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from foldray.comm import Groups, Pending
from foldray.model import Batch, Losses, Transformer
from foldray.runtime.micro_batch import AddGradient, MicroBatch
from foldray.runtime.trace import Trace
from foldray.schedule import Op, Ordering, Slicing, StepGraph, expand, pipeline


class Execution:
    """Runs this rank's part of every step.

    Args:
        add: takes each parameter's gradient as soon as an op has gone backward; sums up over pieces and micro-batches.
        ordering: how tokens are cut, and in which order pieces go.
    """

    def __init__(self, model: Transformer, groups: Groups, add: AddGradient, ordering: Ordering | None = None):
        self.model, self.groups, self.add = model, groups, add
        self.trace: Trace | None = None
        self.reorder(ordering or Ordering())
        self._position = groups.coordinate["attention"]["pp"]

    def reorder(self, ordering: Ordering) -> None:
        """Cut and order the steps that follow in another way."""
        self.ordering = ordering
        self.model.slice(ordering.slicing.attention if ordering.slicing else None)
        self._orders: dict[StepGraph, tuple[Op, ...]] = {}

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        """Forward and backward of one optimizer step; what this rank adds to each micro-batch's losses.

        The gradient is that of the mean over micro-batches, of this rank's share of the objective.
        """
        return _Run(self, batches, training=True).run()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Losses]:
        """Forward only."""
        return _Run(self, batches, training=False).run()

    def graph(self, batches: Sequence[Batch], backward: bool = True) -> StepGraph:
        model = self.model
        length, ranks = batches[0].token_BL.shape[1], model.layout.cp * model.layout.tp
        slicing = self.ordering.slicing or Slicing((length,), (length,))
        kinds = tuple(tuple(model.spec.block_kind(layer) for layer in stage.layers) for stage in model.ownership.stages)
        return StepGraph(
            kinds,
            slicing.shared(ranks),
            self.groups.fold.pp,
            len(batches),
            # In evaluation the last micro-batch may be smaller on some ranks, and so what they send.
            ragged=not (model.spec.router.pad and backward),
            recompute=self.ordering.recompute,
            backward=backward,
        )

    def order(self, graph: StepGraph) -> tuple[Op, ...]:
        """This rank's list; made once, for every step has the same."""
        if graph not in self._orders:
            order = expand(graph, pipeline(graph.pipeline)[self._position], self.ordering.forward, self.ordering.backward)
            self._compare(order)
            self._orders[graph] = order
        return self._orders[graph]

    def _compare(self, order: tuple[Op, ...]) -> None:
        """Make sure that the ranks of a stage run the same list: otherwise their collectives would never meet.

        Raises:
            RuntimeError: they do not.
        """
        stage = self.groups.replicated_gradients
        own = torch.tensor([zlib.crc32(repr(order).encode())], device=next(self.model.parameters()).device)
        if len(set(stage.all_gather(own).tolist())) > 1:
            raise RuntimeError(f"ranks {stage.ranks} of a stage have other schedules; this one has {self.ordering}")


class _Run:
    """One pass through a list: its micro-batches, and what passes between stages."""

    def __init__(self, execution: Execution, batches: Sequence[Batch], training: bool):
        model = execution.model
        self.groups, self.graph, self.trace = execution.groups, execution.graph(batches, training), execution.trace
        self.order = execution.order(self.graph)
        self.micro_batches = [
            MicroBatch(model, self.graph, batch, execution.add, 1 / len(batches), training) for batch in batches
        ]
        self.like = next(model.parameters())
        self.shapes = [(len(batch.token_BL), self.graph.slicing.length, model.spec.hidden) for batch in batches]
        self.sending: dict[tuple[str, int], Pending] = {}  # the last one to each neighbour

    def run(self) -> list[Losses]:
        trace = self.trace
        if trace is not None:
            trace.start()
        for op in self.order:
            pending = self._hand_over(op) if op.kind == "handover" else self.micro_batches[op.micro_batch].run(op)
            if trace is not None:
                trace.ran(op, self.micro_batches[op.micro_batch].began, pending)
        for pending in self.sending.values():
            pending.wait()
        if trace is not None:
            trace.finish()
        return [micro_batch.losses for micro_batch in self.micro_batches]

    def _hand_over(self, op: Op) -> Pending:
        """Start to send or to receive what passes between two stages: a whole micro-batch's activations, or their gradient."""
        sender, receiver = self.graph.where(op)
        micro_batch, forward = self.micro_batches[op.micro_batch], op.direction == "F"
        communicator = self.groups.activations if forward else self.groups.output_gradients
        buffers = micro_batch.inputs if forward else micro_batch.input_gradients
        # What passes is the input of the later stage's first block, or its gradient.
        buffer = buffers[self.graph.layers[op.layer + 1 if forward else op.layer][0]]
        tokens = range(self.graph.slicing.length)
        if communicator.index == receiver:
            pending = communicator.receive(self.like.new_empty(self.shapes[op.micro_batch]), sender)
            buffer.put_later(tokens, pending)
            return pending
        channel = (op.direction, receiver)
        if channel in self.sending:
            self.sending[channel].wait()  # its memory is free then; the receive that it waits for stands before this op
        self.sending[channel] = communicator.send(buffer.take(tokens), receiver)
        return self.sending[channel]
