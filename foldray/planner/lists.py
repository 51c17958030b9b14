"""The lists that predictions are put together from, compiled once for all costs: a stage's by itself, and a pipeline's."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.kinds import EMBED, HANDOVER, HEAD
from foldray.schedule import CompiledSchedule, Op, Overlap, PipelineGraph, Slicing, StepGraph, computed, stage_order, woven


class Piece(NamedTuple):
    """An op, as far as its cost depends on it: arguments of `RankCosts.price`."""

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
) -> CompiledSchedule[Piece]:
    """One pass of one stage among these, for the micro-batches that go together. Its classes of costs are `Piece`s."""
    graph = StepGraph(stages, slicing, len(stages), batch_degree, False, recompute, batch_degree=batch_degree)

    def piece(op: Op) -> Piece:
        return Piece(op.kind, op.direction == "B", graph.tokens(op), block_of(graph, op))

    lists: list[tuple[Op, ...]] = [()] * len(stages)
    lists[number] = stage_order(graph, number, direction, overlap)
    return CompiledSchedule(graph, lists, piece, partial=True)


def block_of(graph: StepGraph, op: Op) -> BlockSpec | None:
    """The block that an op belongs to; embedding and head belong to none."""
    return None if op.kind in (EMBED, HEAD) else graph.blocks[op.layer]


class StagePass(NamedTuple):
    """What computing costs in a pipeline depends on this."""

    direction: str
    stage: int


class PipelineList:
    """A pipeline's lists, with stages as wholes."""

    def __init__(self, graph: PipelineGraph):
        def cost_class(op: Op) -> StagePass | None:
            return None if op.kind == HANDOVER else StagePass(op.direction, op.layer)

        schedule = woven(graph, tuple(computed(graph, place) for place in range(graph.pp)))
        self.compiled = CompiledSchedule(graph, schedule, cost_class)
        last = {op.layer: i for i, op in enumerate(self.compiled.ops) if op.kind != HANDOVER and op.direction == "B"}
        self.last_backward = [[last[stage] for stage in graph.stages_at(place)] for place in range(graph.pp)]

    def backward_ends(self, forward: tuple[float, ...], backward: tuple[float, ...], handover: float) -> list[list[float]]:
        """When the last backward of each stage of each position ends.

        Args:
            forward, backward: seconds of every stage.
            handover: seconds from a stage to the next, once both ends are there. Each way has a link of its own.
        """
        seconds = {"F": forward, "B": backward}
        classes = self.compiled.classes
        ends = self.compiled.one_pass([handover if each is None else seconds[each[0]][each[1]] for each in classes]).ends
        return [[ends[i] for i in own] for own in self.last_backward]


@lru_cache(maxsize=64)
def pipeline_list(graph: PipelineGraph) -> PipelineList:
    """The compiled lists of a pipeline."""
    return PipelineList(graph)
