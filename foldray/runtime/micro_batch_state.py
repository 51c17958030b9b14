"""What a micro-batch holds on this rank between its ops, and how it is handed over.

Between ops, activations lie in token buffers, and rows that travel are in flight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from foldray.comm import Pending
from foldray.graph import Op
from foldray.model import Batch, ChosenExperts, Memory, Transformer
from foldray.moe import Balance, NodeExchange, Received, Sent, Tally
from foldray.runtime.op_graphs import OpGraphs, TokenBuffer
from foldray.runtime.weights import Weights

Part = tuple[int, int]
"""Number of a block, and number of a piece of it (`Op.part`)."""


class Bypass(NamedTuple):
    """The data that go from the router of a piece to the sum of its rows, past the experts; in backward, their gradients.

    Args:
        residual_BsH: the residual stream, with the output of the shared expert once that has run.
        shared_BsH: that output by itself, if a norm follows the sum of all experts.
    """

    weight_TK: torch.Tensor
    residual_BsH: torch.Tensor
    shared_BsH: torch.Tensor | None = None


class Aside(NamedTuple):
    """The data of a slice that do not travel with its keys and values; in backward, their gradients."""

    stayed: torch.Tensor
    residual_BsH: torch.Tensor


class MicroBatchState:
    """What a micro-batch, or a part of one, holds between its ops.

    Args:
        batch: its whole sequences.
        weights: weights of tokens and sequences in the step's objective; None if no op goes backward.

    Attributes:
        flight: rows and counts that travel, or wait to travel, by the op that sends them.
        experts: what keeps the experts of this rank's tokens; None if nobody asks for them.
        log_prob_BL: where log-probabilities of targets go, instead of their sum into the losses; None if nobody asks for them.
    """

    def __init__(self, model: Transformer, batch: Batch, graphs: OpGraphs, weights: Weights | None):
        self.model, self.graph, self.batch, self.graphs, self.weights = model, graphs.graph, batch, graphs, weights
        self.losses = model.start_losses(batch)
        self.experts: ChosenExperts | None = None
        self.log_prob_BL: torch.Tensor | None = None
        self._places = model.places(batch)  # before any op, because the host reads where documents begin
        self.inputs: dict[int, TokenBuffer] = defaultdict(TokenBuffer)  # by block; those of block i + 1 are block i's output
        self.states: dict[int, TokenBuffer] = defaultdict(TokenBuffer)  # by block: its output for its head
        self.middles: dict[int, TokenBuffer] = defaultdict(TokenBuffer)  # by block: output of attention
        self.input_gradients: dict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self.middle_gradients: dict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self.state_gradients: dict[int, TokenBuffer] = defaultdict(TokenBuffer)
        self.flight: dict[Op, Pending] = {}
        self._sent: dict[Part, Sent] = {}
        self._received: dict[Part, Received] = {}
        self._nodes: dict[Part, NodeExchange] = {}  # if ranks of a node pass rows on
        self._bypasses: dict[Part, Bypass] = {}
        self._asides: dict[Part, Aside] = {}
        self._normed: dict[Part, torch.Tensor] = {}  # the input of a shared expert; in backward, its gradient
        self._tallies: dict[int, Tally] = {}  # by block: sum over the pieces so far
        self._balances: dict[int, Balance] = {}  # by block, after its last piece
        self._memories: dict[int, Memory] = {}  # by block

    @property
    def training(self) -> bool:
        """Whether ops go backward."""
        return self.weights is not None

    # Handovers.

    def leaving(self, op: Op) -> list[torch.Tensor]:
        """Return the tensors that a handover sends: the input of the later stage's first block, or the gradient of that."""
        return [self._handed_over(op).take(self._tokens(op))]

    def coming(self, op: Op) -> list[torch.Tensor]:
        """Return empty tensors for what a handover brings."""
        like = next(self.model.parameters())
        return [like.new_empty((len(self.batch.token_BL), len(self._tokens(op)), self.model.spec.hidden))]

    def arriving(self, op: Op, pending: Pending) -> None:
        """Keep what a handover brings."""
        self._handed_over(op).put_later(self._tokens(op), pending)

    def _handed_over(self, op: Op) -> TokenBuffer:
        forward = op.direction == "F"
        first = self.graph.layers[op.layer + 1 if forward else op.layer][0]
        return (self.inputs if forward else self.input_gradients)[first]

    # Shared by the ops.

    def _pass_on(self, op: Op, y_BsH: torch.Tensor) -> None:
        """Keep a piece of a block's output for those that take it: the head, the next block, or both."""
        heads, tokens = self.graph.heads, self._tokens(op)
        if op.layer in heads:
            self.states[op.layer].put(tokens, y_BsH)
        if op.layer != heads[-1]:
            self.inputs[op.layer + 1].put(tokens, y_BsH)

    def _output_gradient(self, op: Op) -> torch.Tensor:
        """Return the gradient of a piece of a block's output, from all that have taken it."""
        heads, tokens = self.graph.heads, self._tokens(op)
        gradients = [self.state_gradients[op.layer].take(tokens)] if op.layer in heads else []
        gradients += [self.input_gradients[op.layer + 1].take(tokens)] if op.layer != heads[-1] else []
        return gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]

    def finish(self) -> None:
        """Wait until all that this rank has sent for the micro-batch has left."""
        while self.flight:
            self.flight.popitem()[1].wait()

    @property
    def _given(self) -> list[torch.Tensor]:
        """What ops get that read the batch: the arguments of `Batch`."""
        return [tensor for tensor in self.batch[:3] if tensor is not None]

    def _entering(self, op: Op) -> list[torch.Tensor]:
        """Return what an op reads of the batch that takes the input of a block (`Transformer.enter`)."""
        return [self.batch.token_BL] if self.graph.blocks[op.layer].mtp else []

    def _memory(self, op: Op) -> Memory:
        """Return what attention of the op's block keeps of the slices so far."""
        if op.layer not in self._memories:
            self._memories[op.layer] = self.model.block(op.layer).attention.memory(forgets=not self.training)
        return self._memories[op.layer]

    def _tokens(self, op: Op) -> range:
        return self.graph.tokens(op)

    def _arrived(self, op: Op, kind: str) -> torch.Tensor:
        """Wait for the op of this kind for the same piece, and return the one tensor that it has brought."""
        (tensor,) = self.flight.pop(op._replace(kind=kind)).wait()
        return tensor


def part_of(op: Op) -> Part:
    return op.layer, op.part
