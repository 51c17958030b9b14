"""The compiled lists that predictions use: the list of one pass of a stage, and the lists of a pipeline of whole stages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.clock import CompiledSchedule
from foldray.graph import Direction, Op, PipelineGraph, StepGraph
from foldray.kinds import EMBED, HANDOVER, HEAD
from foldray.orders import Overlap, passes, place_handovers, stage_order


class Piece(NamedTuple):
    """The properties of an op that its cost depends on: the arguments of `RankCosts.price`."""

    kind: str
    back: bool
    tokens: range
    block: BlockSpec | None


class StageList(NamedTuple):
    """The compiled list of one pass of one stage.

    Args:
        compiled: the list. Its cost classes are `Piece`s.
        taken, given: the ops that take over pieces of another stage, and the ops that make the pieces that this stage hands
            over, as (number of the op, part of the micro-batch, tokens).
        before_head: number of ops before the head, if the head comes after all other ops.
    """

    compiled: CompiledSchedule[Piece]
    taken: tuple[tuple[int, int, range], ...]
    given: tuple[tuple[int, int, range], ...]
    before_head: int


@lru_cache(maxsize=2048)
def stage_list(graph: StepGraph, number: int, direction: Direction, overlap: Overlap) -> StageList:
    """Return the compiled list of one pass of one stage, for all parts of a micro-batch.

    Args:
        graph: the stage between its neighbours (`StepGraph.alone`).
    """

    def piece(op: Op) -> Piece:
        return Piece(op.kind, op.direction == "B", graph.tokens(op), block_of(graph, op))

    lists: list[tuple[Op, ...]] = [()] * graph.positions
    lists[number] = tuple(op for op in stage_order(graph, number, direction, overlap) if op.kind != HANDOVER)
    compiled = CompiledSchedule(graph, lists, piece, partial=True)

    def pieces_of(kind: str, layer: int) -> tuple[tuple[int, int, range], ...]:
        wanted = kind, layer, direction
        ops = [(i, op) for i, op in enumerate(compiled.ops) if (op.kind, op.layer, op.direction) == wanted]
        return tuple((i, op.micro_batch, graph.tokens(op)) for i, op in ops)

    first, last = graph.layers[number][0], graph.layers[number][-1]
    ends = pieces_of(graph.entry, first), pieces_of(graph.output(last), last)
    taken, given = ends if direction == "F" else ends[::-1]
    return StageList(compiled, taken, given, sum(op.kind != HEAD for op in compiled.ops))


def block_of(graph: StepGraph, op: Op) -> BlockSpec | None:
    """Return the block of an op; None for embedding and head."""
    return None if op.kind in (EMBED, HEAD) else graph.blocks[op.layer]


class StagePass(NamedTuple):
    """The cost class of a `stage` op, or of the handover after it."""

    kind: str
    direction: str
    stage: int


def backward_ends(graph: PipelineGraph, seconds: Mapping[StagePass, float]) -> list[list[float]]:
    """Return, for every position and each of its stages, the seconds until the stage's last backward ends.

    Args:
        graph: a pipeline whose smallest pieces are stages.
        seconds: seconds of every pass of a stage for one micro-batch, and of every handover, from the end of the pass to
            the earliest start of the next one. They may be negative. Each direction has its own link.
    """
    compiled, last_backward = _pipeline_lists(graph)
    ends = compiled.one_pass([seconds[cost_class] for cost_class in compiled.classes]).ends
    return [[ends[i] for i in last] for last in last_backward]


@lru_cache(maxsize=64)
def _pipeline_lists(graph: PipelineGraph) -> tuple[CompiledSchedule[StagePass], list[list[int]]]:
    """Return the compiled lists, and the number of the last backward op of every stage at each position."""
    schedule = place_handovers(graph, tuple(passes(graph, place).ops for place in range(graph.pp)))
    compiled = CompiledSchedule(graph, schedule, lambda op: StagePass(op.kind, op.direction, op.layer))
    last = {op.layer: i for i, op in enumerate(compiled.ops) if op.kind != HANDOVER and op.direction == "B"}
    return compiled, [[last[stage] for stage in graph.stages_at(place)] for place in range(graph.pp)]
