"""Planned candidates with kinds of schedules that the search does not try, such as found lists.

The search predicts a step from passes of its stages (`prediction.py`). Steps with these kinds are simulated whole (`whole.py`),
at the same prices and on the same clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from foldray.blueprint.layout import smallest_slice
from foldray.costs.candidate import Candidate
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import GIB, ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step, straggling
from foldray.costs.whole import LongStep, long_step
from foldray.finding import Problem, lower_bound
from foldray.graph import SliceCost
from foldray.orders import LIST, Ordering, Overlap, Sequences, WeightGradients
from foldray.plan.search import Planned, without_cycles
from foldray.plan.space import RECOMPUTE

DEGREES = (1, 2)
AHEADS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)
"""Memory beyond that of the pipeline's own order, in micro-batches (`schedule.ahead`). The largest one that fits is taken."""
_ROUNDS = 3, 5  # micro-batches per pipeline position that are simulated; every further one takes as long as others
FEWER_ROUNDS = 2, 4  # the same for the many candidates of a table


class Listed(NamedTuple):
    """A candidate with another kind of schedule.

    Args:
        seconds: predicted seconds of a step.
        over_bound: seconds of its passes over the lower bound of all lists of its ops.
        memory_gib: memory at the fullest position, with all that the list may keep.
        fits: whether the memory is there.
    """

    candidate: Candidate
    seconds: float
    over_bound: float
    memory_gib: float
    fits: bool


@without_cycles()
def with_list(planned: Planned, hardware: Hardware, imbalance: float = 1.0) -> Listed:
    """Return the same fold and micro-batch with a found list, at the fastest degree that fits into memory, if any fits.

    Of several pieces, gradients of weights are one op if that is faster than an op for each.
    """
    ways: list[tuple[int, WeightGradients]] = [(degree, "apart") for degree in DEGREES]
    ways += [(degree, "whole") for degree in DEGREES if degree > 1]
    lists = [with_kind(planned.candidate, LIST.name, degree, hardware, imbalance, weights) for degree, weights in ways]
    return min(lists, key=lambda listed: (not listed.fits, listed.seconds))


def step_seconds(candidate: Candidate, device: Device, memo: Memo | None = None, whole: bool = False) -> float:
    """Return the predicted seconds of a step of any kind, if workers have both attention and experts.

    A step that consists of passes of stages is predicted from these. Others are simulated, or all with `whole`. A list is found
    quickly (`first_list`), and of many micro-batches, fewer are simulated than for `with_kind`.
    """
    if candidate.ordering.of_stages and not whole:
        return Step(candidate, OpWork(candidate, device, memo=memo)).prediction().seconds
    simulated = _simulated(candidate, device, FEWER_ROUNDS, memo, quick=True).seconds
    return simulated * (1 + straggling(candidate.fold.world_size, device))


def with_kind(
    candidate: Candidate,
    kind: str,
    degree: int,
    hardware: Hardware,
    imbalance: float = 1.0,
    weights: WeightGradients = "apart",
) -> Listed:
    """Return the same candidate with another kind of schedule, and ops for gradients of weights. Every op is simulated.

    A found list may keep as much as there is memory for (`AHEADS`). More is recomputed if even the least is too much.
    """
    device = Device.of(candidate.job, hardware)
    for listed in _leaner_and_leaner(candidate, kind, degree, weights):
        held = ledger(listed, OpWork(listed, device).rank, imbalance).total / GIB
        if fits := held <= hardware.memory_gib:
            break
    step = _simulated(listed, device, _ROUNDS)
    bound = lower_bound(Problem(step.part.candidate.reducing, step.part.cost))
    whole = step.seconds * (1 + straggling(candidate.fold.world_size, device))
    return Listed(listed, whole, step.part_seconds / bound, held, fits)


def _leaner_and_leaner(candidate: Candidate, kind: str, degree: int, weights: WeightGradients) -> Iterator[Candidate]:
    """Yield the candidate with another kind of schedule, first with the most memory."""
    job, fold, old = candidate.job, candidate.fold, candidate.ordering
    cost = SliceCost.of(job.model)
    cut = Sequences(job.seq_len, cost, smallest_slice(fold.cp, fold.tp)).cut_for(kind, degree)
    ways = Overlap(kind), Overlap(kind)
    ordering = Ordering(*ways, cut, reduction=old.reduction, weight_gradients=weights, offload=old.offload)
    more = (each for each in RECOMPUTE if set(each) > set(old.recompute) and not set(each) & set(old.offload))
    for again in (old.recompute, *more):
        for ahead in AHEADS if ordering.forward.row.found else AHEADS[:1]:
            yield replace(candidate, ordering=ordering._replace(recompute=again, ahead=ahead))


def _simulated(
    candidate: Candidate, device: Device, rounds: tuple[int, int], memo: Memo | None = None, quick: bool = False
) -> LongStep:
    """Simulate a step with as few micro-batches as its pipeline needs."""

    def work_of(count: int) -> OpWork:
        return OpWork(candidate.with_passes(count), device, memo=memo)

    return long_step(work_of, candidate.micro_batches, candidate.fold.pp, rounds, quick)
