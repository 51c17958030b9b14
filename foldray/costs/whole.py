"""A simulation of a candidate's whole step, op by op, with its reductions. `prediction.py` approximates it from parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from foldray.clock import Busy, CompiledSchedule, OpCosts, Recording, busy
from foldray.clock.simulator import Simulation, simulate, usages
from foldray.clock.times import run
from foldray.costs.apart import ApartWork
from foldray.costs.candidate import Candidate
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.finding import find, first_list
from foldray.graph import Op, Reduction, Schedule, StepGraph
from foldray.kinds import REDUCE
from foldray.orders import Ordering, ordered_schedule


def simulate_step(candidate: Candidate, work: OpWork, quick: bool = False) -> Simulation:
    """Simulate every op of a step up to the end of the last reduction, without the optimizer and the gather of weights.

    A found list is that of list scheduling, without local moves, which take long and gain some percent; if `quick`, that of
    `first_list`.
    """
    return simulate(candidate.reducing, _schedule(candidate, work, quick), work.cost, work.issue)


def _schedule(candidate: Candidate, work: OpWork, quick: bool) -> Schedule:
    graph, ordering = candidate.reducing, candidate.ordering
    if ordering.forward.row.found:
        given = graph, work.longest, ordering.ahead
        return first_list(*given) if quick else find(*given, moves=False).schedule
    costs = _op_costs(graph, work) if ordering.goes_by_costs else None
    return ordered_schedule(graph, ordering._replace(costs=costs))


def busy_step(candidate: Candidate, work: OpWork) -> Busy:
    """Return what the positions of a simulated step are busy with, as `foldray.clock.busy` says it of a recorded step.

    The optimizer, the gather of weights, and what overlap costs computation are left out.
    """
    graph, schedule = candidate.reducing, _schedule(candidate, work, quick=False)
    spans = simulate(graph, schedule, work.cost, work.issue).spans
    return busy(graph, [Recording(ops, {op: spans[op] for op in ops}) for ops in schedule])


def whole_seconds(candidate: Candidate, work: OpWork, quick: bool = False) -> float:
    """Return the seconds of a step whose every op is simulated (`simulate_step`), with the optimizer of the slowest position.

    The wait for the slowest node (`straggling`) is left out.
    """
    behind = work.behind() if isinstance(work, ApartWork) else Step(candidate, work).behind
    return pass_seconds(candidate, work, quick) + max(behind)


def pass_seconds(candidate: Candidate, work: OpWork, quick: bool = False) -> float:
    """Return the seconds of a step as `whole_seconds` does, without the optimizer and the gather of weights."""
    compiled, crowding = _compiled(candidate, work, quick), work.rank.device.share["crowding"]
    ran = run(compiled, work.cost, work.issue)
    overlapped = max(used.communication - used.exposed for used in usages(compiled, ran)) if crowding else 0.0
    return max(ran.ends) + crowding * overlapped


def _compiled(candidate: Candidate, work: OpWork, quick: bool) -> CompiledSchedule[Op]:
    """Return the compiled lists of a step. Its classes are the ops of the first micro-batch, which stand for those of all."""
    graph, ordering = candidate.reducing, candidate.ordering
    if graph.apart and not ordering.forward.row.found and not ordering.goes_by_costs:
        return _compiled_pipe(graph.in_units, ordering.alive, ordering.reduction)
    return CompiledSchedule(graph, _schedule(candidate, work, quick), _of_first)


@lru_cache(maxsize=8)  # many candidates of a search differ in sizes alone
def _compiled_pipe(graph: StepGraph, alive: int | None, reduction: Reduction) -> CompiledSchedule[Op]:
    return CompiledSchedule(graph, ordered_schedule(graph, Ordering(alive=alive, reduction=reduction)), _of_first)


def _of_first(op: Op) -> Op:
    return Op(*op[:-1])


class LongStep(NamedTuple):
    """Seconds of a step; the costs and the seconds of the part of its micro-batches that was simulated."""

    seconds: float
    part: OpWork
    part_seconds: float


def long_step(
    work_of: Callable[[int], OpWork], micro_batches: int, positions: int, rounds: tuple[int, int], quick: bool = False
) -> LongStep:
    """Return the seconds of a step as `whole_seconds` does. Of many micro-batches, only some are simulated.

    In steady state, every further micro-batch takes as long as those that were simulated last.

    Args:
        work_of: number of micro-batches → the costs of a step with this number.
        rounds: two numbers of micro-batches per position, which are simulated if there are more.
    """
    fewer, more = (count * positions for count in rounds)
    works = [work_of(count) for count in ([micro_batches] if micro_batches <= more else [fewer, more])]
    seconds = [whole_seconds(work.candidate, work, quick) for work in works]
    further = 0.0 if micro_batches <= more else (micro_batches - more) * (seconds[-1] - seconds[0]) / (more - fewer)
    return LongStep(seconds[-1] + further, works[-1], seconds[-1])


def _op_costs(graph: StepGraph, work: OpWork) -> OpCosts:
    """Return the predicted times of ops, in the form in which training has the times of recorded ops."""

    def seconds(op: Op) -> float:
        return sum(part.seconds for part in work.work(op))

    ops = {(op.kind, op.direction, op.part): seconds(op) for op in graph.ops() if op.micro_batch == 0 and op.kind != REDUCE}
    points = sorted({(graph.chunk(op).bytes, seconds(op)) for place in range(graph.positions) for op in graph.reductions(place)})
    if not points:
        return OpCosts(tuple(ops.items()), 0.0, 0.0)
    (small, first), (large, last) = points[0], points[-1]
    per_byte = (last - first) / (large - small) if large > small else last / large
    return OpCosts(tuple(ops.items()), max(0.0, last - per_byte * large), per_byte)
