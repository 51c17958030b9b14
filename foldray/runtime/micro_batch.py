"""One micro-batch on its way through this rank's ops, forward and backward.

Every op that computes builds a small autograd graph of its own, from leaves to ends; going backward, that graph alone is
differentiated. What travels between ops lies in token buffers and, on the network, in flight; collectives are outside of
autograd. So what runs when is the schedule's choice. Gradients of parameters go to whoever adds them up, never through
`parameter.grad`, so that no hook of another library fires before the step is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from foldray.comm import Pending
from foldray.kinds import ATTENTION, COMBINE, COUNTS, DISPATCH, EMBED, EXPERT, FFN, HEAD, MERGE, ROUTE
from foldray.model import Batch, KeysAndValues, Transformer, add_losses
from foldray.moe import Dispatcher, Plan, Tally
from foldray.runtime.buffer import TokenBuffer
from foldray.runtime.weights import Weights
from foldray.schedule import Op, StepGraph

AddGradient = Callable[[nn.Parameter, torch.Tensor], None]
Compute = Callable[..., Sequence[torch.Tensor]]


class _Graph(NamedTuple):
    """What the backward of an op needs; an end without a gradient is None. Edges, not tensors: results may be freed before."""

    ends: list[GradientEdge | None]
    leaves: list[torch.Tensor]


class _Piece:
    """A MoE micro-batch between its router and its sum, and on the way back."""

    rows: torch.Tensor
    weight: torch.Tensor
    plan: Plan
    residual: torch.Tensor
    weight_gradient: torch.Tensor
    residual_gradient: torch.Tensor


class MicroBatch:
    """State and ops; `run` runs one.

    Args:
        add: takes a parameter's gradient as soon as there is one; sums up.
        weights: of tokens and sequences in the step's objective; None if no op goes backward.

    Attributes:
        began: when the last op that computes began to, behind all waiting.
    """

    def __init__(self, model: Transformer, graph: StepGraph, batch: Batch, add: AddGradient, weights: Weights | None):
        self.model, self.graph, self.batch, self.add, self.weights = model, graph, batch, add, weights
        self.losses, self.began = model.start_losses(batch), perf_counter()
        self.inputs: dict[int, TokenBuffer] = defaultdict(TokenBuffer)  # by block; behind the last one, the stage's output
        self.middles: dict[int, TokenBuffer] = defaultdict(TokenBuffer)  # by block, behind attention
        self.input_gradients: dict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self.middle_gradients: dict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self.flight: dict[Op, Pending] = {}
        self._graphs: dict[Op, _Graph] = {}  # by forward op
        self._again: dict[Op, tuple[Compute, Sequence[torch.Tensor]]] = {}  # by forward op that is to be computed again
        self._pieces: dict[tuple[int, int], _Piece] = defaultdict(_Piece)  # by block and part
        self._tallies: dict[int, Tally] = {}
        self._memories: dict[int, KeysAndValues] = defaultdict(KeysAndValues)

    @property
    def training(self) -> bool:
        """Whether ops go backward."""
        return self.weights is not None

    def run(self, op: Op) -> Pending | None:
        """Run an op; what it has sent on its way, if it communicates."""
        if op.direction == "R":
            self.began = perf_counter()
            self._build(op._replace(direction="F"), *self._again.pop(op._replace(direction="F")))
        else:
            (FORWARD if op.direction == "F" else BACKWARD)[op.kind](self, op)
        return self.flight.get(op)

    # Forward.

    def embed_forward(self, op: Op) -> None:
        (x_BsH,) = self._compute(op, lambda: (self.model.embed(self.batch, self._places[op.part]),))
        self.inputs[op.layer].put(self._tokens(op), x_BsH)

    def attention_forward(self, op: Op) -> None:
        block, place, memory = self.model.block(op.layer), self._places[op.part], self._memories[op.layer]
        x_BsH = self.inputs[op.layer].take(self._tokens(op))
        (z_BsH,) = self._compute(op, lambda x: (block.attend(x, place, memory),), x_BsH)
        self.middles[op.layer].put(self._tokens(op), z_BsH)
        if not self.training and op.part == len(self._places) - 1:
            memory.free()

    def ffn_forward(self, op: Op) -> None:
        z_BsH = self.middles[op.layer].take(self._tokens(op))
        (y_BsH,) = self._compute(op, lambda z: (self.model.block(op.layer).feed(z),), z_BsH)
        self.inputs[op.layer + 1].put(self._tokens(op), y_BsH)

    def route_forward(self, op: Op) -> None:
        block, piece = self.model.block(op.layer), self._pieces[op.layer, op.part]
        z_BsH = self.middles[op.layer].take(self._tokens(op))
        tally = self._tallies.setdefault(op.layer, Tally(z_BsH.shape[0], self.graph.slicing.length))

        def route(z_BsH: torch.Tensor) -> list[torch.Tensor]:
            h_BsH = block.ffn_norm(z_BsH)
            h_TH = h_BsH.reshape(-1, h_BsH.shape[-1])
            routing = block.moe.router(h_TH, tally)
            # The sum behind the experts is differentiated by weights of its own; what it finds comes back in `route_backward`.
            piece.weight = routing.weight_TK.detach().requires_grad_(self.training)
            rows_NH, piece.plan = block.moe.dispatcher.dispatch_preprocess(h_TH, replace(routing, weight_TK=piece.weight))
            tally.add(routing.count_BE, routing.score_BE.detach(), routing.z.detach(), routing.dropped)
            shared = [] if block.moe.shared is None else [block.moe.shared(h_BsH)]
            return [rows_NH, routing.weight_TK, routing.score_BE, routing.z, *shared]

        piece.rows, _, _, _, *shared = self._compute(op, route, z_BsH)
        piece.residual = z_BsH.detach() + shared[0] if shared else z_BsH.detach()
        if not self.graph.ragged:
            piece.plan = block.moe.dispatcher.fixed_counts(piece.plan)
        if op.part == self.graph.slicing.degree - 1:
            tally.close(block.moe.router.sequences)
            self.losses = add_losses(self.losses, self.model.router_losses(op.layer, tally))

    def counts_forward(self, op: Op) -> None:
        self.flight[op] = self._dispatcher(op).start_counts(self._pieces[op.layer, op.part].plan)

    def dispatch_forward(self, op: Op) -> None:
        piece, dispatcher = self._pieces[op.layer, op.part], self._dispatcher(op)
        if self.graph.ragged:
            piece.plan = dispatcher.finish_counts(piece.plan, self.flight.pop(op._replace(kind=COUNTS)))
        self.flight[op] = dispatcher.start_out(piece.rows, piece.plan)
        del piece.rows

    def expert_forward(self, op: Op) -> None:
        moe, plan = self.model.block(op.layer).moe, self._pieces[op.layer, op.part].plan
        dispatcher = moe.dispatcher

        def experts(rows_NH: torch.Tensor) -> list[torch.Tensor]:
            return [dispatcher.scatter(moe.run_experts(dispatcher.gather(rows_NH, plan), plan), plan)]

        (y_NH,) = self._compute(op, experts, self._arrived(op, DISPATCH))
        self.flight[op._replace(kind=COMBINE)] = Pending([], (y_NH,))  # here until the list says that it leaves

    def combine_forward(self, op: Op) -> None:
        (y_NH,) = self.flight.pop(op).wait()
        self.flight[op] = self._dispatcher(op).start_back(y_NH, self._pieces[op.layer, op.part].plan)

    def merge_forward(self, op: Op) -> None:
        piece, dispatcher = self._pieces[op.layer, op.part], self._dispatcher(op)

        def merge(rows_NH: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
            return [dispatcher.combine_postprocess(rows_NH, piece.plan)]

        (y_TH,) = self._compute(op, merge, self._arrived(op, COMBINE), piece.weight)
        y_BsH = piece.residual + y_TH.to(piece.residual.dtype).view_as(piece.residual)
        self.inputs[op.layer + 1].put(self._tokens(op), y_BsH)
        del piece.residual
        if not self.training:
            del self._pieces[op.layer, op.part]

    def head_forward(self, op: Op) -> None:
        def head(x_BsH: torch.Tensor) -> list[torch.Tensor]:
            language, losses = self.model.head_loss(x_BsH, self.batch, self._tokens(op))
            self.losses = add_losses(self.losses, losses)
            return [language]

        self._compute(op, head, self.inputs[op.layer + 1].take(self._tokens(op)))

    # Backward.

    def head_backward(self, op: Op) -> None:
        assert self.weights is not None
        (gradient,) = self._differentiate(op, [self.weights.token])
        self.input_gradients[op.layer + 1].put(self._tokens(op), gradient)

    def merge_backward(self, op: Op) -> None:
        piece = self._pieces[op.layer, op.part]
        piece.residual_gradient = self.input_gradients[op.layer + 1].take(self._tokens(op))
        flat_TH = piece.residual_gradient.reshape(-1, piece.residual_gradient.shape[-1])
        rows_NH, piece.weight_gradient = self._differentiate(op, [flat_TH])
        self.flight[op._replace(kind=COMBINE)] = Pending([], (rows_NH,))

    def combine_backward(self, op: Op) -> None:
        (rows_NH,) = self.flight.pop(op).wait()
        self.flight[op] = self._dispatcher(op).start_out(rows_NH, self._pieces[op.layer, op.part].plan)

    def expert_backward(self, op: Op) -> None:
        (rows_NH,) = self._differentiate(op, [self._arrived(op, COMBINE)])
        self.flight[op._replace(kind=DISPATCH)] = Pending([], (rows_NH,))

    def dispatch_backward(self, op: Op) -> None:
        (rows_NH,) = self.flight.pop(op).wait()
        self.flight[op] = self._dispatcher(op).start_back(rows_NH, self._pieces[op.layer, op.part].plan)

    def route_backward(self, op: Op) -> None:
        piece, router = self._pieces.pop((op.layer, op.part)), self.model.spec.router
        assert self.weights is not None
        (slope_BE, slope), share = self._tallies[op.layer].slopes(), self.weights.sequence
        gradients = [
            self._arrived(op, DISPATCH), piece.weight_gradient,
            slope_BE * (share * router.balance_loss), share * (slope * router.z_loss), piece.residual_gradient,
        ]  # fmt: skip
        (gradient,) = self._differentiate(op, gradients)
        self.middle_gradients[op.layer].put(self._tokens(op), gradient + piece.residual_gradient)

    def ffn_backward(self, op: Op) -> None:
        (gradient,) = self._differentiate(op, [self.input_gradients[op.layer + 1].take(self._tokens(op))])
        self.middle_gradients[op.layer].put(self._tokens(op), gradient)

    def attention_backward(self, op: Op) -> None:
        (gradient,) = self._differentiate(op, [self.middle_gradients[op.layer].take(self._tokens(op))])
        self.input_gradients[op.layer].put(self._tokens(op), gradient)

    def embed_backward(self, op: Op) -> None:
        self._differentiate(op, [self.input_gradients[op.layer].take(self._tokens(op))])

    # What they share.

    @cached_property
    def _places(self) -> list:
        return self.model.places(self.batch)

    def _tokens(self, op: Op) -> range:
        return self.graph.tokens(op)

    def _dispatcher(self, op: Op) -> Dispatcher:
        return self.model.block(op.layer).moe.dispatcher

    def _arrived(self, op: Op, kind: str) -> torch.Tensor:
        """What the op's own collective of this kind has brought."""
        (tensor,) = self.flight.pop(op._replace(kind=kind)).wait()
        return tensor

    def _compute(self, op: Op, compute: Compute, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Results of an op, outside of any graph."""
        self.began = perf_counter()
        if not self.training or op.kind in self.graph.recompute:
            if self.training:
                self._again[op] = compute, inputs
            with torch.no_grad():
                return list(compute(*inputs))
        return self._build(op, compute, inputs)

    def _build(self, op: Op, compute: Compute, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results of an op, whose graph is kept for its backward."""
        with torch.enable_grad():
            leaves = [x if x.is_leaf and x.requires_grad else x.detach().requires_grad_() for x in inputs]
            results = compute(*leaves)
        edges = [get_gradient_edge(result) if result.requires_grad else None for result in results]
        self._graphs[op] = _Graph(edges, leaves)
        return [result.detach() for result in results]

    def _differentiate(self, op: Op, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of an op's inputs from those of its results; those of its parameters are added up."""
        self.began = perf_counter()
        graph = self._graphs.pop(op._replace(direction="F"))
        parameters = self.model.parameters_of(op.kind, op.layer)
        ends = [(edge, gradient) for edge, gradient in zip(graph.ends, gradients, strict=False) if edge is not None]
        found = torch.autograd.grad(
            [edge for edge, _ in ends], [*graph.leaves, *parameters], [gradient for _, gradient in ends], allow_unused=True
        )
        for parameter, part in zip(parameters, found[len(graph.leaves) :], strict=True):
            if part is not None:
                self.add(parameter, part)
        return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(graph.leaves, found, strict=False)]


Run = Callable[[MicroBatch, Op], None]
FORWARD: Mapping[str, Run] = {
    EMBED: MicroBatch.embed_forward, ATTENTION: MicroBatch.attention_forward, FFN: MicroBatch.ffn_forward,
    ROUTE: MicroBatch.route_forward, COUNTS: MicroBatch.counts_forward, DISPATCH: MicroBatch.dispatch_forward,
    EXPERT: MicroBatch.expert_forward, COMBINE: MicroBatch.combine_forward, MERGE: MicroBatch.merge_forward,
    HEAD: MicroBatch.head_forward,
}  # fmt: skip
BACKWARD: Mapping[str, Run] = {
    EMBED: MicroBatch.embed_backward, ATTENTION: MicroBatch.attention_backward, FFN: MicroBatch.ffn_backward,
    ROUTE: MicroBatch.route_backward, DISPATCH: MicroBatch.dispatch_backward, EXPERT: MicroBatch.expert_backward,
    COMBINE: MicroBatch.combine_backward, MERGE: MicroBatch.merge_backward, HEAD: MicroBatch.head_backward,
}  # fmt: skip
"""What runs an op of each kind that belongs to a micro-batch. Counts have no gradient."""
