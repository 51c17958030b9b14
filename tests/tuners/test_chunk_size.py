"""The search for a size of gradient chunks, on curves of which the best is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tuners import ChunkSizeSearch

SMALLEST, LARGEST = 64 << 10, 64 << 20


def curve(size: int) -> float:
    """A step of 100 ms that pays for every start of a chunk, and for what the last one leaves behind: its best is at 2 MiB."""
    return 0.1 + 0.02 * ((2 << 20) / size + size / (2 << 20)) / 2


def searched(measure: Callable[[int], float], seed: int = 0) -> ChunkSizeSearch:
    search = ChunkSizeSearch(SMALLEST, LARGEST, samples=8, seed=seed)
    while (size := search.ask()) is not None:
        search.tell(size, measure(size))
    return search


@pytest.mark.parametrize("seed", range(5))
def test_eight_samples_come_within_3_percent(seed: int) -> None:
    search = searched(curve, seed)
    assert len(search.measured) == 8
    assert all(SMALLEST <= size <= LARGEST for size, _ in search.measured)
    assert curve(search.ranked[0]) <= 1.03 * curve(2 << 20)


def test_what_was_measured_best_comes_first_whatever_the_model_says() -> None:
    noise = random.Random(1)
    search = searched(lambda size: curve(size) * noise.uniform(0.9, 1.1))
    assert (search.ranked[0], min(seconds for _, seconds in search.measured)) in search.measured


def test_later_proposals_go_by_what_was_told() -> None:
    small, large = searched(lambda size: math.log(size)), searched(lambda size: -math.log(size))
    assert [size for size, _ in small.measured[:3]] == [size for size, _ in large.measured[:3]], "random starts, of one seed"
    later = [sum(math.log(size) for size, _ in search.measured[3:]) for search in (small, large)]
    assert later[0] < later[1]


def test_the_same_seed_proposes_the_same() -> None:
    assert searched(curve, 3).measured == searched(curve, 3).measured
