"""All ops of one optimizer step, block by block and piece by piece, and their dependencies.

The sequences of a micro-batch are cut twice (`Slicing`): attention and dense layers work on slices, MoE layers work on MoE
micro-batches. Both cuts have the same tokens, so an op of one cut needs those ops of the other cut that share tokens with
it. This is FoldMoE's token buffer (section 4.2). A sequence that is not cut has one slice and one MoE micro-batch.

A slice of attention is one op, unless context-parallel ranks gather keys and values slice by slice (`gathers`). The slice then
has three ops. Its projections and the gather of its keys and values can run before attention of the slice before it has ended.

`foldray/kinds.py` says what each kind of op does and how its data is cut. For a `reduce`, `layer` is the pipeline position
and `part` is the number of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from foldray.blueprint import BlockSpec, Maker, ModelSpec
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    COUNTS,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    GATHER,
    HANDOVER,
    HEAD,
    MERGE,
    OP_KINDS,
    PROJECT,
    REDUCE,
    ROUTE,
    WITH_WEIGHTS,
)
from foldray.schedule.chunks import Chunk
from foldray.schedule.graph import Channel, PipelineGraph
from foldray.schedule.op import Direction, Op, handover, route
from foldray.schedule.slicing import Slicing

_CHAIN = (ROUTE, COUNTS, DISPATCH, EXPERT, COMBINE, MERGE)
_BEFORE = {
    FFN: (ATTENTION,), COUNTS: (ROUTE,), DISPATCH: (ROUTE, COUNTS), EXPERT: (DISPATCH,), COMBINE: (EXPERT,),
    MERGE: (ROUTE, COMBINE), GATHER: (PROJECT,),
}  # fmt: skip
_AFTER = {
    PROJECT: (GATHER, ATTENTION), ROUTE: (DISPATCH, MERGE), DISPATCH: (EXPERT,), EXPERT: (COMBINE,), COMBINE: (MERGE,),
}  # fmt: skip
"""For ops on the same piece: the kinds whose results a forward op uses, and the kinds that use its results."""


def gathers(slicing: Slicing, cp: int) -> bool:
    """Return `StepGraph.gathers`: whether context-parallel ranks share slices. Whole sequences go around a ring instead."""
    return cp > 1 and len(slicing.attention) > 1


def leaves_weights(model: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of ops with products whose gradients of weights may be ops of their own.

    A router's own product is too small. A tied head adds to the same gradient as the embedding, whose order would change.
    """
    without = {*(() if model.shared_hidden else (ROUTE,)), *((HEAD,) if model.tied_embeddings else ())}
    return tuple(kind for kind in WITH_WEIGHTS if kind not in without)


class Place(NamedTuple):
    """Pipeline positions of a block's two halves. They are the same if both halves share ranks."""

    attention: int
    experts: int


