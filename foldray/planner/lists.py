"""The compiled lists that predictions use: the list of one pass of a stage, and the lists of a pipeline of whole stages."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.kinds import EMBED, HANDOVER, HEAD
from foldray.schedule import CompiledSchedule, Op, Overlap, PipelineGraph, Slicing, StepGraph, computed, stage_order, woven


class Piece(NamedTuple):
    """The properties of an op that its cost depends on: the arguments of `RankCosts.price`."""

    kind: str
    back: bool
    tokens: range
    block: BlockSpec | None


@lru_cache(maxsize=2048)
def stage_list(
    stages: tuple[tuple[BlockSpec, ...], ...],
    number: int,
    direction: str,
    overlap: Overlap,
    slicing: Slicing,
    recompute: tuple[str, ...],
    batch_degree: int,
    gathers: bool = False,
) -> CompiledSchedule[Piece]:
    """Return the compiled list of one pass of one stage, for all parts of a micro-batch. Its cost classes are `Piece`s.

    Args:
        stages: the blocks of every stage.
        number: number of the stage.
        direction: F or B.
        overlap, slicing, recompute, batch_degree: as in `Ordering`, with the slicing of a rank's share of a sequence.
        gathers: as in `StepGraph`.
    """
    graph = StepGraph(stages, slicing, len(stages), batch_degree, False, recompute, batch_degree=batch_degree, gathers=gathers)

    def piece(op: Op) -> Piece:
        return Piece(op.kind, op.direction == "B", graph.tokens(op), block_of(graph, op))

    lists: list[tuple[Op, ...]] = [()] * len(stages)
    lists[number] = stage_order(graph, number, direction, overlap)
    return CompiledSchedule(graph, lists, piece, partial=True)


def block_of(graph: StepGraph, op: Op) -> BlockSpec | None:
    """Return the block of an op; None for embedding and head."""
    return None if op.kind in (EMBED, HEAD) else graph.blocks[op.layer]


class StagePass(NamedTuple):
    """The cost class of a `stage` op: its direction and stage."""

    direction: str
    stage: int


class PipelineList:
    """The compiled lists of a pipeline whose smallest pieces are stages.

    Attributes:
        compiled: the lists.
        last_backward: for every position and each of its stages, the number of the stage's last backward op.
    """

    def __init__(self, graph: PipelineGraph):
        def cost_class(op: Op) -> StagePass | None:
            return None if op.kind == HANDOVER else StagePass(op.direction, op.layer)

        schedule = woven(graph, tuple(computed(graph, place) for place in range(graph.pp)))
        self.compiled = CompiledSchedule(graph, schedule, cost_class)
        last = {op.layer: i for i, op in enumerate(self.compiled.ops) if op.kind != HANDOVER and op.direction == "B"}
        self.last_backward = [[last[stage] for stage in graph.stages_at(place)] for place in range(graph.pp)]

    def backward_ends(self, forward: tuple[float, ...], backward: tuple[float, ...], handover: float) -> list[list[float]]:
        """Return, for every position and each of its stages, the seconds until the stage's last backward ends.

        Args:
            forward, backward: seconds of every stage for one micro-batch.
            handover: seconds of a handover from a stage to the next, after both ends have started it. Each direction has its
                own link.
        """
        seconds = {"F": forward, "B": backward}
        classes = self.compiled.classes
        ends = self.compiled.one_pass([handover if each is None else seconds[each[0]][each[1]] for each in classes]).ends
        return [[ends[i] for i in own] for own in self.last_backward]


@lru_cache(maxsize=64)
def pipeline_list(graph: PipelineGraph) -> PipelineList:
    """Return the compiled lists of a pipeline."""
    return PipelineList(graph)
