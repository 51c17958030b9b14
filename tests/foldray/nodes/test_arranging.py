"""Ranks on nodes by their traffic: against every arrangement of small folds, and what crosses nodes against counts by hand."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.nodes import ROWS, Arrangement, Edges, Flow, Placement, Room, Share, arrange, filled
from tests.foldray.nodes.test_placement import legal_orders
from tests.gate import examples

WAYS = {"tp": "ring", "cp": "ring", "ep": "exchange", "etp": "ring", "dp_cp": "ring", "edp": "ring", "pp": "chain"}


@st.composite
def small(draw):
    """Draw the traffic of a fold of at most eight ranks, with sizes of two or three nodes that may have seats to spare."""
    world = draw(st.sampled_from([4, 6, 8]))
    pp = draw(st.sampled_from([1, 1, 2]))
    tp = draw(st.sampled_from(divisors(world // pp)))
    ep = draw(st.sampled_from(divisors(world // pp)))
    cp, etp = (draw(st.sampled_from(divisors(world // pp // size))) for size in (tp, ep))
    fold = draw(st.sampled_from(legal_orders(Fold(world, tp, cp, pp, ep, etp, offset=draw(st.sampled_from([0, 3]))))))
    flows = tuple(Flow(family, way, draw(st.sampled_from([1, 2, 5, 8, 16, 30]))) for family, way in WAYS.items())
    edges = draw(st.sampled_from([Edges(fold, flows), Edges.by_heat(fold)]))
    count = world + draw(st.integers(0, 2))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=2)))
    return edges, [end - start for start, end in itertools.pairwise([0, *cuts, count])]


def every(world: int, seats: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every arrangement of ranks on nodes."""
    if not world:
        yield ()
    for node, left in enumerate(seats):
        if world and left:
            rest = [each - (number == node) for number, each in enumerate(seats)]
            yield from ((node, *others) for others in every(world - 1, rest))


@examples(60)
@given(small())
def test_no_arrangement_of_a_small_fold_is_better(given) -> None:
    edges, seats = given
    found = arrange(edges, [Room(node, size) for node, size in enumerate(seats)])
    assert all(count <= seats[node] for node, count in Counter(found).items())
    assert edges.across(found) == pytest.approx(min(edges.across(where) for where in every(edges.fold.world_size, seats)))


@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
def test_by_heat_what_crosses_is_the_score(per_node: int) -> None:
    fold = Fold(12, tp=2, cp=2, ep=4, etp=3, offset=4 * per_node)
    where = [rank // per_node for rank in range(12)]
    assert Edges.by_heat(fold).across(where) == pytest.approx(Placement(fold, per_node).score())
    assert Arrangement.of(fold, where).score() == Placement(fold, per_node).score()


BY_HAND = [
    (Flow("tp", "ring", 3.0), [0, 0, 0, 1], Share(6.0, 6.0)),  # 0→1→2→3→0
    (Flow("tp", "ring", 3.0), [0, 1, 0, 1], Share(0.0, 12.0)),
    (Flow("tp", "exchange", 3.0), [0, 0, 0, 1], Share(6.0, 6.0)),  # three of six pairs, 2 bytes each
    (Flow("tp", "chain", 3.0), [0, 0, 0, 1], Share(12.0, 6.0)),
    (Flow("tp", "chain", 3.0), [0, 1, 2, 3], Share(0.0, 18.0)),
    (Flow("ep", "exchange", 3.0), [0, 1, 2, 3], None),  # groups of one rank
]


@pytest.mark.parametrize(("flow", "where", "share"), BY_HAND)
def test_traffic_that_is_counted_by_hand(flow: Flow, where: list[int], share: Share | None) -> None:
    edges = Edges(Fold(4, tp=4), (flow,))
    assert edges.split(where)[flow.family] == (share or Share(0.0, 0.0))
    assert edges.across(where) == (share or Share(0.0, 0.0)).across


def test_rows_travel_by_routes() -> None:
    fold = Fold(6, ep=2, expert_ranks=2)  # four ranks of attention, two of experts
    edges = Edges(fold, (Flow(ROWS, "routes", 8.0),))
    assert edges.split([0, 0, 0, 0, 1, 0])[ROWS] == Share(32.0, 32.0)


def test_groups_keep_together_on_unequal_nodes() -> None:
    """In order, the nodes have ranks 0, 1 to 4, and 5 to 7, so two pairs are apart."""
    edges = Edges(Fold(8, tp=2), (Flow("tp", "ring", 10.0), Flow("dp_cp", "ring", 1.0)))
    rooms = [Room(0, 1), Room(1, 4), Room(2, 3)]
    where = Arrangement.of(edges.fold, arrange(edges, rooms))
    split = [pair for pair in edges.fold.groups("tp") if where.node(pair[0]) != where.node(pair[1])]
    assert len(split) == 1
    assert edges.split(filled(range(8), rooms))["tp"].across == 40  # two groups, 20 bytes each


def test_free_seats_let_a_node_have_fewer_ranks() -> None:
    edges = Edges(Fold(4, tp=2), (Flow("tp", "ring", 10.0), Flow("dp_cp", "ring", 1.0)))
    assert Counter(arrange(edges, [Room(0, 3), Room(1, 3)])) == {0: 2, 1: 2}
    assert set(arrange(edges, [Room(0, 3), Room(1, 3), Room(2, 4)])) == {2}


def test_ranks_stay_in_order_unless_another_order_is_better() -> None:
    edges = Edges(Fold(8, tp=2), (Flow("tp", "ring", 10.0), Flow("dp_cp", "ring", 1.0)))
    assert arrange(edges, [Room(5, 4), Room(2, 4)]) == (5, 5, 5, 5, 2, 2, 2, 2)
    assert arrange(Edges(Fold(4), ()), [Room(0, 1), Room(1, 3)]) == (0, 1, 1, 1)


def test_ranks_have_rooms_of_their_kind() -> None:
    """Alone, ranks 0 and 2 would share a node, and so would 1 and 3."""
    edges = Edges(Fold(4, tp=2, order="dp-tp-cp-pp"), (Flow("tp", "ring", 10.0),))
    assert arrange(edges, [Room(0, 2), Room(1, 2)]) in [(0, 1, 0, 1), (1, 0, 1, 0)]
    kinds = ["a", "a", "b", "b"]
    assert arrange(edges, [Room(0, 2, "b"), Room(1, 2, "a")], kinds) == (1, 1, 0, 0)
    apart = [Room(0, 1, "a"), Room(1, 1, "a"), Room(1, 1, "b"), Room(0, 1, "b")]
    assert edges.across(arrange(edges, apart, kinds)) == 0


def test_too_few_seats_are_refused() -> None:
    with pytest.raises(UserError, match=r"nodes=3 4: have room for 7 of 8 ranks"):
        arrange(Edges(Fold(8), ()), [Room(0, 3), Room(1, 4)])


def test_a_thousand_ranks_are_arranged_quickly() -> None:
    flows = tuple(
        Flow(family, way, sent) for (family, way), sent in zip(WAYS.items(), (300, 80, 200, 1, 30, 20, 10), strict=True)
    )
    fold = Fold(1024, tp=2, cp=2, pp=4, ep=8, order="dp-cp-tp-pp")
    edges, rooms = Edges(fold, flows), [Room(node, 8) for node in range(126)] + [Room(126, 11), Room(127, 5)]
    started = time.process_time()
    found = arrange(edges, rooms)
    assert time.process_time() - started < 60
    assert edges.across(found) < 0.6 * edges.across(filled(range(1024), rooms))
