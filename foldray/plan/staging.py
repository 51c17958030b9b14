"""The stages to try, for all folds with the same number of positions and of micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from foldray.blueprint import BlockSpec, even_sizes, make_stages, stage_positions
from foldray.costs.layout import PipelineLayout, Positions, make_layout
from foldray.costs.memory import blocks_in_flight
from foldray.fold import divisors
from foldray.graph import PipelineGraph


class Staging(NamedTuple):
    """One way to cut a model into stages.

    Args:
        virtual_stages: number of stages of a position.
        stage_layers: number of blocks of each stage; None cuts evenly.
        pipeline: the pipeline with at most 3·pp micro-batches, which are enough to find its memory (`memory.in_flight`).
    """

    virtual_stages: int
    stage_layers: tuple[int, ...] | None
    layout: PipelineLayout
    pipeline: PipelineGraph


class Weights(NamedTuple):
    """How long the parts of a model compute, in units of its mean block.

    Args:
        blocks: block → its time; 1 for blocks that are missing.
        ends: time of the heads and of the blocks of multi-token prediction, which the last stage has as well.
    """

    blocks: Mapping[BlockSpec, float]
    ends: float


_EQUAL = Weights({}, 0.0)


class Stagings(NamedTuple):
    """All stagings to try, and the properties of all of them together that bounds need.

    Args:
        leanest: stagings, except for those that need at least the memory of another one on every rank.
        positions: the different contents of pipelines, each with all its positions.
        first_blocks: smallest number of blocks of a stage.
    """

    all: Sequence[Staging]
    leanest: Sequence[Staging]
    positions: Sequence[Positions]
    first_blocks: int


def make_stagings(blocks: Sequence[BlockSpec], pp: int, micro_batches: int, weights: Weights = _EQUAL) -> Stagings:
    """Return the stagings of a model's blocks.

    Several virtual stages need a multiple of pp micro-batches. Their number divides the blocks of the fullest position.

    Args:
        blocks: the blocks, with those of multi-token prediction, which are in the last stage.
    """
    further = sum(block.mtp for block in blocks)
    layers = len(blocks) - further
    several = pp > 1 and PipelineGraph(pp, micro_batches).full_rounds
    stagings, leanest = list[Staging](), list[tuple[Staging, list[Counter[BlockSpec]]]]()
    for virtual_stages in divisors(-(-layers // pp)) if several else [1]:
        pipeline = PipelineGraph(pp, min(micro_batches, 3 * pp), virtual_stages)
        for sizes in _cuts(blocks[:layers], pp, virtual_stages, weights):
            cut = make_stages(layers, pp, virtual_stages, sizes, further)
            stages = tuple(tuple(blocks[i] for i in stage.layers) for stage in cut)
            stagings.append(staging := Staging(virtual_stages, sizes, make_layout(stages, pp), pipeline))
            kept = [Counter(dict(blocks_in_flight(staging.layout, pipeline, place))) for place in range(pp)]
            if not any(_needs_no_less(staging, kept, *lean) for lean in leanest):
                leanest.append((staging, kept))
    positions = list(dict.fromkeys(staging.layout.positions for staging in stagings))
    first_blocks = min(len(form.blocks) for staging in stagings for form in staging.layout.forms)
    return Stagings(stagings, [staging for staging, _ in leanest], positions, first_blocks)


def _cuts(blocks: Sequence[BlockSpec], pp: int, virtual_stages: int, weights: Weights) -> Iterator[tuple[int, ...] | None]:
    """Yield the numbers of blocks of stages: even ones (None), and those with fewer blocks beside the embedding and the head.

    Either the head counts as the number of blocks that take about as long, or both ends count as one block each, as in
    Megatron-LM's options `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`. A cut is left out
    if another cut loads no position more, and has no more blocks at the first position, which keeps the activations of most
    micro-batches.
    """
    layers, count = len(blocks), pp * virtual_stages
    if count > layers:
        return
    known = list[tuple[float, int]]()
    for first, last in ((0, 0), (0, math.floor(weights.ends)), (0, math.ceil(weights.ends)), (1, 1)) if pp > 1 else ((0, 0),):
        sizes = even_sizes(layers, count, first, last)
        if min(sizes) < 1:
            continue
        loads, held, begin, end = [0.0] * pp, 0, 0, 0
        for size, place in zip(sizes, stage_positions(count, pp), strict=True):
            begin, end = end, end + size
            loads[place] += sum(weights.blocks.get(block, 1.0) for block in blocks[begin:end])
            held += size if place == 0 else 0
        most = max(*loads[:-1], loads[-1] + weights.ends) if pp > 1 else 0.0
        if not any(most >= load and held >= few for load, few in known):
            known.append((most, held))
            yield tuple(sizes) if first + last else None


def _needs_no_less(one: Staging, kept: list[Counter[BlockSpec]], lean: Staging, lean_kept: list[Counter[BlockSpec]]) -> bool:
    """Whether `one` needs at least the memory of `lean`.

    This holds if their positions have the same contents, and no position of `one` keeps fewer activations of any block.
    """
    same = one.layout.positions == lean.layout.positions
    return same and all(more >= fewer for more, fewer in zip(kept, lean_kept, strict=True))
