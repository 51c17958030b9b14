"""Products of many cases: a normal run takes a part in which every value of every column appears; the rest is nightly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rotated(parts: int, *columns: Sequence[Any], every: int = 1) -> list[Any]:
    """Make all combinations for `parametrize`. One of so many is normal, the others are nightly.

    Args:
        parts: as many combinations go on one normal combination.
        columns: the values of each parameter. A tuple stands for several parameters.
        every: how many of these normal combinations go on one that stays normal.
    """
    found, seen, candidates = [], [set[int]() for _ in columns], 0
    for chosen in itertools.product(*(enumerate(column) for column in columns)):
        values = [part for _, value in chosen for part in (value if isinstance(value, tuple) else (value,))]
        numbers = [number for number, _ in chosen]
        candidate = sum(numbers) % parts == 0
        normal = candidate and candidates % every == 0
        candidates += candidate
        if normal:
            for column, number in zip(seen, numbers, strict=True):
                column.add(number)
        found.append(pytest.param(*values, marks=() if normal else pytest.mark.nightly))
    assert [len(column) for column in seen] == [len(column) for column in columns], "a normal run would leave out a value"
    return found
