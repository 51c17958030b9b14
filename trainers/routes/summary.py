"""What recorded routes say of a run in a few numbers."""

from __future__ import annotations

import numpy as np
from typing_extensions import TypedDict  # pydantic requires this one below Python 3.12

from foldray.fold import Fold
from trainers.routes.recorded import Recorded
from trainers.telemetry.expert_health import max_over_mean, on_ranks


class RoutesSummary(TypedDict):
    """Over all blocks of the sampled steps.

    Args:
        steps: number of steps whose routes are recorded.
        overload: the load of the fullest rank over the mean: median, 95th percentile and maximum.
        stays: share of the assignments whose expert is on the rank of their token.
    """

    steps: int
    overload: list[float]
    stays: float


def summary(recorded: Recorded, fold: Fold) -> RoutesSummary | None:
    """Summarise the routes of a run with a fold; None if no step is recorded yet."""
    overloads: list[np.ndarray] = []
    stays = total = 0
    for step in recorded.sampled:
        count_RME = recorded.counts(step)
        overloads.append(max_over_mean(on_ranks(count_RME.sum(axis=0), fold.ep)))
        for rank, count_ME in zip(recorded.ranks(step), count_RME, strict=True):
            by_rank = on_ranks(count_ME, fold.ep)
            total += int(by_rank.sum())
            if not fold.disjoint and rank < fold.world_size:
                stays += int(by_rank[:, fold.moe.coordinate(rank)["ep"]].sum())
    if not overloads:
        return None
    figures = np.percentile(np.concatenate(overloads), [50, 95, 100])
    return {"steps": len(recorded.steps), "overload": [float(figure) for figure in figures], "stays": stays / max(total, 1)}
