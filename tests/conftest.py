"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)` is a pool of that many processes, shared by the session."""
    pools: dict[int, RankPool] = {}
    yield lambda world: pools.setdefault(world, RankPool(world))
    for pool in pools.values():
        pool.close()
