"""How evenly the routers of a training use their experts, from the counts of assignments that every step brings anyway.

Counts are those before dropping, so they say what routers ask for. Tokens' own choices are not kept.

Legend: M MoE layers, E experts, R ranks of an expert-parallel group, T columns of time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import TypedDict  # pydantic requires this one below Python 3.12

STARVED = 0.1  # an expert with less than this share of the even load is starved
_FEWEST = 4  # samples that the unbiased estimate of similarity needs
_TINY = 1e-12


class Layers(TypedDict):
    """The balance of every MoE layer in one step, in the order of the layers (`Health`), with four decimals."""

    max_over_mean: list[float]
    rank_max_over_mean: list[float]
    entropy: list[float]
    dead: list[int]
    starved: list[int]


@dataclass(frozen=True)
class Health:
    """The balance of every MoE layer, over one step or several.

    Ratios and entropies are means over the steps and not those of the summed load, because every step waits for its own
    fullest expert and rank. Dead and starved experts are those of the summed load.

    Args:
        max_over_mean: [M], the load of the fullest expert over the mean load; 1 if all are even, E if one expert has all.
        rank_max_over_mean: [M], the same for the ranks of an expert-parallel group.
        entropy: [M], `entropy` of the load; 1 if all are even, 0 if one expert has all.
        dead: [M], number of experts without a token.
        starved: [M], number of experts with less than `STARVED` of the even load, dead ones included.
    """

    max_over_mean: np.ndarray
    rank_max_over_mean: np.ndarray
    entropy: np.ndarray
    dead: np.ndarray
    starved: np.ndarray

    @classmethod
    def of(cls, loads: Sequence[np.ndarray], ep: int) -> Health:
        """Measure the loads [M, E] of one or more steps, with the experts of each layer on `ep` ranks."""
        load_TME = np.stack(loads).astype(np.float64)
        return cls(
            max_over_mean(load_TME).mean(axis=0),
            max_over_mean(on_ranks(load_TME, ep)).mean(axis=0),
            entropy(load_TME).mean(axis=0),
            *unused(load_TME.sum(axis=0)),
        )

    def by_layer(self) -> Layers:
        """Return the measures of a step's record."""
        return {
            "max_over_mean": np.round(self.max_over_mean, 4).tolist(),
            "rank_max_over_mean": np.round(self.rank_max_over_mean, 4).tolist(),
            "entropy": np.round(self.entropy, 4).tolist(),
            "dead": self.dead.tolist(),
            "starved": self.starved.tolist(),
        }


def max_over_mean(load: np.ndarray) -> np.ndarray:
    """Return the largest load over the mean load, along the last axis; 0 where there is no load."""
    return load.max(axis=-1) / np.maximum(load.mean(axis=-1), _TINY)


def entropy(load: np.ndarray) -> np.ndarray:
    """Return the entropy of the load relative to that of an even load, along the last axis of E experts.

    It is −Σ_e p_e · ln p_e / ln E, where p_e is an expert's share of the assignments (the evenness of Pielou, 1966). It is 1
    for an even load and for a single expert, and 0 where there is no load.
    """
    share = _shares(load)
    if load.shape[-1] == 1:
        return share[..., 0]
    return -(share * np.log(np.maximum(share, _TINY))).sum(axis=-1) / math.log(load.shape[-1])


