"""Classes of gradients with the same members may share a process group; all others have their own."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from foldray.comm import TRAFFIC, Groups
from foldray.comm.groups import GRADIENTS
from foldray.fold import Fold
from tests.pool import RankPools

SHARED = {
    Fold(4, ep=2): {("dense_gradients", "replicated_gradients")},
    Fold(4): {("dense_gradients", "replicated_gradients"), ("dense_gradients", "expert_gradients"),
              ("replicated_gradients", "expert_gradients")},
    Fold(4, tp=2, etp=2): {("dense_gradients", "expert_gradients")},
    Fold(4, tp=2, ep=2): {("dense_gradients", "expert_gradients")},
    Fold(4, tp=2, ep=4): set(),
}  # fmt: skip


def groups_of(rank: int, fold: Fold, share: bool | None) -> tuple[set[tuple[str, str]], list[float]]:
    """Return the pairs of classes that share a process group, and the sums of the ranks over each class of gradients."""
    groups = Groups.create(fold, rank, share=share)
    own = {name: getattr(groups, name).group for name in TRAFFIC}
    found = {pair for pair in combinations(own, 2) if own[pair[0]] is not None and own[pair[0]] is own[pair[1]]}
    sums = [float(getattr(groups, name).all_reduce(torch.tensor([float(rank)]))) for name in GRADIENTS]
    groups.close()
    return found, sums


@pytest.mark.parametrize(("fold", "shared"), SHARED.items(), ids=map(str, SHARED))
def test_gradients_of_the_same_members_share_a_process_group(ranks: RankPools, fold: Fold, shared: set) -> None:
    alone, together = (ranks(4).run(groups_of, fold, share) for share in (None, True))
    for (no_pairs, expected), (pairs, sums) in zip(alone, together, strict=True):
        assert (no_pairs, pairs) == (set(), shared)
        assert sums == expected
