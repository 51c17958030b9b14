"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world)` is a pool of that many processes, shared by the session."""
    pools = RankPools()
    yield pools
    pools.close()
