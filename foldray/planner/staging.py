"""How many stages a position may have, for all folds with the same number of positions and of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from foldray.blueprint import BlockSpec, make_stages
from foldray.fold import divisors
from foldray.planner.layout import Content, PipelineLayout, make_layout
from foldray.planner.memory import blocks_in_flight
from foldray.schedule import PipelineGraph


class Staging(NamedTuple):
    """One number of stages.

    Args:
        virtual_stages: of a position.
        pipeline: of no more micro-batches than it has in flight, as far as memory goes by it (`memory.in_flight`).
    """

    virtual_stages: int
    layout: PipelineLayout
    pipeline: PipelineGraph


class Stagings(NamedTuple):
    """All numbers of stages that are legal, and what bounds them together.

    Args:
        leanest: those of which none surely needs more memory than another, whatever the rank.
        contents_at: what positions are made of; each once.
        first_blocks: blocks of a position's first stage at least.
    """

    all: Sequence[Staging]
    leanest: Sequence[Staging]
    contents_at: Sequence[tuple[Content, ...]]
    first_blocks: int


def make_stagings(blocks: Sequence[BlockSpec], pp: int, micro_batches: int) -> Stagings:
    """Of a model's blocks. Interleaving needs stages alike in size, and full rounds of micro-batches."""
    layers = len(blocks)
    several = pp > 1 and pp in divisors(layers) and PipelineGraph(pp, micro_batches).full_rounds
    every, leanest = list[Staging](), list[tuple[Staging, list[Counter[BlockSpec]]]]()
    for virtual_stages in divisors(layers // pp) if several else [1]:
        stages = tuple(tuple(blocks[i] for i in stage.layers) for stage in make_stages(layers, pp, virtual_stages))
        pipeline = PipelineGraph(pp, min(micro_batches, 3 * pp), virtual_stages)
        every.append(found := Staging(virtual_stages, make_layout(stages, pp), pipeline))
        kept = [Counter(dict(blocks_in_flight(found.layout, pipeline, place))) for place in range(pp)]
        if not any(_needs_no_less(found, kept, *other) for other in leanest):
            leanest.append((found, kept))
    contents_at = list(dict.fromkeys(each.layout.contents_at for each in every))
    first_blocks = min(len(form.blocks) for each in every for form in each.layout.forms)
    return Stagings(every, [each for each, _ in leanest], contents_at, first_blocks)


def _needs_no_less(one: Staging, kept: list[Counter[BlockSpec]], other: Staging, others: list[Counter[BlockSpec]]) -> bool:
    """Whether one needs at least the memory of another: positions hold the same, and none keeps less of any kind of block."""
    same = one.layout.contents_at == other.layout.contents_at
    return same and all(mine >= theirs for mine, theirs in zip(kept, others, strict=True))
