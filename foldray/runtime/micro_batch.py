"""The ops of one micro-batch on this rank, forward and backward.

Every op that computes builds its own small autograd graph, and its backward differentiates only this graph. Between ops,
activations lie in token buffers, and rows that travel are in flight. Collectives are outside of autograd. So the schedule is
free to choose the order of ops. Gradients of parameters go to the gradient buffers, not through `parameter.grad`, so that no
hook of another library fires before the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from foldray.comm import Pending
from foldray.graph import Op
from foldray.kinds import ATTENTION, COMBINE, COUNTS, DISPATCH, GATHER, INTRA_COMBINE, INTRA_DISPATCH, OFFLOAD, PROJECT, SHARED
from foldray.model import Batch
from foldray.moe import Layer, Routing, Tally, TokenPiece
from foldray.moe.apart import TokenHalf
from foldray.moe.copies import CopiedExperts
from foldray.runtime.micro_batch_state import Aside, Bypass, MicroBatchState, part_of
from foldray.runtime.op_graphs import Computed, ComputesByHand


class MicroBatch(MicroBatchState):
    """The ops of a micro-batch, or of a part of one, on a rank with both halves of each layer."""

    def run(self, op: Op) -> Pending | None:
        """Run an op. An op that communicates returns the data that it has put in flight."""
        if op.direction == "R":
            self._run_again(op._replace(direction="F"))
        elif op.direction == "W":
            self.graphs.add_left(op)
        elif op.kind == OFFLOAD:
            return self.graphs.move(op)
        else:
            getattr(self, f"{op.kind}_{'forward' if op.direction == 'F' else 'backward'}")(op)
        return self.flight.get(op)

    # Forward.

    def embed_forward(self, op: Op) -> None:
        place = self._places[op.part]
        (x_BsH,), _ = self.graphs.compute(
            op, lambda *given: Computed([self.model.embed(Batch(*given), place)]), beside=self._given
        )
        self.inputs[op.layer].put(self._tokens(op), x_BsH)

    def project_forward(self, op: Op) -> None:
        block, place = self.model.block(op.layer), self._places[op.part]
        x_BsH = self.inputs[op.layer].take(self._tokens(op))

        def project(x_BsH: torch.Tensor, *token_BL: torch.Tensor) -> Computed:
            x_BsH = self.model.enter(x_BsH, op.layer, place, *token_BL)
            return Computed([*block.project(x_BsH, place), x_BsH])

        (stayed, shared, x_BsH), _ = self.graphs.compute(op, project, x_BsH, beside=self._entering(op))
        self._asides[part_of(op)] = Aside(stayed, x_BsH)
        self.flight[op._replace(kind=GATHER)] = Pending([], (shared,))  # until the gather op sends it

    def gather_forward(self, op: Op) -> None:
        (shared,) = self.flight.pop(op).wait()
        self.flight[op] = self.model.block(op.layer).attention.start_gather(shared)

    def attention_forward(self, op: Op) -> None:
        block, place, memory = self.model.block(op.layer), self._places[op.part], self._memory(op)
        if self.graph.gathers:
            block.attention.store(self._arrived(op, GATHER), place, memory)
            stayed, residual_BsH = self._asides.pop(part_of(op))
            (y_BsH,), _ = self.graphs.compute(op, lambda x: Computed([block.attend_projected(x, place, memory)]), stayed)
            z_BsH = residual_BsH + y_BsH
        else:
            x_BsH = self.inputs[op.layer].take(self._tokens(op))

            def attend(x_BsH: torch.Tensor, *token_BL: torch.Tensor) -> Computed:
                return Computed([block.attend(self.model.enter(x_BsH, op.layer, place, *token_BL), place, memory)])

            (z_BsH,), _ = self.graphs.compute(op, attend, x_BsH, beside=self._entering(op))
        self.middles[op.layer].put(self._tokens(op), z_BsH)
        if not self.training and op.part == len(self._places) - 1:
            memory.free()

    def ffn_forward(self, op: Op) -> None:
        z_BsH = self.middles[op.layer].take(self._tokens(op))
        (y_BsH,), _ = self.graphs.compute(op, lambda z: Computed([self.model.block(op.layer).feed(z)]), z_BsH)
        self._pass_on(op, y_BsH)

    def route_forward(self, op: Op) -> None:
        layer, part = self._layer(op), part_of(op)

        def rows_of(h_TH: torch.Tensor, routing: Routing) -> Computed:
            if op.layer in self.graph.copied:
                routing = cast(CopiedExperts, layer.copies).spread(routing)
            rows, sent = layer.dispatch_preprocess(h_TH, routing)
            return Computed([*rows, routing.weight_TK], sent)

        (*rows, weight_TK), sent, residual_BsH = self._route(op, layer, rows_of)
        self._sent[part], self._bypasses[part] = sent, Bypass(weight_TK, residual_BsH)
        self.flight[op._replace(kind=DISPATCH)] = Pending([], rows)  # until the dispatch op sends them
        if not self.graph.ragged:
            self._received[part] = layer.exchange.equal_counts(sent)

    def shared_forward(self, op: Op) -> None:
        shared = self._layer(op).shared
        assert shared is not None
        (y_BsH,), _ = self.graphs.compute(op, lambda h: Computed([shared(h)]), self._normed.pop(part_of(op)))
        self._add_past(op, y_BsH)

    def counts_forward(self, op: Op) -> None:
        received = self._layer(op).exchange.start_counts(self._sent[part_of(op)])
        self._received[part_of(op)], self.flight[op] = received, received.coming

    def dispatch_forward(self, op: Op) -> None:
        self.flight.pop(op._replace(kind=COUNTS), None)
        self._start_out(op)

    def intra_dispatch_forward(self, op: Op) -> None:
        node = self._layer(op).inside_node(self._sent[part_of(op)], self._received[part_of(op)])
        assert node is not None, "rows have come to the ranks of their experts"
        self._nodes[part_of(op)] = node
        self.flight[op] = node.start_out(self.flight.pop(op._replace(kind=DISPATCH)))

    def expert_forward(self, op: Op) -> None:
        layer, received = self._layer(op), self._received[part_of(op)]
        if op.layer in self.graph.copied:
            cast(CopiedExperts, layer.copies).wait()
        before, after = self.graph.around_experts
        rows = self.flight.pop(op._replace(kind=before)).wait()
        stays, plain = self.graph.offload_of(op) is None, lambda *rows: Computed([layer.run_experts(rows, received)])
        by_hand = layer.experts_by_hand(received) if stays else None  # only autograd has hooks for what it keeps
        (y_NH,), _ = self.graphs.compute(op, ComputesByHand(by_hand) if by_hand else plain, *rows)
        self.flight[op._replace(kind=after)] = Pending([], (y_NH,))

    def intra_combine_forward(self, op: Op) -> None:
        self.flight[op] = self._nodes[part_of(op)].start_back(self.flight.pop(op))
        if not self.training:
            del self._nodes[part_of(op)]

    def combine_forward(self, op: Op) -> None:
        self._start_back(op, INTRA_COMBINE)

    def merge_forward(self, op: Op) -> None:
        layer, part = self._layer(op), part_of(op)
        sent, (weight_TK, residual_BsH, shared_BsH) = self._sent[part], self._bypasses.pop(part)
        # The weights are a leaf of this graph. `route_backward` passes their gradient on to the router. If the weights have
        # travelled with the rows, the layer does not need them here, and this gradient is zero.
        by_hand, norm = layer.sums_by_hand(sent), self.model.block(op.layer).ffn_after

        def plain(y_NH: torch.Tensor, weight_TK: torch.Tensor, *shared_BsH: torch.Tensor) -> Computed:
            y_TH = layer.combine_postprocess(y_NH, sent, weight_TK)
            if norm is None:
                return Computed([y_TH])
            return Computed([norm(sum(shared_BsH, y_TH.to(residual_BsH.dtype).view_as(residual_BsH)))])

        compute = ComputesByHand(by_hand) if by_hand and norm is None else plain
        beside = [] if shared_BsH is None else [shared_BsH]
        (y_TH,), _ = self.graphs.compute(op, compute, self._arrived(op, COMBINE), weight_TK, *beside)
        self._pass_on(op, residual_BsH + y_TH.to(residual_BsH.dtype).view_as(residual_BsH))
        if not self.training:
            del self._sent[part], self._received[part]

    def head_forward(self, op: Op) -> None:
        depth, tokens = self.graph.heads.index(op.layer), self._tokens(op)
        x_BsH = self.states[op.layer].take(tokens)
        if self.log_prob_BL is not None:
            position_S = self.model.positions_of_head(self.batch, tokens)
            self.log_prob_BL[:, position_S] = self.model.log_probs(x_BsH, self.batch, tokens).to(self.log_prob_BL)
            return
        weight = [] if self.batch.weight_BL is None else [self.batch.weight_BL]

        def head(x_BsH: torch.Tensor, *given: torch.Tensor) -> Computed:
            batch = Batch(*given[: len(given) - len(weight)])
            batch = batch._replace(weight_BL=given[-1]) if weight else batch
            language, reported = self.model.head_loss(x_BsH, batch, tokens, depth)
            return Computed([language], reported)

        _, reported = self.graphs.compute(op, head, x_BsH, beside=[*self._given, *weight])
        self.losses = self.losses.with_language(depth, reported)

    # Backward.

    def head_backward(self, op: Op) -> None:
        assert self.weights is not None
        (gradient,) = self.graphs.differentiate(op, [self.weights.token(self.graph.heads.index(op.layer))])
        self.state_gradients[op.layer].put(self._tokens(op), gradient)

    def merge_backward(self, op: Op) -> None:
        residual_BsH = self._output_gradient(op)
        followed = self.model.block(op.layer).ffn_after is not None
        gradient = residual_BsH if followed else residual_BsH.flatten(0, 1)
        rows_NH, weight_TK, *shared_BsH = self.graphs.differentiate(op, [gradient])
        self._bypasses[part_of(op)] = Bypass(weight_TK, residual_BsH, *shared_BsH)
        self.flight[op._replace(kind=COMBINE)] = Pending([], (rows_NH,))

    def combine_backward(self, op: Op) -> None:
        self._start_out(op)

    def intra_combine_backward(self, op: Op) -> None:
        self.flight[op] = self._nodes[part_of(op)].start_out(self.flight.pop(op._replace(kind=COMBINE)))

    def expert_backward(self, op: Op) -> None:
        before, after = self.graph.around_experts
        rows = self.graphs.differentiate(op, [self._arrived(op, after)])
        self.flight[op._replace(kind=before)] = Pending([], rows)

    def intra_dispatch_backward(self, op: Op) -> None:
        self.flight[op] = self._nodes.pop(part_of(op)).start_back(self.flight.pop(op))

    def dispatch_backward(self, op: Op) -> None:
        self._start_back(op, INTRA_DISPATCH, self._sent[part_of(op)].room)
        del self._sent[part_of(op)], self._received[part_of(op)]

    def shared_backward(self, op: Op) -> None:
        (self._normed[part_of(op)],) = self.graphs.differentiate(op, [self._past_gradient(op)])

    def route_backward(self, op: Op) -> None:
        weight_TK, residual_BsH, _ = self._bypasses.pop(part_of(op))
        rows = self.flight.pop(op._replace(kind=DISPATCH)).wait()
        self._route_back(op, [*rows, weight_TK], residual_BsH)

    def ffn_backward(self, op: Op) -> None:
        (gradient,) = self.graphs.differentiate(op, [self._output_gradient(op)])
        self.middle_gradients[op.layer].put(self._tokens(op), gradient)

    def attention_backward(self, op: Op) -> None:
        residual_BsH = self.middle_gradients[op.layer].take(self._tokens(op))
        (gradient,) = self.graphs.differentiate(op, [residual_BsH])
        if self.graph.gathers:
            self._asides[part_of(op)] = Aside(gradient, residual_BsH)
        else:
            self.input_gradients[op.layer].put(self._tokens(op), gradient)

    def gather_backward(self, op: Op) -> None:
        attention = self.model.block(op.layer).attention
        self.flight[op] = attention.start_scatter(self._places[op.part], self._memory(op))

    def project_backward(self, op: Op) -> None:
        stayed, residual_BsH = self._asides.pop(part_of(op))
        shared = self.model.block(op.layer).attention.summed(self._arrived(op, GATHER)).to(stayed.dtype)
        (gradient,) = self.graphs.differentiate(op, [stayed, shared, residual_BsH])
        self.input_gradients[op.layer].put(self._tokens(op), gradient)

    def embed_backward(self, op: Op) -> None:
        self.graphs.differentiate(op, [self.input_gradients[op.layer].take(self._tokens(op))])

    # Shared by the ops.

    def _route(
        self, op: Op, layer: Layer | TokenHalf, rows_of: Callable[[torch.Tensor, Routing], Computed]
    ) -> tuple[Sequence[torch.Tensor], Any, torch.Tensor]:
        """Route a piece.

        Args:
            rows_of: normed tokens and their routing → rows, weights and what else leaves, and what is kept aside.

        Returns:
            What leaves, what is kept aside, and the residual stream.
        """
        block, z_BsH = self.model.block(op.layer), self.middles[op.layer].take(self._tokens(op))
        length, before = self.graph.slicing.length, self._tallies.pop(op.layer, None)
        position_s = self.model.positions_of(self.batch, self._tokens(op))
        given = self.model.given_experts(self.batch, op.layer, self._tokens(op))

        def route(z_BsH: torch.Tensor, *beside: torch.Tensor) -> Computed:
            expert_TK, sums = (beside[0], beside[1:]) if given else (None, beside)
            h_BsH = block.routed(z_BsH)
            h_TH, earlier = h_BsH.flatten(0, 1), Tally(*sums) if sums else None
            routing = layer.route(h_TH, TokenPiece(len(h_BsH), length, earlier, position_s, expert_TK))
            leaving, kept = rows_of(h_TH, routing)
            shared = [h_BsH] if self.graph.has(SHARED, op.layer) else []
            tally = routing.tally.detach()
            return Computed(
                [routing.tally.score_BE, routing.tally.z, *leaving, *shared],
                (kept, tally if earlier is None else earlier + tally, routing.expert_TK, routing.replaced),
            )

        sums = () if before is None else before.tensors
        (_, _, *leaving), aside = self.graphs.compute(op, route, z_BsH, beside=[*given, *sums])
        kept, tally, chosen_TK, replaced = aside
        if replaced is not None:
            self.losses = self.losses.plus(replaced=replaced)
        if self.experts is not None:
            self.experts.put(op.layer, self._tokens(op), chosen_TK)
        if self.graph.has(SHARED, op.layer):
            self._normed[part_of(op)] = leaving.pop()
        if op.part < self.graph.slicing.degree - 1:
            self._tallies[op.layer] = tally
        else:
            self._balances[op.layer] = layer.router.balance(tally, length)
            number = self.model.spec.moe_layers.index(op.layer)
            self.losses = self.losses.with_router(number, self._balances[op.layer])
        return leaving, kept, z_BsH.detach()

    def _route_back(self, op: Op, left: Sequence[torch.Tensor], residual_BsH: torch.Tensor) -> None:
        """Go backward through a router, from the gradients of what has left and of the residual stream."""
        assert self.weights is not None
        (slope_BE, slope), share = self._balances[op.layer].slopes(), self.weights.sequence
        router = self.model.spec.router
        losses = slope_BE * (share * router.balance_loss), share * (slope * router.z_loss)
        shared = [self._normed.pop(part_of(op))] if self.graph.has(SHARED, op.layer) else []
        (gradient,) = self.graphs.differentiate(op, [*losses, *left, *shared])
        self.middle_gradients[op.layer].put(self._tokens(op), gradient + residual_BsH)

    def _add_past(self, op: Op, y_BsH: torch.Tensor) -> None:
        """Add the output of the shared expert to the residual stream that goes past the experts."""
        bypass = self._bypasses[part_of(op)]
        followed = self.model.block(op.layer).ffn_after is not None
        change = {"shared_BsH": y_BsH} if followed else {"residual_BsH": bypass.residual_BsH + y_BsH}
        self._bypasses[part_of(op)] = bypass._replace(**change)

    def _past_gradient(self, op: Op) -> torch.Tensor:
        """Return the gradient of the shared expert's output. What goes past the experts stays for the router."""
        bypass = self._bypasses[part_of(op)]
        return bypass.residual_BsH if bypass.shared_BsH is None else bypass.shared_BsH

    def _layer(self, op: Op) -> Layer:
        return cast(Layer, self.model.block(op.layer).moe)  # `halves.py` has the ops of ranks with one half of a layer

    def _start_out(self, op: Op) -> None:
        """Start to send the rows that wait for this op to the owners of experts."""
        rows, sent, received = self.flight.pop(op).wait(), self._sent[part_of(op)], self._received[part_of(op)]
        self.flight[op] = self._layer(op).exchange.start_out(rows, sent, received)

    def _start_back(self, op: Op, inside: str, room: int | None = None) -> None:
        """Start to send rows to the owners of tokens (`Exchange.start_back`): those that wait for this op, or that the op of kind
        `inside` brings from the ranks of a node."""
        rows = self.flight.pop(op._replace(kind=inside) if self.graph.passes_on else op)
        sent, received = self._sent[part_of(op)], self._received[part_of(op)]
        self.flight[op] = self._layer(op).exchange.start_back(rows, sent, received, room)

    def _run_again(self, op: Op) -> None:
        inputs = [self._asides.pop(part_of(op)).stayed] if op.kind == ATTENTION and self.graph.gathers else []
        results, _ = self.graphs.compute_again(op, *inputs)
        if op.kind == PROJECT:  # the keys and values are still stored
            self._asides[part_of(op)] = Aside(results[0], results[2])
