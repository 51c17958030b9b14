"""The search for workers of their own for the experts: how many, and under which fold (DisagMoE, section 4.3).

`roofline` is the paper's first step: GPUs and adapters of both sides by their FLOPs and bytes alone (`allocator.py`). The
search does not begin there, but tries splits under many folds, in the order of a lower bound: the time of the position or of
the adapters that have most to do. So no candidate that it leaves out could be among the best, unless the search has reached
its limit of simulated steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import half_flops, ranks_of_a_token
from foldray.blueprint.ownership import check_apart
from foldray.clock import Busy
from foldray.costs.apart import ApartWork, Sides
from foldray.costs.candidate import Candidate
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import GIB, Memory
from foldray.costs.ops import OpWork
from foldray.costs.prediction import straggling
from foldray.costs.whole import busy_step, long_step
from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.kinds import HANDOVER, REDUCE
from foldray.orders import AF_PIPE, LIST, Ordering, Overlap
from foldray.plan.allocator import Allocation, Demand, Kind, allocate
from foldray.plan.listed import AHEADS, FEWER_ROUNDS, step_seconds
from foldray.plan.search import without_cycles
from foldray.plan.space import Space, in_two_levels

_TP = _CP = (1, 2, 4, 8)
_POSITIONS = (1, 2, 4, 8)  # of each side
_SPLITS = 32  # most splits of the GPUs that are tried for a fold
_OTHER_BATCH = 0.02  # any number of data-parallel places is tried, with the nearest batch that it divides, if that is as near
_ALIVE = (4, 3, 2)  # micro-batches alive, in quarters of the number of positions, where more do not fit into memory
_ROUNDS = 5, 9  # rounds of as many micro-batches as positions that are simulated; the last ones stand for all others


class Placed(NamedTuple):
    """A way to train with workers of their own for the experts.

    Args:
        candidate: the candidate. Its batch may differ a little from the job's, so that it is a multiple of dp.
        seconds: predicted seconds of a step with the job's batch.
        memory: bytes of the fullest rank of attention, and of the fullest rank of the experts.
        fits: whether both fit into memory.
        mfu: model FLOPs over the peak of all GPUs, attention counted causally.
    """

    candidate: Candidate
    seconds: float
    memory: tuple[Memory, Memory]
    fits: bool
    mfu: float


def roofline(space: Space) -> tuple[Demand, Allocation]:
    """Return the FLOPs and bytes of a layer for one sequence, and the best GPUs and adapters for them: one adapter per GPU."""
    model, job, device = space.job.model, space.job, Device.of(space.job, space.hardware)
    attention, experts = half_flops(model, job.seq_len)
    ep = max(n for n in divisors(model.experts) if n <= space.hardware.gpus_per_node)
    rows = ranks_of_a_token(model, ep) * model.hidden * device.bytes
    demand = Demand(attention * job.seq_len, experts * job.seq_len, rows * job.seq_len)
    ours, theirs = kinds(space)
    own = None if space.expert_gpus is None else space.gpus - space.expert_gpus
    other = theirs if space.experts else None
    return demand, allocate(demand, space.gpus, ours.flops, space.gpus, ours.nic_rate, other, own)


def kinds(space: Space) -> tuple[Kind, Kind]:
    """Return what the GPUs of attention and of the experts reach, and their adapters."""
    ours, theirs = (
        Kind(side.peak * side.share["gemm"], side.hardware.inter.gb_s * 1e9 * side.share["exchange"]) for side in sides(space)[:2]
    )
    return ours, theirs


@without_cycles()
def search_placements(space: Space, top: int = 5, most: int = 64) -> list[Placed]:
    """Return the fastest placements that fit into memory, the fastest first. If none fits, return some that do not.

    Args:
        space: the job, the cluster, and its pins for tp, cp, pp (the positions of each side) and ep.
        most: most placements whose steps are simulated with AF-Pipe. The fastest ones are then also simulated with gradients of
            weights apart, and with found lists.
    """
    check_apart(space.job.model)
    numbers, works = itertools.count(), list(_works(space))
    if not works:
        rule = "has no legal placement of attention and experts on workers of their own for this model and batch"
        raise UserError("gpus", space.gpus, rule)
    # A list takes long to make, so candidates whose ranks cannot even hold their parameters get none.
    holding = [work for work in works if _fit_into(work.held(), space)] or works[:top]
    queue = [(_least(work, space), next(numbers), work) for work in holding]
    heapq.heapify(queue)
    fit: list[Placed] = []
    unfit: list[ApartWork] = []
    while queue and len(fit) < most:
        least, _, work = heapq.heappop(queue)
        fastest = sorted(placed.seconds for placed in fit)[:top]
        if len(fastest) == top and fastest[-1] <= least:
            break
        if _fits(work, space):
            fit.append(_placed(work, space, True))
            continue
        unfit.append(work)
        for leaner in _leaner(work, space):
            heapq.heappush(queue, (_least(leaner, space), next(numbers), leaner))
    by_seconds = attrgetter("seconds")
    if not fit:
        return sorted((_placed(work, space, False) for work in unfit[:top]), key=by_seconds)
    return sorted((_best_order(placed, space) for placed in sorted(fit, key=by_seconds)[:top]), key=by_seconds)


def _best_order(placed: Placed, space: Space) -> Placed:
    """Return the same placement with the fastest schedule that fits, of AF-Pipe, AF-Pipe with gradients of weights apart, and a
    found list that keeps as much as there is memory for."""
    candidate = placed.candidate
    pipe, overlap = candidate.ordering._replace(weight_gradients="apart"), Overlap(LIST.name)
    lists = [pipe._replace(forward=overlap, backward=overlap, ahead=ahead, alive=None) for ahead in AHEADS]
    best = [placed]
    for orderings in ([pipe], lists):
        works = (ApartWork(replace(candidate, ordering=ordering), sides(space)) for ordering in orderings)
        fitting = (work for work in works if _fits(work, space))
        best += [_placed(work, space, True) for work in islice(fitting, 1)]
    return min(best, key=attrgetter("seconds"))


def _leaner(work: ApartWork, space: Space) -> Iterator[ApartWork]:
    """Yield the same candidate with the next set of ops that run again, and with fewer micro-batches alive."""
    candidate = work.candidate
    ordering, positions = candidate.ordering, candidate.graph.positions
    numbers, sets = [positions * quarters // 4 for quarters in _ALIVE], list(space.recompute)
    fewer = (alive for alive in numbers if alive and (ordering.alive is None or alive < ordering.alive))
    orderings = [ordering._replace(alive=alive) for alive in islice(fewer, 1)]
    if ordering.alive is None:
        orderings += [ordering._replace(recompute=again) for again in sets[sets.index(ordering.recompute) + 1 :][:1]]
    for leaner in orderings:
        yield ApartWork(replace(candidate, ordering=leaner), work.sides, work.memos)


def _placed(work: ApartWork, space: Space, fits: bool) -> Placed:
    seconds = apart_seconds(work) * space.job.global_batch / work.candidate.job.global_batch
    fold, (attention, experts, _) = work.candidate.fold, work.sides
    mfu = space.job.flops[0] / (seconds * (fold.attention_ranks * attention.peak + fold.moe_ranks * experts.peak))
    return Placed(work.candidate, seconds, _short(work).memory(), fits, mfu)


def _least(work: ApartWork, space: Space) -> float:
    return least_seconds(work) * space.job.global_batch / work.candidate.job.global_batch


def apart_seconds(work: ApartWork) -> float:
    """Return the predicted seconds of a step."""
    candidate, quick = work.candidate, work.candidate.ordering.forward.row.found
    rounds = FEWER_ROUNDS if quick else _ROUNDS
    step = long_step(partial(_with_passes, work), candidate.micro_batches, candidate.graph.positions, rounds, quick)
    return step.seconds * (1 + straggling(candidate.fold.world_size, work.sides.attention))


def busy_placement(placed: Placed, space: Space) -> Busy:
    """Return what a placement's positions are busy with, in the part of a step that is simulated."""
    work = _short(ApartWork(placed.candidate, sides(space)))
    return busy_step(work.candidate, work)


