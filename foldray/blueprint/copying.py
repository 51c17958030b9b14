"""Which experts have copies on other ranks of their expert-parallel group, and which tokens go there. No torch.

A rank has room for some copies of each block's experts. A place is an expert at home, or the room of a copy. The places of rank r
follow each other: its own experts, then its room. FasterMoE (He et al. 2022, section 4.1) copies hot experts to all ranks; here a
copy goes to ranks with few tokens only, and takes no more of them than makes loads even.

Legend: E experts, R ranks of the group, P places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from foldray.blueprint.block import FeedForwardSpec


def home(expert: int, experts: int, ranks: int) -> int:
    """Return the rank that owns an expert. Each rank has a run of them."""
    return expert * ranks // experts


_LEAST = 0.005  # of the mean load of a rank; less is not worth a copy


class Copies(NamedTuple):
    """The copies of a block's experts.

    Args:
        room: number of copies that each rank has room for.
        of_rank: for every rank, the experts of its copies.
        share_ER: for every expert, the shares of its tokens that are to go to each rank.
    """

    room: int
    of_rank: tuple[tuple[int, ...], ...]
    share_ER: tuple[tuple[float, ...], ...]

    @classmethod
    def none(cls, experts: int, ranks: int, room: int) -> Copies:
        """Return room without copies: all tokens go to their experts' homes."""
        share_ER = ((float(home(expert, experts, ranks) == rank) for rank in range(ranks)) for expert in range(experts))
        return cls(room, ((),) * ranks, tuple(map(tuple, share_ER)))

    @property
    def total(self) -> int:
        """Number of copies on all ranks."""
        return sum(map(len, self.of_rank))

    @property
    def places(self) -> int:
        return len(self.share_ER) + self.room * len(self.of_rank)

    def rank_shares(self, load_E: Sequence[float]) -> list[float]:
        """Return the load of every rank over the mean; 0 without load."""
        load_R = np.asarray(load_E, np.float64) @ np.asarray(self.share_ER)
        return (load_R / max(load_R.mean(), 1e-12)).tolist()

    def place(self, expert: int, rank: int) -> int:
        """Return the place of an expert on a rank: its home, or its copy there."""
        ranks = len(self.of_rank)
        own = len(self.share_ER) // ranks
        local = expert % own if expert // own == rank else own + self.of_rank[rank].index(expert)
        return rank * (own + self.room) + local

    def ways(self, rank: int) -> tuple[list[float], list[int]]:
        """Return how a rank's tokens find their places: bounds, in rising order, and the place below each of them.

        The tokens of expert e have numbers from e to e + 1, spread evenly. A token goes to the place with the first bound above
        its number. Both lists have P entries; nothing reaches those that are not needed.
        """
        bounds, places, experts = list[float](), list[int](), len(self.share_ER)
        for expert, share_R in enumerate(self.share_ER):
            holders = [holder for holder, share in enumerate(share_R) if share > 0] or [home(expert, experts, len(self.of_rank))]
            ends = np.cumsum(_flow(np.asarray(share_R), rank))
            bounds += [expert + len(self.of_rank) * float(ends[holder]) for holder in holders[:-1]]
            bounds.append(expert + 1.0)
            places += [self.place(expert, holder) for holder in holders]
        unused = self.places - len(bounds)
        return bounds + [float("inf")] * unused, places + [0] * unused


def _flow(share_R: np.ndarray, rank: int) -> np.ndarray:
    """Return what goes from one rank to each rank, as shares of an expert's tokens, of which all ranks have equally many.

    As many as may stay on the rank do. The rest goes where others have left room.
    """
    stays_R = np.minimum(share_R, 1 / len(share_R))
    left_R = share_R - stays_R
    flow_R = left_R * ((1 / len(share_R) - stays_R[rank]) / max(left_R.sum(), 1e-12))
    flow_R[rank] += stays_R[rank]
    return flow_R


def rows_worth_a_copy(expert: FeedForwardSpec, itemsize: int) -> float:
    """Return the rows of a step that are as many bytes as a copy: its weights on their way out, and its gradients back home.

    A row travels four times: to its expert and back, forward and backward. Sums of gradients have at least four bytes.

    Args:
        expert: a rank's share of an expert.
        itemsize: bytes of a weight, and of a number of a row.
    """
    return (expert.width + expert.inner) * (itemsize + max(4, itemsize)) / (4 * itemsize)


def copy_experts(load_E: Sequence[float], ranks: int, room: int, worth: float = 0.0) -> Copies | None:
    """Return copies that make the loads of ranks even, as far as there is room; None if none is worth its way.

    Args:
        load_E: rows of each expert in a step, of one expert-parallel group.
        worth: the least rows that a copy must take.
    """
    load = np.asarray(load_E, np.float64)
    experts, mean = len(load), load.sum() / ranks
    load_ER = np.zeros((experts, ranks))
    load_ER[np.arange(experts), [home(expert, experts, ranks) for expert in range(experts)]] = load
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    while True:
        total_R = load_ER.sum(0)
        full = int(total_R.argmax())
        expert = int(load_ER[:, full].argmax())
        for rank in np.argsort(total_R, kind="stable").tolist():
            new = load_ER[expert, rank] == 0
            if rank == full or (new and len(of_rank[rank]) == room):
                continue
            moved = min(load_ER[expert, full], total_R[full] - mean, mean - total_R[rank])
            if moved > max(_LEAST * mean, worth if new else 0.0):
                break
        else:
            break
        if new and home(expert, experts, ranks) != rank:
            of_rank[rank].append(expert)
        load_ER[expert, full] -= moved
        load_ER[expert, rank] += moved
    if not any(of_rank):
        return None
    share_ER = load_ER / np.maximum(load, 1e-12)[:, None]
    return Copies(room, tuple(map(tuple, of_rank)), tuple(map(tuple, share_ER.tolist())))
