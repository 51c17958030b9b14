"""Which ranks exchange rows if the experts have ranks of their own."""

from __future__ import annotations

from collections import Counter

import pytest

from foldray.fold import Fold
from foldray.nodes.routes import Routes

FOLDS = [
    Fold(2, expert_ranks=1),
    Fold(3, expert_ranks=1),
    Fold(3, ep=2, expert_ranks=2),
    Fold(4, ep=3, expert_ranks=3),
    Fold(8, tp=2, pp=2, ep=2, expert_ranks=4, expert_pp=1),
    Fold(8, cp=2, pp=1, etp=2, ep=2, expert_ranks=4),
    Fold(8, ep=5, expert_ranks=5),
    Fold(12, tp=2, pp=2, etp=2, ep=1, expert_ranks=8, expert_pp=2),
    Fold(5, ep=4, ep_inside=2, expert_ranks=4),
    Fold(6, ep=4, ep_inside=4, expert_ranks=4),
    Fold(20, tp=2, pp=2, etp=2, ep=4, ep_inside=2, expert_ranks=16, expert_pp=2),
    Fold(13, ep=4, ep_inside=2, expert_ranks=8, moe_order="edp-ep-etp-pp"),
]


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_both_ends_agree(fold: Fold) -> None:
    routes = Routes(fold)
    for sender in fold.attention.ranks:
        for position in range(fold.moe_pp):
            receivers = routes.receivers(sender, position)
            places = [fold.moe.coordinate(rank) for rank in receivers]
            assert [place["ep"] // fold.ep_inside for place in places] == list(range(fold.ep_across)), "one rank on each node"
            assert len({place["ep"] % fold.ep_inside for place in places}) == 1, "with the same place there"
            assert len({(place["etp"], place["edp"], place["pp"]) for place in places}) == 1
            assert places[0]["pp"] == position
            own = fold.attention.coordinate(sender)["pp"]
            assert all(sender in routes.senders(receiver, own) for receiver in receivers)
    for receiver in fold.moe.ranks:
        for position in range(fold.pp):
            for sender in routes.senders(receiver, position):
                assert receiver in routes.receivers(sender, fold.moe.coordinate(receiver)["pp"])


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_copies_have_equally_many_senders(fold: Fold) -> None:
    routes = Routes(fold)
    first = [rank for rank in fold.attention.ranks if fold.attention.coordinate(rank)["pp"] == 0]
    load = Counter(routes.receivers(rank, 0) for rank in first)
    loads = [*load.values(), *[0] * (fold.etp * fold.edp * fold.ep_inside - len(load))]
    assert max(loads) - min(loads) <= 1
