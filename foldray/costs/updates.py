"""Seconds after the backward of a stage: its gradients are reduced, its weights are updated and, under ZeRO, gathered."""

from __future__ import annotations

from typing import NamedTuple

from foldray.costs.device import FLOAT32
from foldray.costs.layout import Content, Positions
from foldray.costs.muon import Matrices, matrices
from foldray.costs.muon import seconds as muon_seconds
from foldray.costs.rank import RankCosts, shared_by_fold
from foldray.graph import Reduction

WHOLE = Reduction("end")
"""The reduction with the fewest messages. Optimizer and gather of weights are the same for all reductions."""


class Update(NamedTuple):
    """The update of those parameters of a stage whose gradients are summed over one group family.

    Args:
        family: the name for its seconds in reports: `edp` for experts, `dp_cp` for all others.
        lane: the lane of its messages.
        chunks: number of chunks of gradients.
        reduce, gather, optimizer: seconds of the reduction, of the gather of weights, and of the optimizer.
    """

    family: str
    lane: str
    chunks: float
    reduce: float
    gather: float
    optimizer: float


@shared_by_fold
def stage_updates(rank: RankCosts, content: Content, reduction: Reduction) -> tuple[Update, ...]:
    """Return the updates of a stage, one per group family of its parameters."""
    hidden = {of_class.family: of_class for of_class in matrices(rank, content)}
    counts = rank.elements(content).items()
    return tuple(_update(rank, family, count, hidden.get(family), reduction) for family, count in counts)


def _update(rank: RankCosts, family: str, count: float, hidden: Matrices | None, reduction: Reduction) -> Update:
    """Return the update of `count` parameters of a group family, and of the matrices among them that Muon updates.

    ZeRO-3 has already reduced the gradients during backward. The optimizer reads and writes float32 weights and two moments,
    reads a gradient, and writes a weight in the dtype of computation. With Muon, matrices of hidden layers have one moment, and
    an update besides.
    """
    network, zero, device = rank.network, rank.zero, rank.device
    owners = rank.fold.group_size(family) if zero else 1
    gradients = FLOAT32 * count  # bytes
    chunks = max(1.0, gradients / size) if (size := reduction.most) else 1.0
    lane, seconds = network.gather(family, gradients)
    travel = seconds + (chunks - 1) * network.gather(family, 0).seconds
    reduce = 0.0 if zero == 3 else travel * (1 if zero else 2)
    gather = network.gather(family, device.bytes * count).seconds if zero in (1, 2) else 0.0
    bandwidth = device.hardware.memory_gb_s * 1e9 * device.share["optimizer"]
    optimizer = count / owners * (6 * FLOAT32 + FLOAT32 + device.bytes) / bandwidth
    if hidden:
        optimizer += muon_seconds(rank, hidden) - hidden.elements(rank) / owners * FLOAT32 / bandwidth
    return Update("edp" if family == "edp" else "dp_cp", lane, chunks, reduce, gather, optimizer)


class Departure(NamedTuple):
    """How the gradients of a stage leave while its last backward runs.

    Gradients may share a link with all-to-alls, and use it while no all-to-all does. Where nothing computes during an
    all-to-all, every second that the all-to-all waits for gradients is lost. If gradients give way (`chunks`), an all-to-all
    waits for half a chunk on average. Otherwise both share the link evenly, so the all-to-all takes up to twice as long. In a
    block that drains, nothing computes during its first all-to-all.

    Args:
        whole: seconds of all its gradients.
        ready: seconds of the gradients that are complete before the pass ends: those of all blocks but the last one.
        span: seconds from the end of the first block's backward to the end of the pass.
        idle: share of the span in which the link is free.
        waited: slowdown of all-to-alls: seconds that they wait, per second in which gradients use the link within the span.
        most: upper limit of the seconds that all-to-alls wait.
    """

    whole: float
    ready: float
    span: float
    idle: float
    waited: float
    most: float


def least_behind(rank: RankCosts, positions: Positions) -> list[float]:
    """Return, for every different content of positions, a lower bound of the seconds after the last backward.

    It holds for every reduction, and has the crowding by the one with the fewest messages. The bound takes all stages of a
    position together. This never takes longer than the stages one by one.
    """
    crowding, contents = rank.device.share["crowding"], [stage_updates(rank, each, WHOLE) for each in positions.different]
    return [sum([crowding * update.reduce + update.gather + update.optimizer for update in updates]) for updates in contents]
