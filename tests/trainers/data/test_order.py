"""The order of sequences: permutations that are computed, against a network that is written out in whole numbers."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from trainers.data.order import NEWEST, SampleOrder

VERSIONS = pytest.mark.parametrize("version", [1, NEWEST])


@VERSIONS
@pytest.mark.parametrize("counts", [range(1, 130), (1000, 4095, 4096, 4097)], ids=["small", "large"])
def test_every_epoch_is_a_permutation(version: int, counts: range):
    for count in counts:
        order = SampleOrder(3, count, version=version)
        for epoch in (0, 1, 7):
            assert np.sort(order(epoch * count, (epoch + 1) * count)).tolist() == list(range(count))


@VERSIONS
def test_epochs_seeds_and_sources_differ(version: int):
    order = SampleOrder(3, 50, version=version)
    found = [order(start, start + 50) for start in (0, 50, 100)]
    found += [SampleOrder(4, 50, version=version)(0, 50), SampleOrder(3, 50, 1, version)(0, 50)]
    assert len({tuple(each) for each in found}) == 5


@VERSIONS
def test_the_order_depends_on_seed_and_position_alone(version: int):
    whole, order = SampleOrder(7, 11, version=version)(0, 60), SampleOrder(7, 11, version=version)
    for start, stop in [(40, 60), (0, 1), (9, 25), (30, 30), (5, 60)]:  # forwards and backwards, across epochs
        assert order(start, stop).tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize(
    ("version", "golden"),
    [(1, [0, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 1, 6, 5, 0]), (2, [2, 0, 4, 5, 1, 7, 6, 3, 7, 6, 1, 5, 4, 2, 3, 0])],
)
def test_the_order_never_changes(version: int, golden: list[int]):
    # A checkpoint resumes in the middle of an order. The literal order shows if a version of NumPy changes it.
    assert SampleOrder(0, 8, version=version)(0, 16).tolist() == golden


def by_hand(place: int, count: int, keys: list[int]) -> int:
    """Return what the network makes of one place, in Python's whole numbers."""
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    while True:
        row, column = divmod(place, columns)
        for turn in range(0, len(keys), 2):
            row = (row + murmur(column ^ keys[turn])) % rows
            column = (column + murmur(row ^ keys[turn + 1])) % columns
        if (place := row * columns + column) < count:
            return place


def murmur(value: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ value >> 33) * factor % 2**64
    return value ^ value >> 33


@pytest.mark.parametrize("count", [1, 2, 3, 8, 97, 10**9 + 7, 2**62])
def test_the_network_is_the_one_of_the_module(count: int):
    keys = np.random.Philox([5, 2, 3]).random_raw(12).tolist()
    start = 2 * count + count // 3
    many = min(9, count - count // 3)
    expected = [by_hand(place, count, keys) for place in range(count // 3, count // 3 + many)]
    assert SampleOrder(5, count, 3)(start, start + many).tolist() == expected


def test_every_sequence_is_as_likely_at_every_position():
    """The sums of squares have the mean and the variance of χ²."""
    seeds = 2000
    for count in (2, 5, 9, 16):
        found = np.asarray([SampleOrder(seed, count)(0, count) for seed in range(seeds)])
        counts = np.asarray([np.bincount(column, minlength=count) for column in found.T])
        square, free = ((counts - seeds / count) ** 2).sum() * count / seeds, (count - 1) ** 2
        assert abs(square - free) < 4 * math.sqrt(2 * free), count


def test_every_permutation_of_a_few_is_as_likely():
    found = Counter(tuple(SampleOrder(seed, 4)(0, 4).tolist()) for seed in range(2400))
    assert sum((found[each] - 100) ** 2 / 100 for each in found) < 60  # 23 degrees of freedom
    assert len(found) == 24


def test_neighbours_and_epochs_have_nothing_in_common():
    count = 10_007
    order = SampleOrder(0, count)
    one, two = order(0, count), order(count, 2 * count)
    for first, second in ((one[1:], one[:-1]), (one, two), (one, np.arange(count))):
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(count)


def test_memory_does_not_grow_with_the_epoch():
    for count in (10**3, 10**15):
        order = SampleOrder(0, count)
        order(0, 64)
        tracemalloc.start()
        for start in range(count - 128, count + 128, 64):
            order(start, start + 64)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50_000, count
