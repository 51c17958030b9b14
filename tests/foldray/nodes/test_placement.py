"""Folds on nodes: shares of pairs against counts by hand, the best order against all orders, and the drawing."""

import itertools
import time
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray import Fold, UserError
from foldray.fold import FAMILIES, divisors
from foldray.nodes import HEAT, Placement, best_order
from foldray.nodes.drawing import Table, draw
from tests.gate import examples

EVERY = list(dict.fromkeys(family for families in FAMILIES.values() for family in families))


@st.composite
def folds(draw):
    """Draw a small fold with any legal orders."""
    stage = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    pp = draw(st.integers(1, 3))
    tp = draw(st.sampled_from(divisors(stage)))
    cp = draw(st.sampled_from(divisors(stage // tp)))
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    fold = Fold(stage * pp, tp, cp, pp, ep, etp, offset=draw(st.sampled_from([0, 3])))
    return draw(st.sampled_from(legal_orders(fold)))


def legal_orders(fold: Fold) -> list[Fold]:
    """Return the fold with every legal pair of orders, also if an order changes no group."""
    found = []
    for order, moe_order in itertools.product(itertools.permutations(["tp", "cp", "dp", "pp"]), repeat=2):
        names = {"tp": "etp", "cp": "ep", "dp": "edp", "pp": "pp"}
        try:
            found.append(replace(fold, order="-".join(order), moe_order="-".join(names[axis] for axis in moe_order)))
        except UserError:
            continue
    return found


def by_pairs(fold: Fold, family: str, ranks_per_node: int) -> float:
    shares = []
    for group in fold.groups(family):
        pairs = list(itertools.permutations(group, 2))
        shares.append(sum(a // ranks_per_node != b // ranks_per_node for a, b in pairs) / len(pairs) if pairs else 0.0)
    return sum(shares) / len(shares)


@given(folds(), st.integers(1, 9))
def test_crossing_is_the_share_of_pairs_on_different_nodes(fold, ranks_per_node):
    placement = Placement(fold, ranks_per_node)
    for family in EVERY:
        crossing = placement.crossing(family)
        assert crossing == pytest.approx(by_pairs(fold, family, ranks_per_node)), family
        assert placement.inside(family) == (crossing == 0), family
        nodes = [{rank // ranks_per_node for rank in group} for group in fold.groups(family)]
        assert placement.spans(family) == max(map(len, nodes)), family
    assert placement.nodes == len({rank // ranks_per_node for rank in fold.groups("world")[0]})
    assert placement.score({"ep": 3, "tp": 0.5}) == pytest.approx(3 * placement.crossing("ep") + 0.5 * placement.crossing("tp"))


def test_shares_counted_by_hand():
    """Nodes have 4 ranks: 0–3 and 4–7."""
    placement = Placement(Fold(8, tp=2, cp=2, ep=8), 4)
    assert placement.nodes == 2
    assert [placement.node(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    crossing = {family: placement.crossing(family) for family in ("tp", "cp", "dp", "dp_cp", "ep", "edp", "pp")}
    # A rank meets 4 of its 7 EP peers, and 2 of its 3 DP×CP peers, on the other node.
    assert crossing == {"tp": 0, "cp": 0, "dp": 1, "dp_cp": pytest.approx(2 / 3), "ep": pytest.approx(4 / 7), "edp": 0, "pp": 0}
    assert {family for family in FAMILIES["attention"] if placement.inside(family)} == {"tp", "cp", "tp_cp", "pp", "embedding"}
    assert placement.spans("world") == 2
    assert placement.score({"ep": 7, "dp_cp": 3}) == 6
    assert Placement(placement.fold, 8).score() == 0


def test_nodes_need_neither_begin_nor_end_with_the_fold():
    placement = Placement(Fold(6, tp=3, offset=2), 4)  # ranks 2 3 | 4 5 6 7
    assert placement.nodes == 2
    assert placement.crossing("tp") == pytest.approx((4 / 6 + 0) / 2)  # 2 3|4 and 5 6 7
    assert Placement(Fold(7, tp=7), 3).spans("tp") == 3
    assert Placement(Fold(4), 100).nodes == 1


@pytest.mark.parametrize("ranks_per_node", [0, -8])
def test_a_node_holds_a_rank(ranks_per_node):
    with pytest.raises(UserError, match=f"ranks_per_node={ranks_per_node}: must be at least 1"):
        Placement(Fold(8), ranks_per_node)
    with pytest.raises(UserError, match="ranks_per_node"):
        best_order(Fold(8), ranks_per_node)
    with pytest.raises(UserError, match="ranks_per_node"):
        draw(Fold(8), ranks_per_node)


def test_heat_of_no_family_is_refused():
    with pytest.raises(UserError, match="family=tp_ep: is not a group family"):
        Placement(Fold(8), 4).score({"tp_ep": 1})
    with pytest.raises(UserError, match="family=tp_ep: is not a group family"):
        best_order(Fold(8), 4, {"tp_ep": 1})


def test_heat_is_an_ordering():
    assert list(HEAT) == sorted(HEAT, key=lambda family: -HEAT[family])
    assert set(HEAT) == {"etp", "tp", "ep", "cp", "edp", "dp_cp", "pp"}
    assert not isinstance(HEAT, MutableMapping)


@examples(40)
@given(folds(), st.integers(1, 6), st.sampled_from([HEAT, {"dp": 1, "ep": 1}, {"pp": 2.5, "edp": 0.1, "dp_cp": 0.3}]))
def test_no_legal_order_is_better_than_the_best(fold, ranks_per_node, heat):
    best = best_order(fold, ranks_per_node, heat)
    scores = {(f.order, f.moe_order): Placement(f, ranks_per_node).score(heat) for f in legal_orders(fold)}
    lowest = min(scores.values())
    assert scores[best.order, best.moe_order] == lowest
    assert replace(best, order=fold.order, moe_order=fold.moe_order) == fold
    if scores[fold.order, fold.moe_order] == lowest:
        assert best == fold
    else:  # the first by name among the best orders that keep the places of axes of size 1
        trivial = [
            (name, axis) for name in ("order", "moe_order") for axis in getattr(fold, name).split("-") if getattr(fold, axis) == 1
        ]

        def place(f: Fold, name: str, axis: str) -> int:
            return getattr(f, name).split("-").index(axis)

        kept = [f for f in legal_orders(fold) if all(place(f, *which) == place(fold, *which) for which in trivial)]
        names = [(f.order, f.moe_order) for f in kept]
        assert (best.order, best.moe_order) == min(name for name in names if scores[name] == lowest)


@pytest.mark.parametrize(
    ("fold", "ranks_per_node", "order", "moe_order"),
    [
        # With dp first, TP groups cross nodes. Two orders avoid this, and "cp" comes before "tp".
        (Fold(8, tp=2, cp=2, ep=2, order="dp-cp-tp-pp"), 4, "cp-tp-dp-pp", "etp-ep-edp-pp"),
        # pp has the least traffic, so it becomes the outermost axis in both grids. cp, etp and edp have size 1 and stay.
        (Fold(8, tp=2, pp=2, ep=4, order="pp-tp-cp-dp", moe_order="pp-etp-ep-edp"), 4, "dp-tp-cp-pp", "ep-etp-pp-edp"),
        # No order is better, so nothing changes.
        (Fold(8, tp=2, cp=2, ep=8, order="dp-cp-tp-pp"), 1, "dp-cp-tp-pp", "etp-ep-edp-pp"),
    ],
)
def test_orders_worked_out_by_hand(fold, ranks_per_node, order, moe_order):
    best = best_order(fold, ranks_per_node)
    assert (best.order, best.moe_order) == (order, moe_order)


def test_what_is_hot_decides():
    fold = Fold(16, tp=4, ep=4, etp=2)
    best = {hot: best_order(fold, 4, {hot: 10, cold: 1}) for hot, cold in (("ep", "etp"), ("etp", "ep"))}
    assert Placement(best["ep"], 4).inside("ep")
    assert not Placement(best["ep"], 4).inside("etp")
    assert Placement(best["etp"], 4).inside("etp")
    assert not Placement(best["etp"], 4).inside("ep")


def test_ten_thousand_ranks_take_about_a_second():
    """The limits are on processor time, because other programs may run at the same time."""
    fold = Fold(10_240, tp=8, cp=4, pp=8, ep=8, etp=2, order="dp-cp-tp-pp")
    start = time.process_time()
    document = Placement(fold, 8).as_dict()
    placed = time.process_time()
    best = best_order(fold, 8)
    assert placed - start < 1
    assert time.process_time() - placed < 2
    assert (document["nodes"], document["families"]["tp"]) == (1280, {"crossing": 1, "spans": 8, "inside": False})
    assert Placement(best, 8).inside("tp")


# Drawings of all kinds: rows that wrap, boxes that wrap, one axis, no axis, and stages.
DRAWN = [
    (
        Fold(8, tp=2, cp=2, ep=8), 4,
        """
attention                          experts
      cp0       cp1
      tp0 tp1   tp0 tp1               ep0 ep1 ep2 ep3 ep4 ep5 ep6 ep7
    ┌─────────┬─────────┐           ┌─────────────────────────────────┐
dp0 │   0   1 │   2   3 │ node 0    │   0   1   2   3┃  4   5   6   7 │ nodes 0–1
dp1 │   4   5 │   6   7 │ node 1    └─────────────────────────────────┘
    └─────────┴─────────┘
""",
    ),
    (
        Fold(8, tp=4, etp=2, ep=4), None,
        """
attention                 experts
      tp0 tp1 tp2 tp3           etp0 etp1
    ┌─────────────────┐       ┌───────────┐
dp0 │   0   1   2   3 │   ep0 │    0    1 │
dp1 │   4   5   6   7 │   ep1 │    2    3 │
    └─────────────────┘   ep2 │    4    5 │
                          ep3 │    6    7 │
                              └───────────┘
""",
    ),
    (
        Fold(8, tp=2, pp=2, ep=4), 3,
        """
attention                   experts
      tp0 tp1                     ep0 ep1 ep2 ep3
pp0 ┌─────────┐             pp0 ┌─────────────────┐
dp0 │   0   1 │ node 0          │   0   1   2┃  3 │ nodes 0–1
dp1 │   2┃  3 │ nodes 0–1       └─────────────────┘
    └─────────┘
pp1 ┌─────────┐             pp1 ┌─────────────────┐
dp0 │   4   5 │ node 1          │   4   5┃  6   7 │ nodes 1–2
dp1 │   6   7 │ node 2          └─────────────────┘
    └─────────┘
""",
    ),
    (
        Fold(26, tp=13, ep=2), 13,
        """
attention                                       experts
                                                          ep0 ep1   ep0 ep1   ep0 ep1   ep0 ep1
           ┌─────────────────────────┐                  ┌─────────┬─────────┬─────────┬─────────┐
dp0 tp0–7  │  0  1  2  3  4  5  6  7 │ node 0   edp0–3  │   0   1 │   2   3 │   4   5 │   6   7 │ node 0
dp0 tp8–12 │  8  9 10 11 12          │ node 0   edp4–7  │   8   9 │  10  11 │  12┃ 13 │  14  15 │ nodes 0–1
dp1 tp0–7  │ 13 14 15 16 17 18 19 20 │ node 1   edp8–11 │  16  17 │  18  19 │  20  21 │  22  23 │ node 1
dp1 tp8–12 │ 21 22 23 24 25          │ node 1   edp12   │  24  25                               │ node 1
           └─────────────────────────┘                  └─────────┴─────────┴─────────┴─────────┘
""",
    ),
    (
        Fold(4, pp=2, tp=2, order="pp-tp-cp-dp", moe_order="pp-etp-ep-edp", offset=7), 2,
        """
attention                   experts
      tp0 tp1                     edp0 edp1
pp0 ┌─────────┐             pp0 ┌───────────┐
    │   7┃  9 │ nodes 3–4       │    7┃   9 │ nodes 3–4
    └─────────┘                 └───────────┘
pp1 ┌─────────┐             pp1 ┌───────────┐
    │   8┃ 10 │ nodes 4–5       │    8┃  10 │ nodes 4–5
    └─────────┘                 └───────────┘
""",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fold", "ranks_per_node", "picture"), DRAWN, ids=[str(fold) for fold, *_ in DRAWN])
def test_drawings(fold, ranks_per_node, picture):
    assert draw(fold, ranks_per_node) == picture.strip("\n")


def test_the_page_on_folding_shows_what_is_drawn():
    page = (Path(__file__).parents[3] / "docs" / "folding.md").read_text()
    assert draw(Fold(8, tp=2, cp=2, ep=8), 4) in page
    fold = Fold(16, tp=2, cp=2, ep=8, order="dp-cp-tp-pp")
    best = best_order(fold, 8)
    assert f"score: {Placement(fold, 8).score():g} (" in page
    assert f"--order {best.order} --moe-order {best.moe_order}, score {Placement(best, 8).score():g}" in page


@examples(40)
@given(folds(), st.sampled_from([3, 8, 16]))
def test_a_table_holds_every_rank_of_its_stage_once(fold, across):
    for grid in (fold.attention, fold.moe):
        ranks = [rank for stage in range(fold.pp) for _, row in Table.of(grid, stage, across).rows for box in row for rank in box]
        assert sorted(ranks) == sorted(fold.groups("world")[0])
        for stage in range(fold.pp):
            table = Table.of(grid, stage, across)
            assert len({label for label, _ in table.rows}) == len(table.rows)  # no two rows look the same
            for label, row in table.rows:
                assert sum(map(len, row)) <= across
                for box, members in enumerate(row):
                    for column, rank in enumerate(members):
                        place = {f"{axis}{at}" for axis, at in grid.coordinate(rank).items()}
                        assert grid.coordinate(rank)["pp"] == stage
                        names = [*table.box_names[box : box + 1], *table.cell_names[column : column + 1]]
                        assert {*names, *(part for part in label.split() if "–" not in part)} <= place


def test_large_folds_are_abbreviated_and_say_so():
    picture = draw(Fold(10_240, tp=8, cp=4, pp=8, ep=8, etp=2), 8)
    assert "… 152 more rows; the last rank is 1279" in picture
    assert picture.endswith("… 7 more stages like this one, each 1280 ranks further")
    assert len(picture.splitlines()) < 20
    assert "pp1" not in picture


@pytest.mark.parametrize(
    "sizes", [{"tp": 4, "cp": 2, "pp": 2, "ep": 8, "etp": 2}, {"ep": 64}, {"tp": 8, "cp": 8, "etp": 8}, {"tp": 2}]
)
def test_sixty_four_ranks_fit_on_a_screen(sizes):
    lines = draw(Fold(64, **sizes), 8).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 50
    assert all(f" {rank} " in "\n".join(lines) for rank in range(64))
