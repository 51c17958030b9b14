"""All ops of one optimizer step, block by block and piece by piece, and what binds them.

A micro-batch's sequences are cut twice (`Slicing`): attention and what is dense work on slices, MoE layers on micro-batches of
their own. Both cut the same tokens, so who needs whom across the two is a matter of which tokens they share; that is FoldMoE's
token buffer (section 4.2). Pieces that need no slicing are slicings of one piece.

`foldray/kinds.py` says what the kinds of ops do and what they are cut by. Of a `reduce`, `layer` is the pipeline position and
`part` the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    COUNTS,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    HANDOVER,
    HEAD,
    MERGE,
    OP_KINDS,
    REDUCE,
    ROUTE,
)
from foldray.schedule.chunks import Chunk
from foldray.schedule.graph import Channel, PipelineGraph
from foldray.schedule.op import Direction, Op, handover
from foldray.schedule.slicing import Slicing

_CHAIN = (ROUTE, COUNTS, DISPATCH, EXPERT, COMBINE, MERGE)
_BEFORE = {
    FFN: (ATTENTION,), COUNTS: (ROUTE,), DISPATCH: (ROUTE, COUNTS), EXPERT: (DISPATCH,), COMBINE: (EXPERT,),
    MERGE: (ROUTE, COMBINE),
}  # fmt: skip
_AFTER = {EMBED: (ATTENTION,), ROUTE: (DISPATCH, MERGE), DISPATCH: (EXPERT,), EXPERT: (COMBINE,), COMBINE: (MERGE,)}
"""Of ops on the same piece: whose results a forward op works on, and who works on its results."""


class Place(NamedTuple):
    """Pipeline positions of a block's two halves, the same one where they share workers."""

    attention: int
    experts: int


