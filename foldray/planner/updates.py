"""Seconds after the backward of a stage: its gradients are reduced, its weights are updated and, under ZeRO, gathered."""

from __future__ import annotations

from foldray.planner.costs import RankCosts
from foldray.planner.layout import Content, PipelineLayout, Positions
from foldray.planner.memo import Update
from foldray.schedule import Reduction


def stage_updates(rank: RankCosts, content: Content, reduction: Reduction) -> tuple[Update, ...]:
    """Return the updates of a stage, one per group family of its parameters.

    ZeRO-3 has already reduced the gradients during backward. The optimizer reads and writes float32 weights and two moments,
    reads a gradient, and writes a weight in the dtype of computation.
    """
    if reduction not in rank.tables.updates:
        rank.tables.updates[reduction] = {}
    known = rank.tables.updates[reduction]
    if content not in known:
        known[content] = tuple(_update(rank, *each, reduction) for each in rank.elements(content).items())
    return known[content]


def _update(rank: RankCosts, family: str, count: float, reduction: Reduction) -> Update:
    """Return the update of `count` parameters."""
    fold, network, zero, device = rank.fold, rank.network, rank.zero, rank.device
    owners = {"dp_cp": fold.dp * fold.cp, "edp": fold.edp}[family] if zero else 1
    chunks = max(1.0, 4 * count / size) if (size := reduction.most) else 1.0
    travel = network.gather(family, 4 * count).seconds + (chunks - 1) * network.gather(family, 0).seconds
    reduce = 0.0 if zero == 3 else travel * (1 if zero else 2)
    gather = network.gather(family, device.bytes * count).seconds if zero in (1, 2) else 0.0
    bandwidth = device.hardware.memory_gb_s * 1e9 * device.share["optimizer"]
    return Update(family, reduce, gather, count / owners * (6 * 4 + 4 + device.bytes) / bandwidth)


def seconds_behind(rank: RankCosts, layout: PipelineLayout, reduction: Reduction) -> list[float]:
    """Return, for every position, the seconds after its reductions: optimizer and gather of weights."""
    updates = [stage_updates(rank, content, reduction) for content in layout.contents]
    seconds = [sum([each.gather + each.optimizer for each in own]) for own in updates]
    return [sum([seconds[form] for form in own]) for own in layout.forms_at]


def least_behind(rank: RankCosts, positions: Positions, reduction: Reduction) -> list[float]:
    """Return, for every different content of positions, a lower bound of the seconds after the last backward.

    It has the crowding by reductions. The bound takes all stages of a position together. This never takes longer than the
    stages one by one.
    """
    crowding, found = rank.device.share["crowding"], list[float]()
    for content in positions.different:
        updates = stage_updates(rank, content, reduction)
        found.append(sum([crowding * each.reduce + each.gather + each.optimizer for each in updates]))
    return found
