from __future__ import annotations

import pytest

from tests.lab.hosts import why_not


@pytest.fixture(scope="session", autouse=True)
def lab_here() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
