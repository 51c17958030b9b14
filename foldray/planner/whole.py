"""A candidate's step simulated whole, op by op, reductions of gradients included: what `prediction` is put together to equal."""

from __future__ import annotations

from foldray.planner.candidate import Candidate
from foldray.planner.costs import OpWork
from foldray.planner.prediction import Step
from foldray.planner.simulator import Simulation, simulate
from foldray.schedule import Op, OpCosts, StepGraph, step_schedule


def simulate_step(candidate: Candidate, work: OpWork) -> Simulation:
    """Every op of a step, up to the last gradient's arrival; optimizer and what follows it left out."""
    graph, ordering = candidate.reducing, candidate.ordering
    costs = _op_costs(graph, work) if ordering.goes_by_costs else None
    return simulate(graph, step_schedule(graph, ordering.forward, ordering.backward, ordering.reduction, costs), work.cost)


def whole_seconds(candidate: Candidate, work: OpWork) -> float:
    """Of a step, every op of it simulated, with its optimizer: the slowest position's stands for all."""
    return simulate_step(candidate, work).seconds + max(Step(candidate, work).behind)


def _op_costs(graph: StepGraph, work: OpWork) -> OpCosts:
    """What a list is written by, as training has it from recorded ops."""

    def seconds(op: Op) -> float:
        return sum(each.seconds for each in work.work(op))

    own = {(op.kind, op.direction, op.part): seconds(op) for op in graph.ops() if op.micro_batch == 0 and op.kind != "reduce"}
    points = sorted({(graph.chunk(op).bytes, seconds(op)) for place in range(graph.pp) for op in graph.reductions(place)})
    if not points:
        return OpCosts(tuple(own.items()), 0.0, 0.0)
    (small, first), (large, last) = points[0], points[-1]
    per_byte = (last - first) / (large - small) if large > small else last / large
    return OpCosts(tuple(own.items()), max(0.0, last - per_byte * large), per_byte)
