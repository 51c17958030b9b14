"""The search at the start of a training, on curves with a known minimum."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trainers.worker.online import Knobs
from tuners import OnlineSearch

SMALLEST, LARGEST = 64 << 10, 64 << 20


def curve(size: int) -> float:
    """Return a step's seconds: 0.1 s, the time to start chunks, and that of the last chunk. The best size is 2 MiB."""
    return 0.1 + 0.02 * ((2 << 20) / size + size / (2 << 20)) / 2


def searched(measure: Callable[[int], float], seed: int = 0) -> OnlineSearch:
    search = OnlineSearch([4], (SMALLEST, LARGEST), seed=seed)
    while (knobs := search.ask()) is not None:
        search.tell(knobs, measure(knobs.sp_bytes))
    return search


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(5))
def test_eight_samples_come_within_3_percent(seed: int) -> None:
    search = searched(curve, seed)
    assert len(search.measured) == 8
    assert len({knobs for knobs, _ in search.measured}) == 8, "nothing twice"
    assert all(SMALLEST <= knobs.sp_bytes <= LARGEST for knobs, _ in search.measured)
    assert curve(search.ranked[0].sp_bytes) <= 1.03 * curve(2 << 20)


def test_what_was_measured_best_comes_first_whatever_the_model_says() -> None:
    noise = random.Random(1)
    search = searched(lambda size: curve(size) * noise.uniform(0.9, 1.1))
    assert (search.ranked[0], min(seconds for _, seconds in search.measured)) in search.measured


def test_later_proposals_go_by_what_was_told() -> None:
    small, large = searched(lambda size: math.log(size)), searched(lambda size: 30 - math.log(size))
    assert [row for row, _ in small.measured[:3]] == [row for row, _ in large.measured[:3]], "random starts, of one seed"
    later = [sum(math.log(row.sp_bytes) for row, _ in search.measured[3:]) for search in (small, large)]
    assert later[0] < later[1]


def test_the_same_seed_proposes_the_same() -> None:
    assert searched(curve, 3).measured == searched(curve, 3).measured


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(5))
def test_degrees_and_sizes_together(seed: int) -> None:
    """More pieces hide more communication and take more time to start. The best degree is 4."""
    search = OnlineSearch([1, 2, 4, 8], (SMALLEST, LARGEST), seed=seed)

    def took(knobs: Knobs) -> float:
        return curve(knobs.sp_bytes) * (1 + 0.3 / knobs.order + 0.02 * knobs.order)

    while (knobs := search.ask()) is not None:
        search.tell(knobs, took(knobs))
    assert len(search.measured) == 16
    assert took(search.ranked[0]) <= 1.03 * took(Knobs(4, 2 << 20))


def test_few_degrees_are_all_tried() -> None:
    search = OnlineSearch([2, 4, 8], None)
    while (knobs := search.ask()) is not None:
        search.tell(knobs, 1 / knobs.order)
    assert sorted(knobs for knobs, _ in search.measured) == [Knobs(2), Knobs(4), Knobs(8)]
    assert search.ranked[0] == Knobs(8)
