"""Generators of pipeline schedules: the order in which every position computes its stages, with the handovers between them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from foldray.errors import UserError
from foldray.graph.op import Direction, Op, Schedule, stage
from foldray.graph.pipeline_graph import PipelineGraph
from foldray.orders.handovers import place_handovers, unit_spans, with_handovers


@lru_cache(maxsize=24)  # every position takes its list from the same lists
def pipeline(graph: PipelineGraph, woven: bool = False) -> Schedule:
    """Return the schedule of a pipeline.

    - With one stage per position: 1F1B with a flush at the end of the step (DAPPLE, arXiv:2007.01045, and PipeDream-Flush,
      arXiv:2006.09503, in the form of Megatron-LM, arXiv:2104.04473). Position p warms up with pp − 1 − p forwards. Then it
      alternates one forward and one backward, and ends with the remaining backwards. It keeps the activations of at most pp − p
      forwards.
    - With virtual stages: interleaved 1F1B (Megatron-LM, arXiv:2104.04473, section 2.2), whose bubble shrinks by their number.
      The stages of a position are pp stages apart. A round of pp micro-batches goes through the first stage of a position, then
      through its second stage, and so on. Position p warms up with (virtual_stages − 1)·pp + 2·(pp − 1 − p) forwards. Like later
      versions of Megatron-LM, this leaves out the special case of micro_batches = pp (all forwards first).
    - For evaluation: forwards in rounds of pp micro-batches. The last round may be smaller.

    Args:
        woven: whether the two passes of a pair run at once, after more warm-up forwards (`passes`). The backward of a pair
            follows its forward in the list; `weave` orders their ops. Since the backward frees a block for each that the forward
            fills, a position keeps the activations of its warm-up and of one more block.
    """
    check_pipeline(graph)
    positions = range(graph.pp)
    if not (woven and graph.backward):
        return with_handovers(graph, tuple(passes(graph, position).ops for position in positions))
    orders = [passes(graph, position, woven=True) for position in positions]
    units = [[*((op,) for op in order.warm_up), *order.pairs, *((op,) for op in order.cool_down)] for order in orders]
    return place_handovers(graph, tuple(order.ops for order in orders), unit_spans(graph, units))


def check_pipeline(graph: PipelineGraph) -> None:
    """Raise an error for a graph for which `pipeline` has no schedule."""
    if graph.backward and graph.virtual_stages > 1 and not graph.full_rounds:
        rule = f"interleaving needs the micro-batches of a step ({graph.micro_batches}) to be a multiple of pp={graph.pp}"
        raise UserError("schedule.virtual_stages", graph.virtual_stages, rule, [1])


class Passes(NamedTuple):
    """The `stage` ops of a position, in order.

    Args:
        pairs: a forward and a backward in turns. If they are woven, the two passes of a pair do not need each other.
    """

    warm_up: tuple[Op, ...]
    pairs: tuple[tuple[Op, Op], ...]
    cool_down: tuple[Op, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.warm_up, *(op for pair in self.pairs for op in pair), *self.cool_down)


def passes(graph: PipelineGraph, position: int, woven: bool = False) -> Passes:
    """Return the `stage` ops of a position.

    Args:
        woven: whether the two passes of a pair run at once. The position then warms up with one more forward, so that the
            backward of a pair never waits for its forward. Both passes end with the pair. So a position warms up with two
            forwards more than the next one, as in the interleaved schedule; with one more, two positions would take turns.
    """
    forwards = _passes(graph, "F", position)
    if not graph.backward:
        return Passes(forwards, (), ())
    backwards, behind = _passes(graph, "B", position), graph.pp - 1 - position
    virtual = graph.virtual_stages > 1
    warm_up = (graph.virtual_stages - 1) * graph.pp + (2 if virtual or woven else 1) * behind
    warm_up = min(warm_up + woven, len(forwards))
    steady = len(forwards) - warm_up
    return Passes(forwards[:warm_up], tuple(zip(forwards[warm_up:], backwards[:steady], strict=True)), backwards[steady:])


def _passes(graph: PipelineGraph, direction: Direction, position: int) -> tuple[Op, ...]:
    """Return all ops of one direction at a position: each round of pp micro-batches goes through all of its stages."""
    layers = graph.stages_at(position)
    rounds = [range(graph.micro_batches)[first : first + graph.pp] for first in range(0, graph.micro_batches, graph.pp)]
    layers = layers if direction == "F" else layers[::-1]
    return tuple(stage(direction, layer, m) for group in rounds for layer in layers for m in group)
