"""All ops of one optimizer step, block by block and piece by piece.

The sequences of a micro-batch are cut twice (`Slicing`): attention and dense layers work on slices, MoE layers work on MoE
micro-batches. Both cuts have the same tokens. A sequence that is not cut has one slice and one MoE micro-batch.

A slice of attention is one op, unless context-parallel ranks gather keys and values slice by slice (`gathers`). The slice then
has three ops. Its projections and the gather of its keys and values can run before attention of the slice before it has ended.

`foldray/kinds.py` says what each kind of op does and how its data is cut. For a `reduce`, `layer` is the pipeline position
and `part` is the number of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, Self

from foldray.blueprint import BlockSpec, Maker, ModelSpec
from foldray.graph.chunks import Chunk
from foldray.graph.op import Direction, Op, handover
from foldray.graph.pipeline_graph import PipelineGraph
from foldray.graph.slicing import Slicing
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    COPY,
    COUNTS,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    GATHER,
    HANDOVER,
    HEAD,
    INTRA_COMBINE,
    INTRA_DISPATCH,
    MERGE,
    OFFLOAD,
    OP_KINDS,
    PROJECT,
    REDUCE,
    ROUTE,
    SHARED,
    WITH_WEIGHTS,
)

_INSIDE = (INTRA_DISPATCH, INTRA_COMBINE)
_CHAIN = (ROUTE, COUNTS, DISPATCH, INTRA_DISPATCH, SHARED, EXPERT, INTRA_COMBINE, COMBINE, MERGE)


def gathers(slicing: Slicing, cp: int) -> bool:
    """Return `StepGraph.gathers`: whether context-parallel ranks share slices. Whole sequences go around a ring instead."""
    return cp > 1 and slicing.cuts_attention


def leaves_weights(model: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of ops with products whose gradients of weights may be ops of their own.

    A router's product is too small. A tied head adds to the same gradient as the embedding, whose order would change. With
    adapters, only attention and experts have weights that are trained.
    """
    if (adapter := model.adapter) is not None:
        trained = {
            ATTENTION: bool(adapter.attention),
            PROJECT: bool(adapter.attention),
            EXPERT: adapter.inwards or adapter.outwards,
        }
        return tuple(kind for kind in WITH_WEIGHTS if trained.get(kind))
    return tuple(kind for kind in WITH_WEIGHTS if kind != HEAD or not model.tied_embeddings)


class Place(NamedTuple):
    """Pipeline positions of a block's two halves. They are the same if both halves share ranks."""

    attention: int
    experts: int