@dataclass(frozen=True)
class StepGraph:
    """Micro-batches through pipeline stages of dense and MoE blocks.

    Args:
        stages: the blocks of every virtual stage, in order.
        slicing: of every micro-batch's sequences.
        pp: pipeline positions.
        micro_batches: of one optimizer step.
        ragged: whether row counts travel before rows do; without, experts have room for a fixed number.
        recompute: kinds of ops whose forward is computed again, as an op of its own (R), before their backward.
        backward: False for evaluation.
        batch_degree: micro-batches that go through a stage as one (FlowMoE's R); `micro_batches` is a multiple of it.
        chunks: by position, the chunks in which its gradients are reduced; none if that is not the step's business.
        places: by block, where its attention and its experts stand; none if all of a stage stands at its position.
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

    @property
    def positions(self) -> int:
        return self.pp

    @property
    def pipeline(self) -> PipelineGraph:
        """The same step with stages as its smallest pieces."""
        return PipelineGraph(self.pp, self.micro_batches // self.batch_degree, len(self.stages) // self.pp, self.backward)

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """All blocks; an op's `layer` is its block's place here."""
        return tuple(block for stage in self.stages for block in stage)

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """Blocks of every stage."""
        ends = list(accumulate(map(len, self.stages)))
        return tuple(range(end - len(stage), end) for end, stage in zip(ends, self.stages, strict=True))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of every block."""
        return tuple(number for number, layers in enumerate(self.layers) for _ in layers)

    @cached_property
    def at(self) -> tuple[Place, ...]:
        """Where every block stands."""
        if self.places:
            return self.places
        where = self.pipeline.at
        return tuple(Place(where[stage], where[stage]) for stage in self.stage_of)

    # What there is to do.

    def ops(self) -> Iterator[Op]:
        for m in range(self.micro_batches):
            forward = [op for stage in range(len(self.stages)) for op in self._stage(stage, m)]
            yield from forward
            if self.backward:
                for op in reversed(forward):
                    if op.kind in self.recompute:
                        yield op._replace(direction="R")
                    if op.kind == HANDOVER:
                        yield handover("B", op.layer + 1, m)
                    elif op.kind != COUNTS:
                        yield op._replace(direction="B")
        for position in range(len(self.chunks)):
            yield from self.reductions(position)

    def reductions(self, position: int) -> Iterator[Op]:
        """Of a position's chunks, buffer by buffer."""
        return (Op(REDUCE, "B", position, part) for part in range(len(self.chunks[position]) if self.chunks else 0))

    def chunk(self, op: Op) -> Chunk:
        """What a `reduce` op reduces."""
        return self.chunks[op.layer][op.part]

    def _stage(self, stage: int, m: int) -> Iterator[Op]:
        """A stage's forward ops, piece by piece."""
        layers = self.layers[stage]
        if stage == 0:
            yield from self.pieces(EMBED, 0, m)
        for layer in layers:
            yield from self.pieces(ATTENTION, layer, m)
            if not self.blocks[layer].moe:
                yield from self.pieces(FFN, layer, m)
                continue
            for part in range(self.slicing.degree):
                yield from (Op(kind, "F", layer, part, m) for kind in _CHAIN if self.ragged or kind != COUNTS)
        if stage < len(self.stages) - 1:
            yield handover("F", stage, m)
        else:
            yield from self.pieces(HEAD, layers[-1], m)

    def pieces(self, kind: str, layer: int, m: int = 0, direction: Direction = "F") -> Iterator[Op]:
        """All ops of a kind at a block."""
        return (Op(kind, direction, layer, part, m) for part in range(len(self._cuts(kind, layer)) - 1))

    def tokens(self, op: Op) -> range:
        """Positions of the (local) sequence that an op works on."""
        if op.kind == HANDOVER:
            return range(self.slicing.length)
        cuts = self._cuts(op.kind, op.layer)
        return range(cuts[op.part], cuts[op.part + 1])

    def output(self, layer: int) -> str:
        """The kind of op that makes a block's output."""
        return MERGE if self.blocks[layer].moe else FFN

    # What binds it.

    def needs(self, op: Op) -> tuple[Op, ...]:
        if op.kind == REDUCE:
            passes = range(self.micro_batches)
            makers = self.chunk(op).makers
            return tuple(each for kind, layer in makers for m in passes for each in self.pieces(kind, layer, m, "B"))
        if op.direction == "R":
            return (op._replace(direction="F"),)
        if op.direction == "F":
            return self._inputs(op)
        gradients = tuple(self._backward(user) for user in self._users(op))
        return gradients if OP_KINDS[op.kind].travels else (*gradients, self._state(op))

    def where(self, op: Op) -> tuple[int, ...]:
        if op.kind == REDUCE:
            return (op.layer,)
        if op.kind == HANDOVER:
            # Forward, what the stage's last block makes goes to the first one of the next.
            sender, receiver = (-1, op.layer + 1) if op.direction == "F" else (0, op.layer - 1)
            ends = self.layers[op.layer][sender], self.layers[receiver][-1 - sender]
            return self.at[ends[0]].attention, self.at[ends[1]].attention
        place, half = self.at[op.layer], OP_KINDS[op.kind].half
        if half == "attention" or place.attention == place.experts:
            return (place.attention,)
        if half == "experts":
            return (place.experts,)
        outwards = (op.kind == COMBINE) == (op.direction == "B")  # rows to the experts, or gradients of rows that came back
        return place if outwards else (place.experts, place.attention)

    def channel(self, op: Op) -> Channel | None:
        if op.kind == REDUCE:
            return f"{self.chunk(op).name}_gradients", op.layer, op.layer
        name = OP_KINDS[op.kind].travels
        if name is None:
            return None
        ends = sorted(self.where(op))
        return ("gradients" if op.kind == HANDOVER and op.direction == "B" else name), ends[0], ends[-1]

    def frees(self, op: Op) -> tuple[Op, ...]:
        if op.direction != "B" or OP_KINDS[op.kind].travels:
            return ()
        forward = op._replace(direction="F")
        return (forward, self._state(op)) if op.kind in self.recompute else (forward,)

    def _inputs(self, op: Op) -> tuple[Op, ...]:
        """Forward ops whose results an op works on."""
        kind, layer, part, m = op.kind, op.layer, op.part, op.micro_batch
        if kind == EMBED:
            return ()
        if kind == ATTENTION:
            return (*self._entering(op), *((op._replace(part=part - 1),) if part else ()))
        if kind == ROUTE:
            # In order, for counters and statistics run through a sequence.
            return (*self._sharing(op, ATTENTION, layer), *((op._replace(part=part - 1),) if part else ()))
        if kind == HEAD:
            return tuple(self._sharing(op, self.output(layer), layer))
        if kind == HANDOVER:
            last = self.layers[layer][-1]
            return tuple(self.pieces(self.output(last), last, m))
        return tuple(op._replace(kind=name) for name in _BEFORE[kind] if self.ragged or name != COUNTS)

    def _entering(self, op: Op) -> tuple[Op, ...]:
        """Who makes the tokens that a slice of attention starts from."""
        stage = self.stage_of[op.layer]
        if op.layer > self.layers[stage][0]:
            return tuple(self._sharing(op, self.output(op.layer - 1), op.layer - 1))
        if stage == 0:
            return (op._replace(kind=EMBED),)
        return (handover("F", stage - 1, op.micro_batch),)

    def _users(self, op: Op) -> tuple[Op, ...]:
        """Forward ops that work on a forward op's results, and so give it their gradient."""
        op = op._replace(direction="F")
        kind, layer, m = op.kind, op.layer, op.micro_batch
        if kind == ATTENTION:
            own = ROUTE if self.blocks[layer].moe else FFN
            following = (op._replace(part=op.part + 1),) if op.part + 2 < len(self._cuts(kind, layer)) else ()
            return (*self._sharing(op, own, layer), *following)
        if kind == HEAD:
            return ()
        if kind == HANDOVER:  # B: of a stage's input
            return tuple(self.pieces(ATTENTION, self.layers[layer][0], m))
        if kind in (MERGE, FFN):
            return self._leaving(op)
        return tuple(op._replace(kind=name) for name in _AFTER[kind])

    def _leaving(self, op: Op) -> tuple[Op, ...]:
        """Who uses tokens that a block has made."""
        stage = self.stage_of[op.layer]
        if op.layer < self.layers[stage][-1]:
            return tuple(self._sharing(op, ATTENTION, op.layer + 1))
        if stage < len(self.stages) - 1:
            return (handover("F", stage, op.micro_batch),)
        return tuple(self._sharing(op, HEAD, op.layer))

    def _sharing(self, op: Op, kind: str, layer: int) -> Iterator[Op]:
        """Ops of a kind at a block that work on some of the same tokens."""
        mine = self.tokens(op)
        for other in self.pieces(kind, layer, op.micro_batch):
            theirs = self.tokens(other)
            if theirs.start < mine.stop and mine.start < theirs.stop:
                yield other

    def _backward(self, op: Op) -> Op:
        return handover("B", op.layer + 1, op.micro_batch) if op.kind == HANDOVER else op._replace(direction="B")

    def _state(self, op: Op) -> Op:
        """The op that made what a backward op differentiates."""
        return op._replace(direction="R" if op.kind in self.recompute else "F")

    def _cuts(self, kind: str, layer: int) -> tuple[int, ...]:
        cut = OP_KINDS[self.output(layer) if kind == HEAD else kind].cut
        return self._slice_cuts if cut == "slices" else self._micro_batch_cuts

    @cached_property
    def _slice_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.attention, initial=0))

    @cached_property
    def _micro_batch_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.moe, initial=0))
