"""Who stands still, by signs of life."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.faults.watch import Watch
from trainers.telemetry.records import Beat


def beat(rank: int, doing: str = "F attention", waits: Sequence[str] = (), **changes: Any) -> Beat:
    base: dict[str, Any] = {
        "kind": "beat", "rank": rank, "doing": doing, "waits": list(waits), "started": {"tokens": 7}, "still_s": 1.0,
        "trained_s": 9.0, "waited_s": 2.0,
    }  # fmt: skip
    return base | changes  # type: ignore[return-value]


def watch(*beats: Beat, ages: Sequence[float] = ()) -> Watch:
    found = Watch()
    for each, age in zip(beats, ages or [0.0] * len(beats), strict=True):
        found.receive(each, now=1000.0 - age)
    return found


WAITS = ["all-to-all 7 of tokens"]


def test_a_rank_whose_signs_of_life_stop() -> None:
    found = watch(beat(0, "F combine", WAITS), beat(1), beat(2, "F combine", WAITS), ages=(0, 61, 1)).standstill()
    assert found.ranks == (1,)
    assert found.what == (
        "rank 1 showed no sign of life for 61 s; rank 0 waits in F combine for all-to-all 7 of tokens, and 1 other with it"
    )


def test_ranks_that_wait_for_nobody() -> None:
    found = watch(beat(0, "F combine", WAITS), beat(1, "reads its sequences"), beat(2, "reads its sequences")).standstill()
    assert found.ranks == (1, 2)
    assert found.what.startswith("ranks 1, 2 stood still in reads its sequences; rank 0 waits in F combine for all-to-all 7")


def test_all_wait_and_one_is_behind() -> None:
    behind = beat(2, "B combine", ["all-reduce 3 of control"], started={"tokens": 6})
    found = watch(beat(0, "F combine", WAITS), beat(1, "F combine", WAITS), behind).standstill()
    assert found.ranks == (2,)
    assert found.what.startswith("rank 2 has started 6 operations of tokens, others 7; rank 0 waits in F combine")


def test_when_nobody_is_known_to_be_at_fault() -> None:
    """A link is cut, or all ranks do the same."""
    assert watch().standstill().what == "no rank has shown a sign of life"
    both = watch(beat(0, "F combine", WAITS), beat(1, "F combine", WAITS)).standstill()
    assert (both.ranks, both.what[:31]) == ((), "all ranks wait for each other; ")
    assert watch(beat(0, "saves"), beat(1, "saves")).standstill().what == "all ranks stood still in saves"


def test_standing_still_is_told_by_the_ranks() -> None:
    found = watch(beat(0, still_s=12.0), beat(1))
    assert found.stands(10)
    assert not found.stands(20)
    found.clear()
    assert not found.stands(0)


def test_a_rank_is_silent_if_others_are_not() -> None:
    """Time counts while the driver looks every ten seconds, and not while it stands still itself."""

    def silent_after(looks: int, **changes: Any) -> tuple[int, ...]:
        found = Watch()
        for number in range(looks + 1):
            found.receive(beat(0), now=10.0 * number)
            if number == 0:
                found.receive(beat(1, **changes), now=0.0)
            silent = found.silent(60.0, now=10.0 * number + 1.0)
        return silent

    assert [silent_after(looks) for looks in (6, 7)] == [(), (1,)]
    assert not silent_after(50, trained_s=0.0), "it is being built"
    assert not silent_after(50, ends=True), "its attempt has ended"
    assert [silent_after(looks, may_take_s=200.0) for looks in (20, 21)] == [(), (1,)]
    late = watch(beat(0), beat(1))
    assert not late.silent(60.0, now=1001.0)
    late.receive(beat(0), now=9000.0)
    assert not late.silent(60.0, now=9001.0), "the other's sign of life comes next"
    late.receive(beat(1), now=9002.0)
    assert not late.silent(60.0, now=9090.0)


def paced(shares: Sequence[float], beats: int = 20, before: Sequence[float] | None = None) -> Watch:
    """Signs of life of ranks that work for these shares of their time, after other shares before."""
    found, trained, waited = Watch(), [0.0] * len(shares), [0.0] * len(shares)
    for number in range(3 * beats):
        now = shares if before is None or number >= 3 * beats - 15 else before
        for rank, share in enumerate(now):
            found.receive(beat(rank, trained_s=trained[rank], waited_s=waited[rank]))
            trained[rank] += 2.0
            waited[rank] += 2.0 * (1 - share)
    return found


def test_a_slow_rank_works_while_others_wait() -> None:
    paces = paced([0.5, 0.9, 0.55, 0.5]).paces()
    assert [rank for rank, pace in paces.items() if pace.is_slow] == [1]
    assert paces[1].over_others == pytest.approx(1.8)
    assert paces[1].over_before == pytest.approx(1.0)


def test_a_rank_is_compared_with_its_own_past() -> None:
    paces = paced([0.5, 0.9], before=[0.6, 0.6]).paces()
    assert paces[1].over_before == pytest.approx(1.5)
    assert paces[0].over_before == pytest.approx(5 / 6)


def test_pipeline_positions_are_compared_apart() -> None:
    """The last position has the head, and works longer than the first one all the time."""
    watching = paced([0.5, 0.5, 0.9, 0.9])
    assert not any(pace.is_slow for pace in watching.paces({0: 0, 1: 0, 2: 1, 3: 1}).values())
    assert [rank for rank, pace in watching.paces().items() if pace.is_slow] == [2, 3]


def test_a_pace_needs_some_signs_of_life() -> None:
    assert watch(beat(0), beat(1)).paces() == {}
    assert paced([0.9]).paces()[0].over_others is None


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 0.9)), min_size=1, max_size=9))
def test_a_pace_is_compared_with_the_other_ranks_of_its_position(ranks: list[tuple[int, float]]) -> None:
    found = Watch()
    for number in range(15):
        for rank, (_, busy) in enumerate(ranks):
            found.receive(beat(rank, trained_s=10.0 * number, waited_s=10.0 * number * (1.0 - busy)))
    for rank, pace in found.paces({rank: position for rank, (position, _) in enumerate(ranks)}).items():
        position, busy = ranks[rank]
        others = [share for other, (at, share) in enumerate(ranks) if at == position and other != rank]
        assert pace.busy == pytest.approx(busy)
        assert pace.over_others == (pytest.approx(busy / statistics.median(others)) if others else None)
