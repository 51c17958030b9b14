"""The executor. It runs the schedule of a step on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch.profiler import record_function

from foldray.clock import Recording, ScheduleError, Span, check, op_costs
from foldray.comm import Groups, Pending
from foldray.errors import UserError
from foldray.finding import Found, settle
from foldray.graph import Chunk, Op, StepGraph
from foldray.kinds import COPY, FFN, HANDOVER, MERGE, REDUCE
from foldray.model import Batch, ChosenExperts, Losses, Transformer
from foldray.orders import KINDS, OVERLAPS, Ordering, ordered_schedule, position_list
from foldray.runtime.copying import CopyChoice, CopyTraffic, Tables
from foldray.runtime.found import find_together
from foldray.runtime.gradients import Gradients
from foldray.runtime.graphs import CapturedOps, Captures, compare
from foldray.runtime.halves import micro_batch_type
from foldray.runtime.kept import HostMemory
from foldray.runtime.op_graphs import OpGraphs
from foldray.runtime.trace import Trace
from foldray.runtime.weights import Weights


class Execution:
    """Runs this rank's list of every step.

    Args:
        gradients: the buffers that sum gradients over pieces and micro-batches. Ops add gradients; the list starts their
            reduction.
        reduces: whether the list reduces gradients; if not, the caller must do so.

    Attributes:
        captures: captures ops of training; None if all ops run as they are.
        found: on rank 0, what was found last.
        last: graph of the last training step.
        keeps_experts: whether training steps keep the experts of their tokens.
        experts: those of this rank's tokens in the last such step, for each part of a micro-batch.
        host: where some kinds of ops keep what their backward needs (`Ordering.offload`).
    """

    def __init__(
        self,
        model: Transformer,
        groups: Groups,
        gradients: Gradients,
        ordering: Ordering | None = None,
        reduces: bool = True,
    ):
        self.model, self.groups, self.gradients, self.reduces = model, groups, gradients, reduces
        self.trace: Trace | None = None
        self.captures: Captures | None = None
        self.found: Found | None = None
        self.last: StepGraph | None = None
        self.weights: Weights | None = None
        self.keeps_experts, self.experts = False, list[ChosenExperts]()
        self.copies = CopyTraffic(model, gradients)
        self.copying: CopyChoice | None = None
        self.host = HostMemory(model)
        self.reorder(ordering or Ordering())
        self._position, self._stage = groups.position, groups.stage

    def reorder(self, ordering: Ordering) -> None:
        """Use another ordering from the next step on."""
        self.ordering = ordering
        self.model.slice(ordering.slicing.attention if ordering.slicing else None)
        self._orders: dict[StepGraph, tuple[Op, ...]] = {}
        if self.captures is not None:
            self.captures.forget()

    def copy_hot_experts(self, room: int, every: int) -> None:
        """Have room for copies of experts in every MoE block, and copy hot ones from the third training step on.

        Every rank of the fold must call this.

        Args:
            every: number of steps from one choice of these experts to the next one.
        """
        self.copies.make_room(room, self.groups)
        self.copying = CopyChoice(self.model, self.groups, room, every, self.copy_experts)

    def copy_experts(self, tables: Tables) -> None:
        """Have these copies of experts in training steps from the next one on. All ranks need the same tables."""
        before = self.copies.blocks
        self.copies.put(tables)
        if self.captures is not None and self.copies.blocks != before:
            self.captures.forget()

    @property
    def lacks_costs(self) -> bool:
        """Whether the order depends on times of ops that are not known yet: lags or lists are open, or gradients give way."""
        ordering = self.ordering
        return ordering.finds or (ordering.costs is None and (ordering.open or (self.reduces and ordering.reduction.gives_way)))

    def learn_costs(self) -> None:
        """Choose the open lags, the found list, and when gradients leave, by the times of the ops of the last training step.

        `trace` must have recorded that step. All ranks must call this.
        """
        assert self.trace is not None, "the last step was not traced"
        assert self.last is not None, "there was no step"
        order, spans = self.order(self.last), self.trace.spans
        local = torch.tensor([spans[op] for op in order], dtype=torch.float64, device=next(self.model.parameters()).device)
        # The ranks of a stage must choose the same list, so all of them use the times of all of them.
        everyone = self._stage.all_gather(local).cpu().view(-1, *local.shape).tolist()
        recordings = [
            Recording(order, {op: Span(*span) for op, span in zip(order, seconds, strict=True)}) for seconds in everyone
        ]
        costs, self.found = op_costs(self.last, recordings), None
        if self.ordering.forward.row.found:
            recording = Recording(order, spans)
            found, self.found = find_together(self.groups, self.last, recording, costs, self.ordering, local.device)
            self.reorder(self.ordering._replace(costs=costs, found=found))
        else:
            self.reorder(settle(self.ordering, self.last, self.model.stages[0].number, costs))

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        """Run forward and backward of one optimizer step.

        Afterwards, `gradients` hold the gradient of the step's objective (`Weights`): summed over ranks with `reduces`, else
        this rank's contribution.

        Returns:
            This rank's contributions to the losses, one for each part of a micro-batch (`ordering.batch_degree`).
        """
        if self.copying is not None:
            self.copying.decide()
        parts = [part for batch in batches for part in batch.cut(self.ordering.batch_degree)]
        compared = self.captures is not None and self.captures.begin(self.trace is not None)
        if compared:
            self._run(parts, captured=False)
            eager = {parameter: view.clone() for parameter, view in self.gradients.views.items()}
            self.gradients.zero()
        losses = self._run(parts)
        if compared:
            compare(self.model, eager, self.gradients.views)
        if self.copying is not None:
            self.copying.count(losses)
        return losses

    def _run(self, parts: Sequence[Batch], captured: bool = True) -> list[Losses]:
        run = _Run(self, parts, training=True, captured=captured)
        self.last, self.weights = run.graph, run.weights
        self.experts = run.keep_experts() if self.keeps_experts else []
        return run.run()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Losses]:
        """Run forward only, and return this rank's contributions to the losses of each batch."""
        return _Run(self, batches, training=False).run()

    @torch.no_grad()
    def log_probs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Run forward only, and return the log-probabilities of each batch's targets, in at least float32: [B, L] for each.

        They are zero where a target does not count, at positions of other context-parallel ranks, and on ranks without the head.
        Tensor-parallel ranks have the same.
        """
        run = _Run(self, batches, training=False)
        for micro_batch in run.micro_batches:
            target_BL = micro_batch.batch.target_BL
            dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
            micro_batch.log_prob_BL = torch.zeros(target_BL.shape, dtype=dtype, device=target_BL.device)
        run.run()
        return [micro_batch.log_prob_BL for micro_batch in run.micro_batches if micro_batch.log_prob_BL is not None]

    def step(self, batches: Sequence[Batch]) -> tuple[StepGraph, tuple[Op, ...]]:
        """Return the graph of a step of these micro-batches, and this rank's list."""
        graph = self.graph([part for batch in batches for part in batch.cut(self.ordering.batch_degree)])
        return graph, self.order(graph)

    def graph(self, batches: Sequence[Batch], backward: bool = True) -> StepGraph:
        """Return the graph of a pass over these parts of micro-batches."""
        length, chunks = batches[0].token_BL.shape[1], self._chunks() if self.reduces and backward else ()
        return self.graph_of(self.ordering, length, len(batches), backward, chunks)

    def graph_of(
        self,
        ordering: Ordering,
        length: int,
        micro_batches: int,
        backward: bool = True,
        chunks: tuple[tuple[Chunk, ...], ...] = (),
    ) -> StepGraph:
        """Return the graph of a step in an ordering (`Ordering.graph`)."""
        # Evaluation predicts the next token only.
        stages = (map(self.model.spec.block, stage.layers) for stage in self.model.ownership.stages)
        graph = ordering.graph(
            self.model.ownership,
            tuple(tuple(block for block in blocks if backward or not block.mtp) for blocks in stages),
            length,
            micro_batches,
            # In evaluation, the last micro-batch may be smaller on some ranks, so row counts differ even with padding.
            self.groups.fold.disjoint or not (self.model.spec.router.pad and backward),
            backward,
            chunks,
        )
        return replace(graph, copied=self.copies.blocks) if backward and self.copies.blocks else graph

    def _chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """Return the chunks of gradients by position; for other positions than this rank's, none."""
        chunks = self.gradients.chunks(self.ordering.reduction.most)
        return tuple(chunks if position == self._position else () for position in range(self.groups.fold.positions))

    def order(self, graph: StepGraph) -> tuple[Op, ...]:
        """Return this rank's list. It is made once for each graph; ranks of a stage must then call this together."""
        if graph not in self._orders:
            if foreign := [
                overlap.kind for overlap in (self.ordering.forward, self.ordering.backward) if overlap.kind not in KINDS
            ]:
                self._prove(graph, foreign[0])
            order = position_list(graph, self._position, self.ordering)
            self._compare(order)
            self._orders[graph] = order
        return self._orders[graph]

    def _prove(self, graph: StepGraph, kind: str) -> None:
        """Check the lists of all positions. Those of the table's own kinds are legal for every graph, as tests show."""
        try:
            check(graph, ordered_schedule(graph, self.ordering))
        except ScheduleError as error:
            raise UserError("schedule.kind", kind, f"makes lists that cannot run: {error}", OVERLAPS) from None
        except KeyError as error:
            raise UserError("schedule.kind", kind, f"leaves out an op that others need: {error}", OVERLAPS) from None

    def _compare(self, order: tuple[Op, ...]) -> None:
        """Check that the ranks of a stage have the same list. With different lists, their collectives would not match."""
        stage = self._stage
        checksum = torch.tensor([zlib.crc32(repr(order).encode())], device=next(self.model.parameters()).device)
        if len(set(stage.all_gather(checksum).tolist())) > 1:
            raise RuntimeError(f"ranks {stage.ranks} of a stage have other schedules; this one has {self.ordering}")


