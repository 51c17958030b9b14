"""Combinations of test cases: a normal run takes a part in which every value of every column occurs. The rest is nightly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rotated(parts: int, *columns: Sequence[Any]) -> list[Any]:
    """Return all combinations for `parametrize`. One in `parts` is not nightly. A tuple stands for several parameters."""
    found = []
    for chosen in itertools.product(*(enumerate(column) for column in columns)):
        values = [part for _, value in chosen for part in (value if isinstance(value, tuple) else (value,))]
        normal = sum(number for number, _ in chosen) % parts == 0
        found.append(pytest.param(*values, marks=() if normal else pytest.mark.nightly))
    return found
