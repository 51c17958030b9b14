"""The legal numbers of virtual stages, for all folds with the same number of positions and of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from foldray.blueprint import BlockSpec, make_stages
from foldray.fold import divisors
from foldray.planner.layout import PipelineLayout, Positions, make_layout
from foldray.planner.memory import blocks_in_flight
from foldray.schedule import PipelineGraph


class Staging(NamedTuple):
    """One number of virtual stages.

    Args:
        virtual_stages: number of stages of a position.
        layout: the stages.
        pipeline: the pipeline with at most 3·pp micro-batches, which are enough to find its memory (`memory.in_flight`).
    """

    virtual_stages: int
    layout: PipelineLayout
    pipeline: PipelineGraph


class Stagings(NamedTuple):
    """All legal numbers of virtual stages, and what their common bounds need.

    Args:
        all: all stagings.
        leanest: stagings without those that need at least the memory of another one on every rank.
        positions: the different contents of all positions; every entry has the contents of all positions.
        first_blocks: smallest number of blocks of a stage.
    """

    all: Sequence[Staging]
    leanest: Sequence[Staging]
    positions: Sequence[Positions]
    first_blocks: int


def make_stagings(blocks: Sequence[BlockSpec], pp: int, micro_batches: int) -> Stagings:
    """Return the stagings of a model's blocks.

    Several virtual stages need stages with equal numbers of blocks, and a multiple of pp micro-batches. Blocks of multi-token
    prediction do not count: they are in the last stage.
    """
    further = sum(block.mtp for block in blocks)
    layers = len(blocks) - further
    several = pp > 1 and pp in divisors(layers) and PipelineGraph(pp, micro_batches).full_rounds
    every, leanest = list[Staging](), list[tuple[Staging, list[Counter[BlockSpec]]]]()
    for virtual_stages in divisors(layers // pp) if several else [1]:
        cut = make_stages(layers, pp, virtual_stages, further=further)
        stages = tuple(tuple(blocks[i] for i in stage.layers) for stage in cut)
        pipeline = PipelineGraph(pp, min(micro_batches, 3 * pp), virtual_stages)
        every.append(found := Staging(virtual_stages, make_layout(stages, pp), pipeline))
        kept = [Counter(dict(blocks_in_flight(found.layout, pipeline, place))) for place in range(pp)]
        if not any(_needs_no_less(found, kept, *other) for other in leanest):
            leanest.append((found, kept))
    positions = list(dict.fromkeys(each.layout.positions for each in every))
    first_blocks = min(len(form.blocks) for each in every for form in each.layout.forms)
    return Stagings(every, [each for each, _ in leanest], positions, first_blocks)


def _needs_no_less(one: Staging, kept: list[Counter[BlockSpec]], other: Staging, others: list[Counter[BlockSpec]]) -> bool:
    """Whether `one` needs at least the memory of `other`.

    This holds if their positions have the same contents, and no position of `one` keeps fewer activations of any block.
    """
    same = one.layout.positions == other.layout.positions
    return same and all(mine >= theirs for mine, theirs in zip(kept, others, strict=True))