class _Run:
    """One pass through a list, with the state of its micro-batches and of its handovers."""

    def __init__(self, execution: Execution, batches: Sequence[Batch], training: bool, captured: bool = False):
        model, self.gradients = execution.model, execution.gradients
        self.groups, self.graph, self.trace = execution.groups, execution.graph(batches, training), execution.trace
        self.order, self.copies = execution.order(self.graph), execution.copies
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.weights = Weights(batches, self.groups, dtype, model.spec) if training else None
        half = micro_batch_type(self.groups)
        now = perf_counter if self.trace is None else self.trace.clock.now
        slots = {}
        if captured and execution.captures is not None:
            slots = execution.captures.slots(model, self.order, batches, self.trace is not None)
        if self.graph.offloaded:
            execution.host.begin(self.copies.parameters)
        self.micro_batches = []
        for number, batch in enumerate(batches):
            ops = partial(CapturedOps, slots[number]) if slots else OpGraphs
            ops_of_batch = ops(model, self.graph, self.copies.sum_of, training, now, execution.host)
            self.micro_batches.append(half(model, batch, ops_of_batch, self.weights))
        self.sending: dict[Op, Pending] = {}  # handovers that may not have left

    def keep_experts(self) -> list[ChosenExperts]:
        """Have the pass keep the experts of its tokens, and return what keeps them, for each micro-batch."""
        model, length = self.micro_batches[0].model, self.graph.slicing.length
        kept = [ChosenExperts(model, micro_batch.batch, length) for micro_batch in self.micro_batches]
        for micro_batch, experts in zip(self.micro_batches, kept, strict=True):
            micro_batch.experts = experts
        return kept

    def run(self) -> list[Losses]:
        trace = self.trace
        if trace is not None:
            trace.start()
        named = torch.autograd._profiler_enabled()
        activity = self.groups.activity
        for op in self.order:
            activity.doing = op
            with record_function(str(op)) if named else nullcontext():
                pending = self._start(op)
            if op.kind in (MERGE, FFN) and op.direction == "B":
                self._let_go(op)
            if trace is not None:
                trace.ran(op, self.micro_batches[op.micro_batch].graphs.began, pending)
            if pending is None:
                self.groups.tokens_queue.advance()  # the GPU has something to do while the host waits for row counts
        for handover in self.sending.values():
            handover.wait()
        for micro_batch in self.micro_batches:
            micro_batch.finish()
        if self.weights is not None:
            self.weights.finish()
        self.copies.finish()
        if self.graph.chunks:
            self.gradients.finish()
        if trace is not None:
            trace.finish()
        return [micro_batch.losses for micro_batch in self.micro_batches]

    def _start(self, op: Op) -> Pending | None:
        """Run an op. Return the data that it has put in flight."""
        if op.kind == REDUCE:
            self.copies.wait_home(layer for kind, layer in self.graph.makers(op) if kind == COPY)
            return self.gradients.start(self.graph.chunk(op))
        if op.kind == COPY:
            return self.copies.start(op)
        if op.kind == HANDOVER:
            self.groups.tokens_queue.advance()  # other stages count on the order of the list
            return self._hand_over(op)
        return self.micro_batches[op.micro_batch].run(op)

    def _hand_over(self, op: Op) -> Pending:
        """Start to send or to receive a piece of a handover: activations of a micro-batch, or their gradient."""
        sender, receiver = self.graph.where(op)
        micro_batch = self.micro_batches[op.micro_batch]
        communicator = self.groups.handovers_up if sender < receiver else self.groups.handovers_down
        if communicator.index == receiver:
            pending = Pending.of([communicator.receive(tensor, sender) for tensor in micro_batch.coming(op)])
            micro_batch.arriving(op, pending)
            return pending
        pending = Pending.of([communicator.send(tensor, receiver) for tensor in micro_batch.leaving(op)])
        # Nobody waits for a handover to leave: its receiver may first wait for something that this rank sends later. gloo does
        # not say when a message has left, so on a CPU handovers stay until it is known (`_let_go`), or the step ends.
        self.sending = {sent: leaving for sent, leaving in self.sending.items() if not leaving.is_over} | {op: pending}
        return pending

    def _let_go(self, op: Op) -> None:
        """Let go of what a stage has handed on, now that it goes backward: the stage behind it must have received all of that."""
        stage = self.graph.stage_of[op.layer]
        handed_on = "F", stage, op.micro_batch
        for sent in [each for each in self.sending if (each.direction, each.layer, each.micro_batch) == handed_on]:
            self.sending.pop(sent).wait()
