"""A simulation of a candidate's whole step, op by op, with its reductions. `prediction.py` approximates it from parts."""

from __future__ import annotations

from collections.abc import Mapping

from foldray.finding import find, first_list
from foldray.kinds import REDUCE
from foldray.planner.apart import ApartWork
from foldray.planner.candidate import Candidate
from foldray.planner.costs import OpWork
from foldray.planner.prediction import Step
from foldray.schedule import Op, OpCosts, Span, StepGraph, ordered_schedule
from foldray.timeline import usage
from foldray.timeline.simulator import Simulation, simulate


def simulate_step(candidate: Candidate, work: OpWork, quick: bool = False) -> Simulation:
    """Simulate every op of a step up to the end of the last reduction, without the optimizer and the gather of weights.

    A found list is that of list scheduling, without local moves, which take long and gain some percent.

    Args:
        quick: whether a list is found by `first_list`.
    """
    graph, ordering = candidate.reducing, candidate.ordering
    if ordering.forward.row.found:
        given = graph, work.longest, ordering.ahead
        schedule = first_list(*given) if quick else find(*given, moves=False).schedule
    else:
        costs = _op_costs(graph, work) if ordering.goes_by_costs else None
        schedule = ordered_schedule(graph, ordering._replace(costs=costs))
    return simulate(graph, schedule, work.cost, work.issue)


def whole_seconds(candidate: Candidate, work: OpWork, quick: bool = False) -> float:
    """Return the seconds of a step whose every op is simulated (`simulate_step`), with the optimizer of the slowest position.

    The wait for the slowest node (`straggling`) is left out.
    """
    behind = work.behind() if isinstance(work, ApartWork) else Step(candidate, work).behind
    return pass_seconds(candidate, work, quick) + max(behind)


def pass_seconds(candidate: Candidate, work: OpWork, quick: bool = False) -> float:
    """Return the seconds of a step as `whole_seconds` does, without the optimizer and the gather of weights."""
    simulated, graph = simulate_step(candidate, work, quick), candidate.reducing
    beside = max(_hidden(graph, own) for own in _by_place(graph, simulated.spans))
    return simulated.seconds + work.rank.device.share["crowding"] * beside


def _by_place(graph: StepGraph, spans: Mapping[Op, Span]) -> list[dict[Op, Span]]:
    """Return the spans of the ops of every position."""
    found: list[dict[Op, Span]] = [{} for _ in range(graph.positions)]
    for op, span in spans.items():
        for place in graph.where(op):
            found[place][op] = span
    return found


def _hidden(graph: StepGraph, spans: Mapping[Op, Span]) -> float:
    """Return the seconds of one position in which communication overlaps with computation."""
    used = usage(graph, spans)
    return used.communication - used.exposed


def _op_costs(graph: StepGraph, work: OpWork) -> OpCosts:
    """Return the predicted times of ops, in the form in which training has the times of recorded ops."""

    def seconds(op: Op) -> float:
        return sum(each.seconds for each in work.work(op))

    own = {(op.kind, op.direction, op.part): seconds(op) for op in graph.ops() if op.micro_batch == 0 and op.kind != REDUCE}
    points = sorted({(graph.chunk(op).bytes, seconds(op)) for place in range(graph.positions) for op in graph.reductions(place)})
    if not points:
        return OpCosts(tuple(own.items()), 0.0, 0.0)
    (small, first), (large, last) = points[0], points[-1]
    per_byte = (last - first) / (large - small) if large > small else last / large
    return OpCosts(tuple(own.items()), max(0.0, last - per_byte * large), per_byte)
