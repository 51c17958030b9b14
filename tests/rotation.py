"""Products of many cases. A normal run takes those few in which values meet that have not met before; the rest is nightly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rotated(normal: int, *columns: Sequence[Any]) -> list[Any]:
    """Make all combinations for `parametrize`, and mark all but a few as nightly. Every value appears in a normal run.

    Args:
        normal: the number of combinations that stay normal. One after another, the combination is taken in which most pairs of
            values meet for the first time.
        columns: the values of each parameter. A tuple stands for several parameters.
    """
    combinations = list(itertools.product(*(range(len(column)) for column in columns)))
    seen: dict[tuple[int, ...], set[tuple[int, ...]]] = {}  # by places of columns: the values that have met there
    chosen = set[tuple[int, ...]]()
    for _ in range(min(normal, len(combinations))):
        best = max((each for each in combinations if each not in chosen), key=lambda each: _news(each, seen))
        chosen.add(best)
        for places in _places(best):
            seen.setdefault(places, set()).add(tuple(best[place] for place in places))
    assert all(len({each[i] for each in chosen}) == len(column) for i, column in enumerate(columns)), "a value never appears"
    return [pytest.param(*_values(each, columns), marks=() if each in chosen else pytest.mark.nightly) for each in combinations]


def _places(combination: Sequence[int]) -> list[tuple[int, ...]]:
    """Single columns and pairs of columns."""
    columns = range(len(combination))
    return [*((i,) for i in columns), *itertools.combinations(columns, 2)]


def _news(combination: tuple[int, ...], seen: dict[tuple[int, ...], set[tuple[int, ...]]]) -> tuple[int, int]:
    """How many single values, then how many pairs of values, a combination would show for the first time."""
    new = [places for places in _places(combination) if tuple(combination[i] for i in places) not in seen.get(places, ())]
    return sum(len(places) == 1 for places in new), sum(len(places) == 2 for places in new)


def _values(combination: Sequence[int], columns: Sequence[Sequence[Any]]) -> list[Any]:
    chosen = [column[number] for column, number in zip(columns, combination, strict=True)]
    return [part for value in chosen for part in (value if isinstance(value, tuple) else (value,))]