def unused(load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of dead experts (no load) and of starved ones (`STARVED`; dead ones too), along the last axis."""
    dead = load == 0
    return dead.sum(axis=-1), (dead | (load < STARVED * load.mean(axis=-1, keepdims=True))).sum(axis=-1)


def on_ranks(load: np.ndarray, ep: int) -> np.ndarray:
    """Sum the load [..., E] over the experts of each rank of an expert-parallel group: [..., R].

    Rank r has the experts r·E/ep … (r+1)·E/ep − 1 (`Ownership.experts`). Ranks that hold the same experts (edp) count as one,
    and so do ranks that hold slices of the same experts (etp).
    """
    return load.reshape(*load.shape[:-1], ep, load.shape[-1] // ep).sum(axis=-1)


class Column(NamedTuple):
    """The sum of the arrays of some steps: those of `first` … `last` that the run has counted."""

    first: int
    last: int
    steps: int
    total: np.ndarray


class Course:
    """An array over a whole run, such as the load [M, E] of every expert, summed in columns of equally many steps.

    If there are more than `most` columns, neighbours are joined. So the memory does not grow with the run.
    """

    def __init__(self, most: int = 128):
        self.columns: list[Column] = []
        self.width = 1
        """Steps of a full column."""
        self._most = most

    def add(self, step: int, array: np.ndarray) -> None:
        """Add the array of a step that comes after all earlier ones."""
        new = Column(step, step, 1, array)
        if self.columns and self.columns[-1].steps < self.width:
            self.columns[-1] = _join(self.columns[-1], new)
        else:
            self.columns.append(new)
        if len(self.columns) > self._most:
            self.width *= 2
            pairs = [self.columns[at : at + 2] for at in range(0, len(self.columns), 2)]
            self.columns = [_join(*pair) if len(pair) == 2 else pair[0] for pair in pairs]

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`. A column that has such a step goes as a whole, because it cannot be taken apart."""
        self.columns = [column for column in self.columns if column.last <= step]

    def full(self) -> np.ndarray:
        """Return the sums of full columns, [T, …]. The newest column may be short, and sums of fewer steps vary more."""
        return np.array([column.total for column in self.columns if column.steps >= self.width])

    def ends(self) -> np.ndarray:
        """Return the last step of every column, [T]."""
        return np.array([column.last for column in self.columns])

    def means(self) -> np.ndarray:
        """Return the mean of every column's steps, [T, …]."""
        return np.array([column.total / column.steps for column in self.columns])


def overlaps(load_TME: np.ndarray) -> np.ndarray:
    """Return how much of the load of every column lies on the same experts as in the column before, [T − 1, M].

    It is Σ_e min(p_e, q_e), where p and q are the shares of the experts in both columns: 1 minus their total variation
    distance. It is 1 if the load stays, and falls while routing changes. Chance alone keeps it below 1: for even loads of N
    independent assignments in each column, it is about 1 − √(E / (π·N)).
    """
    share_TME = _shares(load_TME)
    return np.minimum(share_TME[1:], share_TME[:-1]).sum(axis=-1)


def similarity(load_TME: np.ndarray) -> np.ndarray | None:
    """Return how alike the loads of every two layers change from column to column, [M, M]; None with fewer than 8 columns.

    The number of an expert means nothing in another layer, so loads of layers cannot be compared expert by expert. This asks
    instead whether the columns that change a layer's load alike also change the other layer's load alike. It is linear CKA
    (Kornblith et al. 2019, section 3) with the unbiased estimate of HSIC (Song et al. 2012, equation 5), which few samples
    of many experts do not push to 1. A sample is the change of the shares from column 2i to column 2i + 1, so a slow drift
    does not count, and samples share no column. It is 1 if both layers see the same differences between batches, under any
    order of their experts, and about 0 if they have nothing in common. It is NaN for a layer whose load never changes.
    """
    share_TME = _shares(load_TME)
    pairs = len(share_TME) // 2
    if pairs < _FEWEST:
        return None
    change_MPE = (share_TME[1 : 2 * pairs : 2] - share_TME[0 : 2 * pairs : 2]).transpose(1, 0, 2)
    gram_MPP = change_MPE @ change_MPE.transpose(0, 2, 1)
    gram_MPP[:, range(pairs), range(pairs)] = 0.0
    # Centring the matrices as U-statistics do makes HSIC a plain inner product (Székely & Rizzo 2014, theorem 1).
    row_MP = gram_MPP.sum(axis=2) / (pairs - 2)
    total_M = gram_MPP.sum(axis=(1, 2)) / ((pairs - 1) * (pairs - 2))
    centred_MPP = gram_MPP - row_MP[:, :, None] - row_MP[:, None, :] + total_M[:, None, None]
    centred_MPP[:, range(pairs), range(pairs)] = 0.0
    flat = centred_MPP.reshape(len(centred_MPP), -1)
    norm_M = np.linalg.norm(flat, axis=1)
    flat = flat / np.where(norm_M > _TINY, norm_M, math.nan)[:, None]
    return flat @ flat.T


def _shares(load: np.ndarray) -> np.ndarray:
    return load / np.maximum(load.sum(axis=-1, keepdims=True), _TINY)


def _join(earlier: Column, later: Column) -> Column:
    return Column(earlier.first, later.last, earlier.steps + later.steps, earlier.total + later.total)