@dataclass(frozen=True)
class StepGraph:
    """The graph of a step: micro-batches go through pipeline stages of dense and MoE blocks.

    Args:
        stages: the blocks of every virtual stage, in order.
        slicing: the cut of a rank's share of every sequence.
        pp: number of pipeline positions.
        micro_batches: micro-batches of one optimizer step, or their parts if `batch_degree` cuts them.
        ragged: whether ranks exchange row counts before rows. Otherwise experts have room for a fixed number of rows.
        recompute: kinds of ops whose forward runs again, as a separate op (R), before their backward.
        later: kinds of ops whose backward leaves the gradients of weights to an op of their own (W).
        backward: False for evaluation.
        batch_degree: number of parts that go through a stage together (FlowMoE's R); `micro_batches` is a multiple of it.
        chunks: for every position, the chunks in which its gradients are reduced. Empty if the step reduces no gradients.
        places: for every block, the positions of its two halves. Empty if both are at the position of the block's stage.
        gathers: whether the keys and values of a slice are gathered from other ranks, in ops of their own.
        tied: whether the head's weight is the embedding's, so that both add to the same gradients.
    """

    stages: tuple[tuple[BlockSpec, ...], ...]
    slicing: Slicing
    pp: int = 1
    micro_batches: int = 1
    ragged: bool = True
    recompute: tuple[str, ...] = ()
    backward: bool = True
    batch_degree: int = 1
    chunks: tuple[tuple[Chunk, ...], ...] = ()
    places: tuple[Place, ...] = ()
    gathers: bool = False
    later: tuple[str, ...] = ()
    tied: bool = False

    @cached_property
    def positions(self) -> int:
        """Number of pipeline positions of both halves."""
        return max([self.pp, *(position + 1 for place in self.places for position in place)])

    @property
    def pipeline(self) -> PipelineGraph:
        """The same step with stages as its smallest pieces, and whole micro-batches."""
        return PipelineGraph(self.pp, self.micro_batches // self.batch_degree, len(self.stages) // self.pp, self.backward)

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """All blocks. The `layer` of an op is the index of its block."""
        return tuple(block for stage in self.stages for block in stage)

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """Numbers of the blocks of every stage."""
        ends = list(accumulate(map(len, self.stages)))
        return tuple(range(end - len(stage), end) for end, stage in zip(ends, self.stages, strict=True))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Numbers of the blocks whose output a head takes: the last one, and with multi-token prediction the one before each
        block that predicts a further token."""
        *before, last = self.layers[-1]
        return (*(layer for layer in before if self.blocks[layer + 1].mtp), last)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Number of the stage of every block."""
        return tuple(number for number, layers in enumerate(self.layers) for _ in layers)

    @cached_property
    def at(self) -> tuple[Place, ...]:
        """Pipeline positions of every block."""
        if self.places:
            return self.places
        where = self.pipeline.at
        return tuple(Place(where[stage], where[stage]) for stage in self.stage_of)

    @property
    def apart(self) -> bool:
        """Whether the experts have positions of their own."""
        return any(place.attention != place.experts for place in self.places)

    @property
    def together(self) -> int:
        """Number of parts that go through a stage together. AF-Pipe takes them one after the other."""
        return 1 if self.apart else self.batch_degree

    def merges_onwards(self, layer: int) -> bool:
        """Whether the rows of a block go from its experts straight to the next stage, where they are summed.

        They do if the experts have positions of their own and the block ends its stage. The handover then carries the residual
        stream past the experts (DisagMoE, section 4.2.2).
        """
        stage = self.stage_of[layer]
        apart = self.blocks[layer].moe is not None and self.at[layer].attention != self.at[layer].experts
        return apart and layer == self.layers[stage][-1] and stage < len(self.stages) - 1

    @property
    def entry(self) -> str:
        """The kind of op that takes the input of a block."""
        return PROJECT if self.gathers else ATTENTION

    @cached_property
    def again(self) -> frozenset[str]:
        """All kinds of ops whose forward runs again: projections, too, if attention does."""
        return frozenset({*self.recompute, *((self.entry,) if ATTENTION in self.recompute else ())})

    # The ops.

    def ops(self) -> Iterator[Op]:
        for m in range(self.micro_batches):
            forward = [op for stage in range(len(self.stages)) for op in self._stage(stage, m)]
            yield from forward
            if self.backward:
                head = [op for op in forward if op.kind == HEAD]  # its pieces go backward in the order of their forward
                for op in (*head, *reversed([op for op in forward if op.kind != HEAD])):
                    yield from self.rerun(op)
                    if op.kind == HANDOVER:
                        yield from self.handovers("B", op.layer + 1, m) if op.part == 0 else ()
                    elif op.kind != COUNTS:
                        yield op._replace(direction="B")
                        yield from self.weights(op)
        for position in range(len(self.chunks)):
            yield from self.reductions(position)

    def reductions(self, position: int) -> Iterator[Op]:
        """Return the `reduce` ops of a position, buffer by buffer."""
        return (Op(REDUCE, "B", position, part) for part in range(len(self.chunks[position]) if self.chunks else 0))

    def chunk(self, op: Op) -> Chunk:
        """Return the chunk that a `reduce` op reduces."""
        return self.chunks[op.layer][op.part]

    def makers(self, op: Op) -> tuple[Maker, ...]:
        """Return the kinds and blocks of the ops that complete the gradients of a `reduce` op. Those of attention come from
        projections, too, if these are ops of their own."""
        several = {ATTENTION: tuple(dict.fromkeys((ATTENTION, self.entry)))}
        return tuple((each, layer) for kind, layer in self.chunk(op).makers for each in several.get(kind, (kind,)))

    def _stage(self, stage: int, m: int) -> Iterator[Op]:
        """Return the forward ops of a stage for one micro-batch, with the handover to the next stage."""
        layers = self.layers[stage]
        if stage == 0:
            yield from self.pieces(EMBED, 0, m)
        elif self.merges_onwards(layers[0] - 1):
            yield from (op._replace(kind=kind) for op in self.pieces(MERGE, layers[0] - 1, m) for kind in (COMBINE, MERGE))
        for layer in layers:
            for kind in (PROJECT, GATHER) if self.gathers else ():
                yield from self.pieces(kind, layer, m)
            yield from self.pieces(ATTENTION, layer, m)
            if not self.blocks[layer].moe:
                yield from self.pieces(FFN, layer, m)
            left_out = {*(() if self.ragged else (COUNTS,)), *((COMBINE, MERGE) if self.merges_onwards(layer) else ())}
            for part in range(self.slicing.degree if self.blocks[layer].moe else 0):
                yield from (Op(kind, "F", layer, part, m) for kind in _CHAIN if kind not in left_out)
            if layer in self.heads:
                yield from self.pieces(HEAD, layer, m)
        if stage < len(self.stages) - 1:
            yield from self.handovers("F", stage, m)

    def pieces(self, kind: str, layer: int, m: int = 0, direction: Direction = "F") -> Iterator[Op]:
        """Return all ops of a kind at a block, for micro-batch `m`."""
        return (Op(kind, direction, layer, part, m) for part in range(len(self._cuts(kind, layer)) - 1))

    def tokens(self, op: Op) -> range:
        """Return the tokens that an op works on, as positions in the rank's share of a sequence."""
        cuts = self._handover_cuts(op.direction, op.layer) if op.kind == HANDOVER else self._cuts(op.kind, op.layer)
        return range(cuts[op.part], cuts[op.part + 1])

    def handovers(self, direction: Direction, stage: int, m: int) -> Iterator[Op]:
        """Return all pieces of the handover that a stage sends, in the order in which the stage makes them."""
        parts = range(len(self._handover_cuts(direction, stage)) - 1)
        return (handover(direction, stage, m, part) for part in (parts if direction == "F" else reversed(parts)))

    def rerun(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that run again right before the backward of an op. The queries of a slice come from its projections."""
        if op.kind not in self.again or op.kind == PROJECT:
            return ()
        kinds = (self.entry, ATTENTION) if op.kind == ATTENTION and self.gathers else (op.kind,)
        return tuple(op._replace(kind=kind, direction="R") for kind in kinds)

    def weights(self, op: Op) -> tuple[Op, ...]:
        """Return the op with the gradients of weights that the backward of an op leaves, if it leaves them."""
        return (op._replace(direction="W"),) if op.kind in self.later else ()

    def output(self, layer: int) -> str:
        """Return the kind of op that produces a block's output."""
        return MERGE if self.blocks[layer].moe else FFN

    # The dependencies.

    def needs(self, op: Op) -> tuple[Op, ...]:
        if op.kind == REDUCE:
            passes = range(self.micro_batches)
            ways: dict[str, Direction] = dict.fromkeys(self.later, "W")
            makers = ((kind, layer, ways.get(kind, "B")) for kind, layer in self.makers(op))
            return tuple(each for kind, layer, way in makers for m in passes for each in self.pieces(kind, layer, m, way))
        if op.direction == "W":
            return (op._replace(direction="B"), *self._added_before(op))
        if op.direction == "R":
            return self._before_again(op)
        if op.direction == "F":
            return self._inputs(op)
        gradients = self._gradients(op)
        return gradients if OP_KINDS[op.kind].travels else (*gradients, self._state(op))

    def where(self, op: Op) -> tuple[int, ...]:
        if op.kind == REDUCE:
            return (op.layer,)
        if op.kind == HANDOVER:
            # Forward sends the output of the stage's last block to the first block of the next stage; backward, the reverse.
            sender, receiver = (-1, op.layer + 1) if op.direction == "F" else (0, op.layer - 1)
            ends = self.layers[op.layer][sender], self.layers[receiver][-1 - sender]
            return self.at[ends[0]].attention, self.at[ends[1]].attention
        place, half = self.at[op.layer], OP_KINDS[op.kind].half
        back_at = self.at[op.layer + 1].attention if self.merges_onwards(op.layer) else place.attention
        if half == "attention" or place.attention == place.experts:
            return (back_at if op.kind == MERGE else place.attention,)
        if half == "experts":
            return (place.experts,)
        outside = back_at if op.kind == COMBINE else place.attention
        outwards = (op.kind == COMBINE) == (op.direction == "B")  # dispatched rows, or gradients of combined rows
        return (outside, place.experts) if outwards else (place.experts, outside)

    def channel(self, op: Op) -> Channel | None:
        if op.kind == REDUCE:
            return f"{self.chunk(op).name}_gradients", op.layer, op.layer
        name = OP_KINDS[op.kind].travels
        if name is None:
            return None
        ends = self.where(op)
        if len(ends) == 1:
            return name, *ends, *ends
        return route(name, *ends)

    def frees(self, op: Op) -> tuple[Op, ...]:
        if op.direction != "B" or OP_KINDS[op.kind].travels:
            return ()
        forward = op._replace(direction="F")
        return (forward, self._state(op)) if op.kind in self.again else (forward,)

    def _before_again(self, op: Op) -> tuple[Op, ...]:
        """Return what comes before an op that runs again.

        Its state is large, so it is made late: when the backward of the next part, or of the first part of the next block at the
        position, has freed the state there. The first state of a micro-batch is made when its gradient is there.
        """
        own = op._replace(direction="F")
        if op.kind == ATTENTION and self.gathers:
            return own, op._replace(kind=PROJECT)  # which has waited for the rest
        kind = ATTENTION if op.kind == self.entry else op.kind
        done = (own,) if op.kind == kind else (own, own._replace(kind=kind))  # both use the place for the queries of a slice
        backward = op._replace(kind=kind, direction="B")
        if following := self._next_part(backward):
            return (*done, *following)
        where = self.where(own)
        later = (backward._replace(layer=layer, part=0) for layer in range(op.layer + 1, len(self.blocks)))
        free = next((each for each in later if self._has(kind, each.layer) and self.where(each) == where), None)
        return (*done, free) if free else (*done, *self._gradients(backward))

    def _has(self, kind: str, layer: int) -> bool:
        """Return whether a block has ops of a kind that may run again."""
        return kind == ATTENTION or (kind == EXPERT) == (self.blocks[layer].moe is not None)

    def _next_part(self, op: Op) -> tuple[Op, ...]:
        """Return the same op for the next part of the micro-batch; nothing for the last part."""
        return (op._replace(part=op.part + 1),) if op.part + 2 < len(self._cuts(op.kind, op.layer)) else ()

    def _last_part(self, op: Op) -> Op:
        """Return the same op for the last part of its micro-batch."""
        return op._replace(part=len(self._cuts(op.kind, op.layer)) - 2)

    def _added_before(self, op: Op) -> tuple[Op, ...]:
        """Return the op that adds to the same gradients of weights right before. It keeps the order of the backward, so sums
        have the same bits as without ops of their own."""
        if op.kind == HEAD:
            return self._head_before(op)
        if following := self._next_part(op):
            return following
        # Backward reaches the last part of a micro-batch first.
        group, place = divmod(op.micro_batch, self.together)
        before = op.micro_batch + 1 if place + 1 < self.together else (group - 1) * self.together
        return (op._replace(part=0, micro_batch=before),) if before >= 0 else ()

    def _head_before(self, op: Op) -> tuple[Op, ...]:
        """Return the same op for the piece of a head right before. Each goes backward right after its forward; further tokens
        follow for all parts of a group."""
        number, (group, place) = self.heads.index(op.layer), divmod(op.micro_batch, self.together)
        if op.part:
            return (op._replace(part=op.part - 1),)
        if place:
            return (self._last_part(op._replace(micro_batch=op.micro_batch - 1)),)
        if number:
            before = op._replace(layer=self.heads[number - 1], micro_batch=(group + 1) * self.together - 1)
            return (self._last_part(before),)
        return (self._last_part(op._replace(layer=self.heads[-1], micro_batch=op.micro_batch - 1)),) if op.micro_batch else ()

    def _inputs(self, op: Op) -> tuple[Op, ...]:
        """Return the forward ops whose results a forward op uses."""
        kind, layer, part = op.kind, op.layer, op.part
        if kind == EMBED:
            return ()
        if kind == ATTENTION:
            made = (op._replace(kind=PROJECT), op._replace(kind=GATHER)) if self.gathers else self._entering(op)
            return (*made, *((op._replace(part=part - 1),) if part else ()))
        if kind == PROJECT:
            return self._entering(op)
        if kind == ROUTE:
            # Routers run in order, because counters and statistics pass from piece to piece of a sequence.
            return (*self._sharing(op, ATTENTION, layer), *((op._replace(part=part - 1),) if part else ()))
        if kind == HEAD:
            return tuple(self._sharing(op, self.output(layer), layer))
        if kind == HANDOVER:
            last = self.layers[layer][-1]
            return tuple(self._sharing(op, ROUTE if self.merges_onwards(last) else self.output(last), last))
        if kind in (COMBINE, MERGE) and self.merges_onwards(layer):  # the rows' receiver learns from the handover how many come
            past = self._overlapping(op, self.handovers("F", self.stage_of[layer], op.micro_batch))
            return (op._replace(kind=EXPERT if kind == COMBINE else COMBINE), *past)
        return tuple(op._replace(kind=name) for name in _BEFORE[kind] if self.ragged or name != COUNTS)

    def _entering(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that produce the input of a slice of attention."""
        stage = self.stage_of[op.layer]
        if op.layer > self.layers[stage][0] or (stage and self.merges_onwards(op.layer - 1)):
            return tuple(self._sharing(op, self.output(op.layer - 1), op.layer - 1))
        if stage == 0:
            return (op._replace(kind=EMBED),)
        return tuple(self._overlapping(op, self.handovers("F", stage - 1, op.micro_batch)))

    def _gradients(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that make the gradient of the results of an op's forward, or the data of a backward handover."""
        if op.kind == HANDOVER:  # the gradient of the stage's input, or of the residual stream that went past the experts
            first = self.layers[op.layer][0]
            makers = self._sharing(op, *((MERGE, first - 1) if self.merges_onwards(first - 1) else (self.entry, first)))
            return tuple(maker._replace(direction="B") for maker in makers)
        stage = self.stage_of[op.layer]
        ends = op.layer == self.layers[stage][-1] and stage < len(self.stages) - 1
        onwards = self.merges_onwards(op.layer)
        back = tuple(self._overlapping(op, self.handovers("B", stage + 1, op.micro_batch))) if ends else ()
        if ends and not onwards and op.kind == self.output(op.layer):
            return back
        users = tuple(user._replace(direction="B") for user in self._users(op._replace(direction="F")))
        return (*users, *back) if onwards and op.kind == ROUTE else users

    def _users(self, op: Op) -> tuple[Op, ...]:
        """Return the ops of the same stage that use the results of a forward op."""
        kind, layer = op.kind, op.layer
        if kind == EMBED:
            return (op._replace(kind=self.entry),)
        if kind == ATTENTION:
            own = ROUTE if self.blocks[layer].moe else FFN
            return (*self._sharing(op, own, layer), *self._next_part(op))
        if kind == HEAD:
            return ()
        if kind == GATHER:  # the first slice goes backward last, and frees the keys and values of all
            return (op._replace(kind=ATTENTION), *self._next_part(op))
        if kind in (MERGE, FFN):
            last = layer == self.layers[self.stage_of[layer]][-1] and not self.merges_onwards(layer)
            head = self._sharing(op, HEAD, layer) if layer in self.heads else ()
            return (*head, *(() if last else self._sharing(op, self.entry, layer + 1)))
        onwards = kind == ROUTE and self.merges_onwards(layer)
        return tuple(op._replace(kind=name) for name in _AFTER[kind] if not (onwards and name == MERGE))

    def _sharing(self, op: Op, kind: str, layer: int) -> Iterator[Op]:
        """Return the forward ops of a kind at a block that share tokens with an op."""
        return self._overlapping(op, self.pieces(kind, layer, op.micro_batch))

    def _overlapping(self, op: Op, others: Iterator[Op]) -> Iterator[Op]:
        """Return those of some ops that share tokens with an op."""
        mine = self.tokens(op)
        for other in others:
            theirs = self.tokens(other)
            if theirs.start < mine.stop and mine.start < theirs.stop:
                yield other

    def _state(self, op: Op) -> Op:
        """Return the op whose saved state a backward op uses."""
        return op._replace(direction="R" if op.kind in self.again else "F")

    def _cuts(self, kind: str, layer: int) -> tuple[int, ...]:
        cut = OP_KINDS[self.output(layer) if kind == HEAD else kind].cut
        return self._slice_cuts if cut == "slices" else self._micro_batch_cuts

    def _handover_cuts(self, direction: str, stage: int) -> tuple[int, ...]:
        """Return the cuts of a stage's output, or of the gradient of its input."""
        if direction == "F":
            return self._cuts(HEAD, self.layers[stage][-1])
        onwards = self.merges_onwards(self.layers[stage][0] - 1)
        return self._micro_batch_cuts if onwards else self._slice_cuts

    @cached_property
    def _slice_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.attention, initial=0))

    @cached_property
    def _micro_batch_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.moe, initial=0))
