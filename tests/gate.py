"""Which tests a run takes: the gate's (`make test`), or a share of all tests (`make nightly`). Marks say what is in the gate.

`@pytest.mark.gate(4)`: four of a function's cases, other ones every day, until each has had its turn; with 1 / 3, one case every
third day.
`@pytest.mark.nightly(why)`: not in the gate.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings

SECONDS = Path(__file__).parent / "seconds.json"  # by file, of all its tests, on two quiet cores
_UNKNOWN_S = 5.0  # of a file that is not there
_UNIT_S = 200.0  # of the longest part of a file


def in_gate(items: Sequence[pytest.Item], day: date, named: tuple[str, ...]) -> set[str]:
    """Return the names of the gate's tests on a day, and of those that the command line names (`FILE::TEST…`)."""
    chosen, families = set[str](), defaultdict[tuple[str, float], list[str]](list)
    for item in items:
        limit, nightly = (item.get_closest_marker(mark) for mark in ("gate", "nightly"))
        if item.nodeid.startswith(named) or not (limit or nightly):
            chosen.add(item.nodeid)
        elif limit and not nightly:
            families[item.nodeid.partition("[")[0], limit.args[0]].append(item.nodeid)
    return chosen.union(*(turn(name, cases, count, day) for (name, count), cases in families.items()))


def turn(function: str, cases: Sequence[str], count: float, day: date) -> set[str]:
    """Return a day's cases of a function: the next ones of an order in which neighbours have little in common.

    Functions with the same parameters have the same cases. Those with less than one case a day have it on different days.
    """
    ordered = sorted(cases, key=lambda case: (zlib.crc32(case.partition("[")[2].encode()), case))
    share, number = Fraction(count).limit_denominator(10), day.toordinal()
    if share < 1:
        number += zlib.crc32(function.encode()) % share.denominator
    return {ordered[i % len(ordered)] for i in range(math.floor(number * share), math.floor((number + 1) * share))}


def examples(count: int) -> settings:
    """Have hypothesis try `count` examples, of which the gate has fewer: in proportion to the profiles of `conftest.py`."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


class Units:
    """What runs in one process: a file of tests, or a part of a file that takes long. All files with Ray are one after another.

    Args:
        with_ray: prefixes of the files whose tests share a Ray cluster.
    """

    def __init__(self, with_ray: tuple[str, ...]):
        self._with_ray = with_ray
        self._seconds = defaultdict(lambda: _UNKNOWN_S, json.loads(SECONDS.read_text()))

    def has_ray(self, test: str) -> bool:
        return test.startswith(self._with_ray)

    def unit(self, test: str) -> tuple[str, int]:
        """Return the file of a test, and the number of its part."""
        file = test.partition("::")[0]
        return file, zlib.crc32(test.encode()) % self._parts(file)

    def seconds(self, file: str) -> float:
        """Return the known seconds of a file, or of each part of it."""
        return self._seconds[file] / self._parts(file)

    def share(self, tests: Iterable[str], number: int, shares: int) -> set[str]:
        """Return the tests of one of several shares that take about equally long."""
        tests, loads, chosen = list(tests), [0.0] * shares, set[tuple[str, int]]()
        for unit in sorted(
            set(map(self.unit, tests)), key=lambda unit: (not self.has_ray(unit[0]), -self.seconds(unit[0]), unit)
        ):
            least = loads.index(min(loads))
            loads[least] += self.seconds(unit[0])
            if least == number:
                chosen.add(unit)
        return {test for test in tests if self.unit(test) in chosen}

    def _parts(self, file: str) -> int:
        return 1 if self.has_ray(file) else max(1, math.ceil(self._seconds[file] / _UNIT_S))
