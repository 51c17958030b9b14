"""Who stands still, by signs of life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainers.driver.watch import Watch
from trainers.records import Beat


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
