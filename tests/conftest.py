"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.pool import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world)` is a pool of that many processes, shared by the session."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray of two CPUs on this machine, polled often and silent. One for all tests: starting it is what costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
