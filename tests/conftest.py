"""Fixtures for all tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from hypothesis import settings

from tests.optional import NO_TUTEL, has_tutel
from tests.pool import RankPools

# Tests of the lowest floors run first, because a fault there makes later tests fail, too.
_FLOORS = (
    "test_imports", "foldray/test_fold", "foldray/test_kinds", "foldray/test_blueprint", "foldray/test_placement",
    "foldray/schedule", "foldray/timeline", "foldray/test_recipe", "test_cli", "foldray/comm", "foldray/kernels",
    "foldray/moe", "foldray/model", "foldray/runtime", "foldray/test_parity", "foldray", "trainers/data", "trainers",
    "tuners", "lab",
)  # fmt: skip

# A second Ray cluster would be found by the first one's commands, and hosts in namespaces are there once. So these tests run one
# after another.
_WITH_RAY = (
    "tests/trainers/cluster", "tests/trainers/data/test_datasets", "tests/trainers/data/test_prepare", "tests/trainers/driver",
    "tests/trainers/measure", "tests/trainers/test_records", "tests/trainers/worker/test_online",
    "tests/trainers/worker/test_pulse", "tests/tuners/test_entry", "tests/tuners/test_study", "tests/test_recipes", "tests/lab",
)  # fmt: skip


settings.register_profile("foldray", deadline=None)  # several tests share a machine, so an example may take long
settings.load_profile("foldray")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run every N-th of the tests, chosen by name; I is from 0 to N − 1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep all tests with Ray in one process. Others go to whichever process is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(_WITH_RAY) else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say whether the tests with Tutel ran. No package index has Tutel."""
    skipped = sum(NO_TUTEL in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    outcome = "Tutel is installed, and its tests ran" if has_tutel() else f"{NO_TUTEL}: {skipped} tests were skipped"
    terminalreporter.write_line(outcome)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by floors. With --share, keep only that share of them."""
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()) and not item.nodeid.startswith(_WITH_RAY):
            raise pytest.UsageError(f"{item.nodeid} uses Ray, so its file must be in _WITH_RAY")
    if share := config.getoption("--share"):
        number, shares = map(int, share.split("/"))
        chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == number % shares]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    items.sort(key=lambda item: _floor(item.nodeid))


def _floor(name: str) -> int:
    path = name.removeprefix("tests/")
    return next((number for number, floor in enumerate(_FLOORS) if path.startswith(floor)), len(_FLOORS))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """A function: `ranks(world)` returns a pool of `world` processes, which the session shares."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray cluster of two CPUs on this machine. All tests share it, because starting Ray is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
