"""Folds whose experts have ranks of their own: their tables, drawings, refusals and process groups."""

from __future__ import annotations

import json

import pytest
import torch

from foldray.cli import main
from foldray.comm import TRAFFIC, Groups
from foldray.errors import UserError
from foldray.fold import FAMILIES, Fold, nearest_folds
from foldray.nodes.drawing import draw

FOLDS = [
    Fold(8, tp=2, pp=2, ep=2, expert_ranks=4, expert_pp=1),
    Fold(6, cp=2, ep=2, expert_ranks=2),
    Fold(7, pp=3, etp=2, ep=2, expert_ranks=4, expert_pp=1),
    Fold(8, tp=2, ep=3, expert_ranks=6, expert_pp=2),
]


def test_each_half_has_its_own_ranks_and_pipeline() -> None:
    fold = Fold(12, tp=2, pp=2, ep=4, expert_ranks=4, expert_pp=1)
    assert (fold.dp, fold.edp, fold.moe_pp) == (2, 1, 1)
    assert (list(fold.attention.ranks), list(fold.moe.ranks)) == ([*range(8)], [*range(8, 12)])
    assert fold.groups("ep") == ((8, 9, 10, 11),)
    assert fold.groups("pp", "attention") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert fold.groups("pp", "moe") == ((8,), (9,), (10,), (11,))
    assert fold.groups("world") == (tuple(range(12)),)
    assert fold.coordinate(5) == {"attention": {"tp": 1, "cp": 0, "dp": 0, "pp": 1}}
    assert fold.coordinate(9) == {"moe": {"etp": 0, "ep": 1, "edp": 0, "pp": 0}}


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_a_family_has_every_rank_of_its_half_once(fold: Fold) -> None:
    for view, grid in fold.views.items():
        for family in set(FAMILIES[view]) - {"world", "embedding"}:
            assert sorted(rank for group in fold.groups(family, view) for rank in group) == [*grid.ranks], family


def test_a_rank_outside_has_no_place() -> None:
    fold = FOLDS[0]
    with pytest.raises(ValueError, match="rank 5 is not in the grid of ranks 0…3"):
        fold.attention.coordinate(5)
    with pytest.raises(ValueError, match="rank 3 is not in the grid of ranks 4…7"):
        fold.moe.coordinate(3)


def _sums(rank: int, fold: Fold) -> dict[str, float]:
    """Return the sum of 2^rank over every communicator of a rank."""
    if rank >= fold.world_size:
        return {}
    groups = Groups.create(fold, rank)
    own = torch.tensor(2.0**rank, dtype=torch.float64)
    found = {name: float(getattr(groups, name).all_reduce(own.clone())) for name in TRAFFIC}
    groups.close()
    return found


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_sums_of_2_to_the_rank_name_the_members(ranks, fold: Fold) -> None:
    found = ranks(fold.world_size).run(_sums, fold)
    for rank, sums in enumerate(found):
        for name, family in TRAFFIC.items():
            groups = fold.groups(family)
            members = next((group for group in groups if rank in group), (rank,))  # a rank in no group is alone
            assert sums[name] == sum(2.0**member for member in members), f"{name} on rank {rank}"


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"tp": 3, "expert_ranks": 4}, "tp·cp·pp must divide attention's 8 ranks"),
        ({"ep": 3, "expert_ranks": 4}, "etp·ep·expert_pp must divide the experts' 4 ranks"),
        ({"expert_ranks": 12}, "must leave at least one of 12 ranks to attention"),
        ({"expert_ranks": -1}, "must leave at least one of 12 ranks to attention"),
        ({"expert_pp": 2}, "must be left out unless the experts have ranks of their own"),
        ({"expert_ranks": 4, "expert_pp": 0}, "must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, int], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        Fold(12, **sizes)


def test_what_is_near_is_legal() -> None:
    for option in nearest_folds(12, {"tp": 3, "pp": 2, "ep": 3, "expert_pp": 2}, 4):
        sizes = {axis: size for axis, size in option.items() if axis in Fold.__dataclass_fields__}
        assert Fold(12, **sizes).disjoint


def test_both_sides_are_drawn() -> None:
    text = draw(Fold(12, tp=2, pp=2, ep=4, expert_ranks=4, expert_pp=1), 4)
    rows = [line for line in text.split("\n") if "│" in line]
    assert "│   0   1 │ node 0" in rows[0]
    assert "│   8   9  10  11 │ node 2" in rows[0]
    assert text.count("pp1") == 1, "the experts have one position"
    assert draw(Fold(4096, tp=8, pp=8, ep=64, expert_ranks=2048, expert_pp=2)).count("more stages") == 2


def test_explain_shows_and_refuses(capsys, tmp_path) -> None:
    asked = ["explain", "--world-size", "12", "--tp", "2", "--pp", "2", "--ep", "4", "--expert-ranks", "4"]
    assert main([*asked, "--expert-pp", "1", "--json", "--picture", str(tmp_path / "fold.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["disjoint"], found["attention"]["ranks"], found["moe"]["ranks"]) == (True, [0, 7], [8, 11])
    assert (found["attention"]["pp"], found["moe"]["pp"]) == (2, 1)
    assert (tmp_path / "fold.png").stat().st_size > 1000
    assert main(asked) == 2
    line = capsys.readouterr().err
    assert "etp·ep·expert_pp must divide the experts' 4 ranks" in line
    assert "nearest legal folds: tp=2 cp=1 pp=2" in line
