"""Generators of pipeline schedules: the order in which every position computes, then woven with its handovers."""

from __future__ import annotations

from foldray.errors import UserError
from foldray.schedule.graph import PipelineGraph
from foldray.schedule.op import Direction, Op, Schedule, stage
from foldray.schedule.weave import weave


def pipeline(graph: PipelineGraph) -> Schedule:
    """The schedule of a pipeline: forward only, interleaved where it has virtual stages, else 1F1B."""
    if not graph.backward:
        return forward_only(graph)
    return interleaved(graph) if graph.virtual_stages > 1 else one_f_one_b(graph)


def check_pipeline(graph: PipelineGraph) -> None:
    """Refuse a graph for which `pipeline` knows no schedule.

    Raises:
        UserError: virtual stages, and micro_batches is no multiple of pp.
    """
    if graph.backward and graph.virtual_stages > 1 and not graph.full_rounds:
        rule = f"interleaving needs the micro-batches of a step ({graph.micro_batches}) to be a multiple of pp={graph.pp}"
        raise UserError("schedule.virtual_stages", graph.virtual_stages, rule, [1])


def one_f_one_b(graph: PipelineGraph) -> Schedule:
    """1F1B with a flush at the end of the step.

    Position p warms up with pp − 1 − p forwards, then does one forward and one backward in turn, then the backwards that are
    left. It keeps at most pp − p forwards alive.

    Sources: DAPPLE (arXiv:2007.01045), PipeDream-Flush (arXiv:2006.09503), both as Megatron-LM has them (arXiv:2104.04473).
    """
    if graph.virtual_stages > 1 or not graph.backward:
        raise ValueError("1F1B is for one stage per position, with a backward")
    return weave(graph, tuple(computed(graph, p) for p in range(graph.pp)))


def interleaved(graph: PipelineGraph) -> Schedule:
    """Interleaved 1F1B: a position holds several stages, pp apart, which shrinks the bubble by their number.

    Micro-batches go in rounds of pp through one stage of a position after the other. Position p warms up with
    (virtual_stages − 1)·pp + 2·(pp − 1 − p) forwards.

    Source: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv:2104.04473), section 2.2. Its
    special case of micro_batches = pp (all forwards first) is left out, as later versions of Megatron-LM do.

    Raises:
        UserError: micro_batches is no multiple of pp.
    """
    if graph.virtual_stages < 2 or not graph.backward:
        raise ValueError("interleaving is for several stages per position, with a backward")
    check_pipeline(graph)
    return weave(graph, tuple(computed(graph, p) for p in range(graph.pp)))


def forward_only(graph: PipelineGraph) -> Schedule:
    """Forwards in rounds of pp micro-batches, for evaluation; the last round may be smaller."""
    if graph.backward:
        raise ValueError("a graph with a backward needs a schedule with one")
    return weave(graph, tuple(computed(graph, p) for p in range(graph.pp)))


def computed(graph: PipelineGraph, position: int) -> tuple[Op, ...]:
    """What a position computes: some forwards, then a forward and a backward in turn, then the backwards that are left."""
    forwards = _passes(graph, "F", position)
    if not graph.backward:
        return forwards
    backwards, behind = _passes(graph, "B", position), graph.pp - 1 - position
    warm_up = (graph.virtual_stages - 1) * graph.pp + 2 * behind if graph.virtual_stages > 1 else behind
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return (*forwards[:warm_up], *(op for pair in pairs for op in pair), *backwards[steady:])


def _passes(graph: PipelineGraph, direction: Direction, position: int) -> tuple[Op, ...]:
    """All ops of one direction at a position: a round of pp micro-batches through each of its stages, then the next round."""
    layers = graph.stages_at(position)
    rounds = [range(graph.micro_batches)[first : first + graph.pp] for first in range(0, graph.micro_batches, graph.pp)]
    layers = layers if direction == "F" else layers[::-1]
    return tuple(stage(direction, layer, m) for group in rounds for layer in layers for m in group)
