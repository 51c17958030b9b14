"""Copies of hot experts (`moe.copies`): which experts have some under a routing pattern, and what they take of a rank."""

from __future__ import annotations

from typing import NamedTuple

from foldray.blueprint import FeedForwardSpec, ModelSpec, pattern_shares
from foldray.blueprint.copying import Copies, copy_experts, home, rows_worth_a_copy
from foldray.fold import Fold


class CopyRoom(NamedTuple):
    """Room for copies.

    Args:
        copies: copies that a rank has room for in each MoE block.
        tokens: tokens of a step, by whose rows experts are chosen.
    """

    copies: int
    tokens: int


class Copied(NamedTuple):
    """Room for copies on a rank under a fold.

    Args:
        expert: bytes of a rank's share of an expert.
        sums: bytes of the sums of its gradients, which have at least four for each number.
        copies: the copies of every MoE block by the model's routing pattern; None if there are none.
    """

    room: int
    expert: float
    sums: float
    copies: Copies | None

    @property
    def moved(self) -> int:
        """Number of copies of a block that leave the busiest rank in a step, or that come to it."""
        if self.copies is None:
            return 0
        experts, ranks = len(self.copies.share_ER), len(self.copies.of_rank)
        homes = [home(expert, experts, ranks) for of in self.copies.of_rank for expert in of]
        return max(*map(len, self.copies.of_rank), *(homes.count(rank) for rank in range(ranks)))


def copied(model: ModelSpec, fold: Fold, room: CopyRoom, itemsize: int) -> Copied | None:
    """Return the room for copies on a rank; None if its fold or model needs none."""
    if fold.ep == 1 or not model.moe_layers:
        return None
    moe = model.block(model.moe_layers[0]).cut(fold.tp, fold.ep, fold.etp).moe
    assert moe
    numbers = _numbers(moe.expert, model.hidden)
    return Copied(room.copies, numbers * itemsize, numbers * max(4, itemsize), _copies(model, fold, room, moe.expert, itemsize))


def _copies(model: ModelSpec, fold: Fold, room: CopyRoom, expert: FeedForwardSpec, itemsize: int) -> Copies | None:
    shares = pattern_shares(model)
    if shares is None:
        return None
    load_E = [share * room.tokens / fold.edp for share in shares]
    return copy_experts(load_E, fold.ep, room.copies, rows_worth_a_copy(expert, itemsize))


def _numbers(expert: FeedForwardSpec, hidden: int) -> int:
    return (expert.width + expert.inner) * hidden + expert.bias * (expert.width + hidden)
