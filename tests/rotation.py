"""Products of many cases: a normal run takes a part in which every value of every column appears; the rest is nightly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rotated(parts: int, *columns: Sequence[Any]) -> list[Any]:
    """All combinations for `parametrize`; one of so many is not nightly. A tuple stands for several parameters."""
    found = []
    for chosen in itertools.product(*(enumerate(column) for column in columns)):
        values = [part for _, value in chosen for part in (value if isinstance(value, tuple) else (value,))]
        normal = sum(number for number, _ in chosen) % parts == 0
        found.append(pytest.param(*values, marks=() if normal else pytest.mark.nightly))
    return found
