"""All ops of one optimizer step, block by block and piece by piece, and what binds them.

A micro-batch's sequences are cut twice (`Slicing`): attention and what is dense work on slices, MoE layers on micro-batches of
their own. Both cut the same tokens, so who needs whom across the two is a matter of which tokens they share; that is FoldMoE's
token buffer (section 4.2). Pieces that need no slicing are slicings of one piece.

| kind | what it does | works on |
|---|---|---|
| `embed` | rows of the vocabulary | slices |
| `attention` | norm, attention to everything up to this slice, residual | slices |
| `ffn` | norm, dense feed-forward, residual | slices |
| `route` | norm, router, shared expert, rows sorted by expert | micro-batches |
| `counts` | how many rows go where; only if `ragged` | micro-batches, network |
| `dispatch` | rows to their experts | micro-batches, network |
| `expert` | the experts | micro-batches |
| `combine` | rows back | micro-batches, network |
| `merge` | weighted sum of a token's rows, residual | micro-batches |
| `head` | norm, logits, loss | as the last block's end |
| `handover` | activations, or their gradient, between stages | whole, network |
| `reduce` | gradients to their sum over ranks; `layer` is the pipeline position, `part` the chunk | a chunk, network |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from foldray.schedule.graph import Channel, PipelineGraph
from foldray.schedule.op import Direction, Op, handover
from foldray.schedule.reduction import Chunk
from foldray.schedule.slicing import Slicing

BlockKind = Literal["dense", "moe"]

_CHAIN = ("route", "counts", "dispatch", "expert", "combine", "merge")
_ON_SLICES = ("embed", "attention", "ffn")
_NETWORK = {"counts": "counts", "dispatch": "tokens", "combine": "tokens", "handover": "activations"}


@dataclass(frozen=True)
class StepGraph:
    """Micro-batches through pipeline stages of dense and MoE blocks.

    Args:
        stages: kinds of the blocks of every virtual stage, in order; stage s lives at position s mod pp.
        slicing: of every micro-batch's sequences.
        pp: pipeline positions.
        micro_batches: of one optimizer step.
        ragged: whether row counts travel before rows do; without, experts have room for a fixed number.
        recompute: kinds of ops whose forward is computed again, as an op of its own (R), before their backward.
        backward: False for evaluation.
        batch_degree: micro-batches that go through a stage as one (FlowMoE's R); `micro_batches` is a multiple of it.
        chunks: by position, the chunks in which its gradients are reduced; none if that is not the step's business.
    """

    stages: tuple[tuple[BlockKind, ...], ...]
    slicing: Slicing
    pp: int = 1
    micro_batches: int = 1
    ragged: bool = True
    recompute: tuple[str, ...] = ()
    backward: bool = True
    batch_degree: int = 1
    chunks: tuple[tuple[Chunk, ...], ...] = ()

    @property
    def positions(self) -> int:
        return self.pp

    @property
    def pipeline(self) -> PipelineGraph:
        """The same step with stages as its smallest pieces."""
        return PipelineGraph(self.pp, self.micro_batches // self.batch_degree, len(self.stages) // self.pp, self.backward)

    @cached_property
    def blocks(self) -> tuple[BlockKind, ...]:
        """Kinds of all blocks; an op's `layer` is its block's place here."""
        return tuple(kind for stage in self.stages for kind in stage)

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """Blocks of every stage."""
        ends = list(accumulate(map(len, self.stages)))
        return tuple(range(end - len(stage), end) for end, stage in zip(ends, self.stages, strict=True))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of every block."""
        return tuple(number for number, layers in enumerate(self.layers) for _ in layers)

    # What there is to do.

    def ops(self) -> Iterator[Op]:
        for m in range(self.micro_batches):
            forward = [op for stage in range(len(self.stages)) for op in self._stage(stage, m)]
            yield from forward
            if self.backward:
                for op in reversed(forward):
                    if op.kind in self.recompute:
                        yield op._replace(direction="R")
                    if op.kind == "handover":
                        yield handover("B", op.layer + 1, m)
                    elif op.kind != "counts":
                        yield op._replace(direction="B")
        for position in range(len(self.chunks)):
            yield from self.reductions(position)

    def reductions(self, position: int) -> Iterator[Op]:
        """Of a position's chunks, buffer by buffer."""
        return (Op("reduce", "B", position, part) for part in range(len(self.chunks[position]) if self.chunks else 0))

    def chunk(self, op: Op) -> Chunk:
        """What a `reduce` op reduces."""
        return self.chunks[op.layer][op.part]

    def _stage(self, stage: int, m: int) -> Iterator[Op]:
        """A stage's forward ops, piece by piece."""
        layers = self.layers[stage]
        if stage == 0:
            yield from self.pieces("embed", 0, m)
        for layer in layers:
            yield from self.pieces("attention", layer, m)
            if self.blocks[layer] == "dense":
                yield from self.pieces("ffn", layer, m)
                continue
            for part in range(self.slicing.degree):
                yield from (Op(kind, "F", layer, part, m) for kind in _CHAIN if self.ragged or kind != "counts")
        if stage < len(self.stages) - 1:
            yield handover("F", stage, m)
        else:
            yield from self.pieces("head", layers[-1], m)

    def pieces(self, kind: str, layer: int, m: int = 0, direction: Direction = "F") -> Iterator[Op]:
        """All ops of a kind at a block."""
        return (Op(kind, direction, layer, part, m) for part in range(len(self._cuts(kind, layer)) - 1))

    def tokens(self, op: Op) -> range:
        """Positions of the (local) sequence that an op works on."""
        if op.kind == "handover":
            return range(self.slicing.length)
        cuts = self._cuts(op.kind, op.layer)
        return range(cuts[op.part], cuts[op.part + 1])

    def output(self, layer: int) -> str:
        """The kind of op that makes a block's output."""
        return "merge" if self.blocks[layer] == "moe" else "ffn"

    # What binds it.

    def needs(self, op: Op) -> tuple[Op, ...]:
        if op.kind == "reduce":
            passes = range(self.micro_batches)
            makers = self.chunk(op).makers
            return tuple(each for kind, layer in makers for m in passes for each in self.pieces(kind, layer, m, "B"))
        if op.direction == "R":
            return (op._replace(direction="F"),)
        if op.direction == "F":
            return self._inputs(op)
        gradients = tuple(self._backward(user) for user in self._users(op))
        return gradients if op.kind in _NETWORK else (*gradients, self._state(op))

    def where(self, op: Op) -> tuple[int, ...]:
        if op.kind == "reduce":
            return (op.layer,)
        if op.kind != "handover":
            return (self.stage_of[op.layer] % self.pp,)
        receiver = op.layer + (1 if op.direction == "F" else -1)
        return op.layer % self.pp, receiver % self.pp

    def channel(self, op: Op) -> Channel | None:
        if op.kind == "reduce":
            return f"{self.chunk(op).name}_gradients", op.layer, op.layer
        name = _NETWORK.get(op.kind)
        if name is None:
            return None
        ends = sorted(self.where(op))
        return ("gradients" if op.kind == "handover" and op.direction == "B" else name), ends[0], ends[-1]

    def frees(self, op: Op) -> tuple[Op, ...]:
        if op.direction != "B" or op.kind in _NETWORK or op.kind == "reduce":
            return ()
        forward = op._replace(direction="F")
        return (forward, self._state(op)) if op.kind in self.recompute else (forward,)

    def _inputs(self, op: Op) -> tuple[Op, ...]:
        """Forward ops whose results an op works on."""
        kind, layer, part, m = op.kind, op.layer, op.part, op.micro_batch
        if kind == "embed":
            return ()
        if kind == "attention":
            return (*self._entering(op), *((op._replace(part=part - 1),) if part else ()))
        if kind == "ffn":
            return (op._replace(kind="attention"),)
        if kind == "route":
            # In order, for counters and statistics run through a sequence.
            return (*self._sharing(op, "attention", layer), *((op._replace(part=part - 1),) if part else ()))
        if kind == "head":
            return tuple(self._sharing(op, self.output(layer), layer))
        if kind == "handover":
            last = self.layers[layer][-1]
            return tuple(self.pieces(self.output(last), last, m))
        before = {"counts": ("route",), "dispatch": ("route", "counts"), "expert": ("dispatch",), "combine": ("expert",)}
        kinds = before.get(kind, ("route", "combine"))
        return tuple(op._replace(kind=name) for name in kinds if self.ragged or name != "counts")

    def _entering(self, op: Op) -> tuple[Op, ...]:
        """Who makes the tokens that a slice of attention starts from."""
        stage = self.stage_of[op.layer]
        if op.layer > self.layers[stage][0]:
            return tuple(self._sharing(op, self.output(op.layer - 1), op.layer - 1))
        if stage == 0:
            return (op._replace(kind="embed"),)
        return (handover("F", stage - 1, op.micro_batch),)

    def _users(self, op: Op) -> tuple[Op, ...]:
        """Forward ops that work on a forward op's results, and so give it their gradient."""
        op = op._replace(direction="F")
        kind, layer, m = op.kind, op.layer, op.micro_batch
        if kind == "embed":
            return (op._replace(kind="attention"),)
        if kind == "attention":
            own = "route" if self.blocks[layer] == "moe" else "ffn"
            following = (op._replace(part=op.part + 1),) if op.part + 2 < len(self._cuts(kind, layer)) else ()
            return (*self._sharing(op, own, layer), *following)
        if kind == "head":
            return ()
        if kind == "handover":  # B: of a stage's input
            return tuple(self.pieces("attention", self.layers[layer][0], m))
        if kind in ("merge", "ffn"):
            return self._leaving(op)
        after = {"route": ("dispatch", "merge"), "dispatch": ("expert",), "expert": ("combine",), "combine": ("merge",)}
        return tuple(op._replace(kind=name) for name in after[kind])

    def _leaving(self, op: Op) -> tuple[Op, ...]:
        """Who uses tokens that a block has made."""
        stage = self.stage_of[op.layer]
        if op.layer < self.layers[stage][-1]:
            return tuple(self._sharing(op, "attention", op.layer + 1))
        if stage < len(self.stages) - 1:
            return (handover("F", stage, op.micro_batch),)
        return tuple(self._sharing(op, "head", op.layer))

    def _sharing(self, op: Op, kind: str, layer: int) -> Iterator[Op]:
        """Ops of a kind at a block that work on some of the same tokens."""
        mine = self.tokens(op)
        for other in self.pieces(kind, layer, op.micro_batch):
            theirs = self.tokens(other)
            if theirs.start < mine.stop and mine.start < theirs.stop:
                yield other

    def _backward(self, op: Op) -> Op:
        return handover("B", op.layer + 1, op.micro_batch) if op.kind == "handover" else op._replace(direction="B")

    def _state(self, op: Op) -> Op:
        """The op that made what a backward op differentiates."""
        return op._replace(direction="R" if op.kind in self.recompute else "F")

    def _cuts(self, kind: str, layer: int) -> tuple[int, ...]:
        slices = kind in _ON_SLICES or (kind == "head" and self.output(layer) == "ffn")
        return self._slice_cuts if slices else self._micro_batch_cuts

    @cached_property
    def _slice_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.attention, initial=0))

    @cached_property
    def _micro_batch_cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.slicing.moe, initial=0))
