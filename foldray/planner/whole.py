"""A candidate's step simulated whole, op by op, reductions of gradients included: what `prediction` is put together to equal."""

from __future__ import annotations

from collections.abc import Mapping

from foldray.kinds import REDUCE
from foldray.planner.candidate import Candidate
from foldray.planner.costs import OpWork
from foldray.planner.prediction import Step
from foldray.schedule import Op, OpCosts, Span, StepGraph, step_schedule
from foldray.timeline import usage
from foldray.timeline.simulator import Simulation, simulate


def simulate_step(candidate: Candidate, work: OpWork) -> Simulation:
    """Every op of a step, up to the last gradient's arrival; optimizer and what follows it left out."""
    graph, ordering = candidate.reducing, candidate.ordering
    costs = _op_costs(graph, work) if ordering.goes_by_costs else None
    return simulate(graph, step_schedule(graph, ordering.forward, ordering.backward, ordering.reduction, costs), work.cost)


def whole_seconds(candidate: Candidate, work: OpWork) -> float:
    """Of a step, every op of it simulated, with its optimizer: the slowest position's stands for all."""
    simulated, graph = simulate_step(candidate, work), candidate.reducing
    beside = max(_hidden(graph, simulated.spans, place) for place in range(graph.pp))
    return simulated.seconds + work.rank.device.share["crowding"] * beside + max(Step(candidate, work).behind)


def _hidden(graph: StepGraph, spans: Mapping[Op, Span], place: int) -> float:
    """Seconds of one position in which something travelled beside what it computed."""
    used = usage(graph, {op: span for op, span in spans.items() if place in graph.where(op)})
    return used.communication - used.exposed


def _op_costs(graph: StepGraph, work: OpWork) -> OpCosts:
    """What a list is written by, as training has it from recorded ops."""

    def seconds(op: Op) -> float:
        return sum(each.seconds for each in work.work(op))

    own = {(op.kind, op.direction, op.part): seconds(op) for op in graph.ops() if op.micro_batch == 0 and op.kind != REDUCE}
    points = sorted({(graph.chunk(op).bytes, seconds(op)) for place in range(graph.pp) for op in graph.reductions(place)})
    if not points:
        return OpCosts(tuple(own.items()), 0.0, 0.0)
    (small, first), (large, last) = points[0], points[-1]
    per_byte = (last - first) / (large - small) if large > small else last / large
    return OpCosts(tuple(own.items()), max(0.0, last - per_byte * large), per_byte)