def busy_shared(candidate: Candidate, hardware: Hardware) -> Busy:
    """Return the same for workers that have both attention and experts."""
    part = candidate.with_passes(min(candidate.micro_batches, _ROUNDS[0] * candidate.fold.pp))
    return busy_step(part, OpWork(part, Device.of(part.job, hardware)))


def even_split(space: Space, placed: Placed) -> Placed | None:
    """Return the best placement with as many GPUs for attention as for the experts; None if no other split is legal, or fits."""
    if space.expert_gpus is not None or space.experts or space.gpus % 2:
        return None
    if placed.candidate.fold.moe_ranks * 2 == space.gpus:
        return placed
    with suppress(UserError):
        best = search_placements(replace(space, expert_gpus=space.gpus // 2), 1)[0]
        return best if best.fits else None
    return None


def slower_kind(space: Space) -> Hardware:
    """Return GPUs at which the pace of workers with both halves is set: those with fewer FLOP/s, with the smaller memory."""
    kinds = [space.hardware, space.experts or space.hardware]
    least = min(hardware.memory_gib for hardware in kinds)
    return min(kinds, key=lambda hardware: hardware.peak(space.job.dtype)).model_copy(update={"memory_gib": least})


def predicted_seconds(candidate: Candidate, hardware: Hardware) -> float:
    """Return the predicted seconds of a step, whether or not the experts have workers of their own."""
    device = Device.of(candidate.job, hardware)
    if candidate.fold.disjoint:
        return apart_seconds(ApartWork(candidate, Sides(device, device)))
    return step_seconds(candidate, device)


def least_seconds(work: ApartWork) -> float:
    """Return a lower bound of a step: the micro-batches of the position, or of the adapters, that have most to do; or the way of
    a micro-batch, if few of them may be on it at once."""
    one, most, way = _with_passes(work, 1), defaultdict[tuple[int, str], float](float), 0.0
    graph, alive = one.candidate.graph, work.candidate.ordering.alive
    for op in graph.ops():
        for lane, seconds in one.cost(op) if op.kind != REDUCE else ():
            if op.kind != HANDOVER and op.direction != "W":  # the residual stream travels beside the rows
                way += seconds
            for place in graph.where(op):
                most[place, lane] += seconds
    return work.candidate.micro_batches * max(*most.values(), way / alive if alive and graph.slicing.degree == 1 else 0.0)


def _fits(work: ApartWork, space: Space) -> bool:
    attention, experts = _short(work).memory()
    return _fit_into((attention.total, experts.total), space)


def _fit_into(held: tuple[float, float], space: Space) -> bool:
    """Whether bytes of a rank of attention and of a rank of the experts fit into their GPUs."""
    rooms = [side.hardware.memory_gib * GIB for side in sides(space)[:2]]
    return all(of_side <= room for of_side, room in zip(held, rooms, strict=True))


def _short(work: ApartWork) -> ApartWork:
    """Return the costs of a step that has as many micro-batches in flight, but not many more."""
    return _with_passes(work, min(work.candidate.micro_batches, _ROUNDS[0] * work.candidate.graph.positions))


def _with_passes(work: ApartWork, passes: int) -> ApartWork:
    return ApartWork(work.candidate.with_passes(passes), work.sides, work.memos, work)


def _works(space: Space) -> Iterator[ApartWork]:
    """Yield the costs of every legal candidate with the first set of ops that run again."""
    job, kind, memos = space.job, Overlap(AF_PIPE.name), (Memo(), Memo())
    for fold, micro_batch in itertools.product(_folds(space), space.micro_batches):
        unit = fold.dp * micro_batch
        batch = unit * max(1, round(job.global_batch / unit))
        if abs(batch / job.global_batch - 1) > _OTHER_BATCH:
            continue
        # The paper's groups take every G-th layer, so each stage has one.
        stages = max(1, min(job.model.layers // fold.pp, len(job.model.moe_layers) // fold.moe_pp))
        ordering = Ordering(kind, kind, recompute=space.recompute[0])
        try:
            candidate = Candidate(
                replace(job, global_batch=batch), fold, ordering, micro_batch, stages if fold.pp > 1 else 1, space.zero
            )
        except UserError:
            continue
        yield ApartWork(candidate, sides(space), memos)


def sides(space: Space, nics: tuple[float, float] = (1.0, 1.0)) -> Sides:
    """Return the GPUs of both sides, with these adapters per GPU."""
    return Sides(Device.of(space.job, space.hardware), Device.of(space.job, space.experts or space.hardware), nics)


def _folds(space: Space) -> Iterator[Fold]:
    """Yield folds with as many positions of attention as of the experts. With `dispatch: rank`, tokens may travel once to each
    node of the experts first."""
    device = Device.of(space.job, space.experts or space.hardware)
    for positions, tp, cp in itertools.product(_POSITIONS, _TP, _CP):
        if tp * cp > space.hardware.gpus_per_node or _pinned_away(space, pp=positions, tp=tp, cp=cp):
            continue
        unit = tp * cp * positions * max(1, space.gpus // (tp * cp * positions * _SPLITS))
        splits = range(unit, space.gpus, unit) if space.expert_gpus is None else [space.gpus - space.expert_gpus]
        for attention in splits:
            experts = space.gpus - attention
            if experts % positions or attention % (tp * cp * positions):
                continue
            # With more EP ranks a token goes to more of them. With fewer, a rank holds more experts.
            for ep in divisors(math.gcd(experts // positions, space.job.model.experts)):
                if _pinned_away(space, ep=ep):
                    continue
                fold = Fold(space.gpus, tp=tp, cp=cp, pp=positions, ep=ep, expert_ranks=experts, expert_pp=positions)
                yield fold
                if space.job.dispatch == "rank" and (inside := in_two_levels(fold, device)) != fold:
                    yield inside


def _pinned_away(space: Space, **sizes: int) -> bool:
    return any(space.pins.get(axis, size) != size for axis, size in sizes.items())


def adapters(allocation: Allocation) -> tuple[float, float]:
    """Return the adapters of a GPU of attention, and of a GPU of the experts."""
    return allocation.attention_nics / allocation.attention, allocation.expert_nics / allocation.experts