@dataclass(frozen=True)
class StepOps:
    """The ops of a step (`StepGraph`): micro-batches go through pipeline stages of dense and MoE blocks.

    Args:
        stages: the blocks of every virtual stage, in order.
        slicing: the cut of a rank's share of every sequence.
        micro_batches: micro-batches of one optimizer step, or their parts if `batch_degree` cuts them.
        ragged: whether ranks exchange row counts before rows. Otherwise experts have room for a fixed number of rows.
        recompute: kinds of ops whose forward runs again, as a separate op (R), before their backward.
        later: kinds of ops whose backward leaves the gradients of weights to an op of their own (W).
        whole: whether the gradients of all pieces of a block and micro-batch are one op, the W of the first piece, which goes
            backward last. Those of a head stay apart: the logits of one piece exist at a time.
        backward: False for evaluation.
        batch_degree: number of parts that go through a stage together (FlowMoE's R); `micro_batches` is a multiple of it.
        chunks: for every position, the chunks in which its gradients are reduced. Empty if the step reduces no gradients.
        places: for every block, the positions of its two halves. Empty if both are at the position of the block's stage. In
            evaluation, there are places of more blocks, because it leaves those of further tokens out.
        gathers: whether the keys and values of a slice are gathered from other ranks, in ops of their own.
        tied: whether the head's weight is the embedding's, so that both add to the same gradients.
        copied: blocks of which experts have copies. Once in a step, their weights travel to the copies (`copy` F), and the
            gradients of all micro-batches come home (`copy` B).
        offloaded: kinds of ops that keep their state on the host between forward and backward. It leaves once it is whole
            (`offload` F), and is fetched before the backward (`offload` B). `part` of such an op is the number of the kind here.
            The last block keeps its state on the device, because its backward begins at once.
        passes_on: whether ranks of a node pass rows on to each other, in ops of their own (`Fold.ep_inside`).
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
    whole: bool = False
    copied: tuple[int, ...] = ()
    offloaded: tuple[str, ...] = ()
    passes_on: bool = False

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
            return self.places[: len(self.blocks)]
        where = self.pipeline.at
        return tuple(Place(where[stage], where[stage]) for stage in self.stage_of)

    def with_chunks_of(self, ranks: Iterable[tuple[tuple[Chunk, ...], ...]]) -> Self:
        """Return the same step with the chunks of all positions.

        Args:
            ranks: the chunks in the graph of every rank, which knows those of its own position only.
        """
        return replace(self, chunks=tuple(max(of_position, key=len) for of_position in zip(*ranks, strict=True)))

    @property
    def in_units(self) -> Self:
        """The same step with pieces and chunks of no certain size. What needs what does not depend on sizes."""
        chunks = tuple(tuple(chunk._replace(start=0, stop=0, bytes=0) for chunk in of_position) for of_position in self.chunks)
        return replace(self, slicing=self.slicing.in_units, chunks=chunks)

    def alone(self, stages: tuple[tuple[BlockSpec, ...], ...], later: tuple[str, ...] = ()) -> Self:
        """Return a step of one micro-batch with the same cuts, through other stages at a position each, without reductions."""
        fewer = replace(self, chunks=(), places=(), later=later, copied=(), offloaded=())
        return replace(fewer, stages=stages, pp=len(stages), micro_batches=self.batch_degree)

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

    @property
    def around_experts(self) -> tuple[str, str]:
        """The kinds of ops that bring rows to experts, and that take them away."""
        return _INSIDE if self.passes_on else (DISPATCH, COMBINE)

    @cached_property
    def again(self) -> frozenset[str]:
        """All kinds of ops whose forward runs again: projections, too, if attention does."""
        return frozenset({*self.recompute, *((self.entry,) if ATTENTION in self.recompute else ())})

    def has(self, kind: str, layer: int) -> bool:
        """Return whether a block has ops of a kind."""
        moe = self.blocks[layer].moe
        if kind in _INSIDE and not self.passes_on:
            return False
        if kind in _CHAIN:
            return moe is not None and (kind != COUNTS or self.ragged) and (kind != SHARED or moe.shared is not None)
        return moe is None if kind == FFN else True

    # The ops.

    def ops(self) -> Iterator[Op]:
        yield from (Op(COPY, "F", layer) for layer in self.copied)
        for m in range(self.micro_batches):
            forward = [op for stage in range(len(self.stages)) for op in self._stage(stage, m)]
            yield from forward
            if self.backward:
                head = [op for op in forward if op.kind == HEAD]  # its pieces go backward in the order of their forward
                for op in (*head, *reversed([op for op in forward if op.kind != HEAD])):
                    if op.kind == HANDOVER:
                        yield from self.handovers("B", op.layer + 1, m) if op.part == 0 else ()
                    elif op.kind != COUNTS:
                        yield from self.backward_of(op)
                        yield from (left for left in self.weights(op) if left.part == op.part)
        yield from (Op(COPY, "B", layer) for layer in self.copied)
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
        projections, too, if these are ops of their own; the last ones of experts come from their copies."""
        several = {ATTENTION: tuple(dict.fromkeys((ATTENTION, self.entry)))}
        made = ((maker, layer) for kind, layer in self.chunk(op).makers for maker in several.get(kind, (kind,)))
        return tuple((COPY if kind == EXPERT and layer in self.copied else kind, layer) for kind, layer in made)

    def adding(self, kind: str, layer: int) -> tuple[Op, ...]:
        """Return the ops that add to the gradients of a kind's weights at a block."""
        if kind == COPY:
            return (Op(COPY, "B", layer),)
        return tuple(op for m in range(self.micro_batches) for op in self.pieces(kind, layer, m, self.adds(kind)))

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
            left_out = (COMBINE, MERGE) if self.merges_onwards(layer) else ()
            for part in range(self.slicing.degree if self.blocks[layer].moe else 0):
                yield from (Op(kind, "F", layer, part, m) for kind in _CHAIN if self.has(kind, layer) and kind not in left_out)
            yield from self.offloads(layer, m)
            if layer in self.heads:
                yield from self.pieces(HEAD, layer, m)
        if stage < len(self.stages) - 1:
            yield from self.handovers("F", stage, m)

    def pieces(self, kind: str, layer: int, m: int = 0, direction: Direction = "F") -> Iterator[Op]:
        """Return all ops of a kind at a block, for micro-batch `m`."""
        count = 1 if direction == "W" and self._joins(kind) else len(self._cuts(kind, layer)) - 1
        return (Op(kind, direction, layer, part, m) for part in range(count))

    def offloads(self, layer: int, m: int = 0) -> Iterator[Op]:
        """Return the ops that bring to the host what a block keeps of micro-batch `m`, for its backward."""
        goes = layer < len(self.blocks) - 1
        kinds = enumerate(self.offloaded if goes else ())
        return (Op(OFFLOAD, "F", layer, part, m) for part, kind in kinds if self.has(kind, layer))

    def offload_of(self, op: Op) -> Op | None:
        """Return the op that brings to the host what an op keeps for its backward; None if that stays on the device."""
        kind = ATTENTION if op.kind == PROJECT else op.kind
        if kind not in self.offloaded or op.layer == len(self.blocks) - 1:
            return None
        return Op(OFFLOAD, "F", op.layer, self.offloaded.index(kind), op.micro_batch)

    def moved_by(self, op: Op) -> tuple[Op, ...]:
        """Return the forward ops whose state an `offload` moves. Queries of a slice belong to attention."""
        kind = self.offloaded[op.part]
        kinds = dict.fromkeys((self.entry, kind) if kind == ATTENTION else (kind,))
        return tuple(piece for each in kinds for piece in self.pieces(each, op.layer, op.micro_batch))

    def left_before(self, op: Op) -> tuple[Op, ...]:
        """Return the `offload` that must be over before a forward op computes, if what ops of its kind keep goes to the host.

        A stage then has the states of two blocks of a micro-batch: of the block that computes, and of the one whose state leaves.
        """
        kind = ATTENTION if op.kind == PROJECT else op.kind
        if kind not in self.offloaded:
            return ()
        layers = self.layers[self.stage_of[op.layer]]
        before = [layer for layer in layers if layer <= op.layer - 2 and self.has(kind, layer)]
        return (Op(OFFLOAD, "F", before[-1], self.offloaded.index(kind), op.micro_batch),) if before else ()

    def tokens(self, op: Op) -> range:
        """Return the tokens that an op works on, as positions in the rank's share of a sequence."""
        if OP_KINDS[op.kind].cut == "sequence":
            return range(self.slicing.length)
        cuts = self._handover_cuts(op.direction, op.layer) if op.kind == HANDOVER else self._cuts(op.kind, op.layer)
        if op.direction == "W" and self._joins(op.kind):
            return range(cuts[-1])
        return range(cuts[op.part], cuts[op.part + 1])

    def block(self, op: Op) -> BlockSpec | None:
        """Return the block of an op; None for embedding and head."""
        return None if op.kind in (EMBED, HEAD) else self.blocks[op.layer]

    def travelling(self, stage: int, direction: Direction) -> Iterator[Op]:
        """Return the ops of one pass of a stage that travel, for the parts of the first micro-batch, with the handover that the
        stage sends. An op comes after those of them that it needs."""
        parts = range(self.batch_degree)
        forward = [op for m in parts for op in self._stage(stage, m) if OP_KINDS[op.kind].travels]
        if direction == "F":
            return iter(forward)
        backward = [op._replace(direction="B") for op in reversed(forward) if op.kind not in (COUNTS, HANDOVER)]
        pieces = (op for m in reversed(parts if stage else ()) for op in self.handovers("B", stage, m))
        return chain(backward, pieces)

    def handovers(self, direction: Direction, stage: int, m: int) -> Iterator[Op]:
        """Return all pieces of the handover that a stage sends, in the order in which the stage makes them."""
        parts = range(len(self._handover_cuts(direction, stage)) - 1)
        return (handover(direction, stage, m, part) for part in (parts if direction == "F" else reversed(parts)))

    def backward_of(self, op: Op) -> tuple[Op, ...]:
        """Return the backward of a forward op, after what runs again right before it. The queries of a slice come from its
        projections."""
        again = () if op.kind == PROJECT or op.kind not in self.again else (op.kind,)
        kinds = (self.entry, ATTENTION) if again == (ATTENTION,) and self.gathers else again
        return (*(op._replace(kind=kind, direction="R") for kind in kinds), op._replace(direction="B"))

    def adds(self, kind: str) -> Direction:
        """Return the direction of the ops of a kind that add to gradients of weights."""
        return "W" if kind in self.later else "B"

    def weights(self, op: Op) -> tuple[Op, ...]:
        """Return the op with the gradients of weights that the backward of an op leaves, if it leaves them."""
        if op.kind not in self.later:
            return ()
        return (op._replace(direction="W", part=0 if self._joins(op.kind) else op.part),)

    def left_by(self, op: Op) -> tuple[Op, ...]:
        """Return the backwards that leave their gradients of weights to an op (W)."""
        if self._joins(op.kind):
            return tuple(self.pieces(op.kind, op.layer, op.micro_batch, "B"))
        return (op._replace(direction="B"),)

    def _joins(self, kind: str) -> bool:
        return self.whole and kind != HEAD

    def output(self, layer: int) -> str:
        """Return the kind of op that produces a block's output."""
        return MERGE if self.blocks[layer].moe else FFN

    def _cuts(self, kind: str, layer: int) -> tuple[int, ...]:
        cut = OP_KINDS[self.output(layer) if kind == HEAD else kind].cut
        if cut == "weights":
            return (0, self.slicing.length)
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
