"""Which expert goes where, so that ranks of an expert-parallel group get evenly many tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST = 0.005  # of the mean load of a rank; less is not worth the way of two experts


def spread(load_E: Sequence[float], ranks: int) -> list[int]:
    """Return for every place of an expert the expert that it gets. Rank r has the places r·E/ranks … (r + 1)·E/ranks − 1.

    Pairs of experts change places, one after another: one of the fullest rank with the one elsewhere that leaves the fuller of
    both ranks the least, as long as that is less than the fullest rank has. So few experts move.
    """
    load_RL = np.asarray(load_E, np.float64).reshape(ranks, -1)
    order_RL = np.arange(load_RL.size).reshape(load_RL.shape)
    least = _LEAST * load_RL.sum() / ranks
    while True:
        total_R = load_RL.sum(axis=1)
        fullest = int(total_R.argmax())
        # By what the fullest rank loses if it gives expert a for expert b of rank r: [L, R, L].
        less_LRL = load_RL[fullest][:, None, None] - load_RL[None]
        then_LRL = np.maximum(total_R[fullest] - less_LRL, total_R[None, :, None] + less_LRL)
        given, rank, taken = np.unravel_index(int(then_LRL.argmin()), then_LRL.shape)
        if total_R[fullest] - then_LRL[given, rank, taken] <= least:
            return [int(expert) for expert in order_RL.ravel()]
        for table_RL in (load_RL, order_RL):
            table_RL[fullest, given], table_RL[rank, taken] = table_RL[rank, taken], table_RL[fullest, given]


def overload_of(load_E: Sequence[float], ranks: int, order: Sequence[int] | None = None) -> float:
    """Return the load of the fullest rank over the mean; 0 without load.

    `order` has the experts of the places; None leaves each where it is.
    """
    load = np.asarray(load_E, np.float64)[list(range(len(load_E)) if order is None else order)]
    by_rank = load.reshape(ranks, -1).sum(axis=1)
    return float(by_rank.max() / max(by_rank.mean(), 1e-12))
