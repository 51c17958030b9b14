"""How many tokens experts and their ranks get. Routing patterns may choose, and not the router (`model.router`). No torch.

With `skew`, the popularity of expert e falls as (e + 1)^−skew (Zipf's law), but no expert gets more than all tokens. So the
first ranks of an expert-parallel group are the fullest.
"""

from __future__ import annotations

import math
from functools import lru_cache

from foldray.blueprint.model import ModelSpec


@lru_cache(maxsize=256)
def expert_shares(experts: int, topk: int, skew: float) -> tuple[float, ...]:
    """Return the share of all tokens that each expert gets, with `skew` as the exponent of the popularity.

    The shares sum to `topk`, and each is at most 1.
    """
    popularity = [(expert + 1) ** -skew for expert in range(experts)]
    rest = [sum(popularity[full:]) for full in range(topk + 1)]  # popularity of all but the first `full`, which get all tokens
    full = next(full for full in range(topk + 1) if full == topk or (topk - full) * popularity[full] <= rest[full])
    return tuple(1.0 if expert < full else (topk - full) * weight / rest[full] for expert, weight in enumerate(popularity))


def pattern_shares(model: ModelSpec) -> tuple[float, ...] | None:
    """Return the share of all tokens that each expert gets by the model's routing pattern; None if routers choose."""
    router = model.router
    if router.shares is not None:
        return router.shares
    return None if router.skew is None else expert_shares(model.experts, model.topk, router.skew)


def rank_shares(model: ModelSpec, ep: int) -> list[float]:
    """Return the rows of every rank of an expert-parallel group, over the mean of an even routing.

    An expert drops what is beyond its capacity. Without a pattern, and with padding, all ranks have equally many rows.
    """
    router, given = model.router, pattern_shares(model)
    if given is None or router.pad:
        return [1.0] * ep
    even = model.topk / model.experts
    most = 1.0 if router.capacity_factor is None else router.capacity_factor * even
    shares = [min(share, most) for share in given]
    local = model.experts // ep
    # Rounded, because costs of matrix products jump where a number of rows passes a whole number of tiles.
    return [round(sum(shares[rank * local : (rank + 1) * local]) / (even * local), 9) for rank in range(ep)]


def overload(model: ModelSpec, ep: int) -> float:
    """Return the overload factor of a pattern: rows of the fullest rank of an expert-parallel group over the mean."""
    return max(rank_shares(model, ep))


def ranks_of_a_token(model: ModelSpec, ep: int) -> float:
    """Return the mean number of ranks that hold one of a token's experts."""
    return sum(visits_of_a_token(model, ep))


def visits_of_a_token(model: ModelSpec, ep: int) -> list[float]:
    """Return, for each rank of an expert-parallel group, the share of all tokens that have an expert there.

    Every choice of experts is equally likely; with a routing pattern, experts are chosen independently.
    """
    local, shares = model.experts // ep, pattern_shares(model)
    if shares is not None:
        missed_E = [1 - share for share in shares]
        return [1 - math.prod(missed_E[rank * local : (rank + 1) * local]) for rank in range(ep)]
    others, missed = model.experts - local, 1.0
    for chosen in range(model.topk):
        missed *= max(0, others - chosen) / (model.experts - chosen)
    return [1 - missed] * ep
