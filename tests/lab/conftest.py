from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.hosts import Host, hosts, why_not
from tests.lab.ray_cluster import Cluster, ray_cluster


@pytest.fixture(scope="session", autouse=True)
def lab_here() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """Hosts for a cluster, as many as the module's `NODES`, and one for the user."""
    with hosts(request.module.NODES + 1) as lab_hosts:
        yield lab_hosts


@pytest.fixture(scope="module")
def cluster(lab: list[Host]) -> Iterator[Cluster]:
    with ray_cluster(lab[:-1]) as running:
        yield running
