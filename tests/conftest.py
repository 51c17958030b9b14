"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
import ray
from hypothesis import settings

from tests.gate import Units, in_gate
from tests.pool import RankPools
from tests.record import Record

# A second Ray cluster would be found by the first one's commands, and hosts in namespaces are there once. So these tests run one
# after another.
_WITH_RAY = (
    *(f"tests/trainers/cluster/test_{name}" for name in ("actors", "seating", "workers")),
    *(f"tests/trainers/data/test_{name}" for name in ("datasets", "prepare")),
    *(f"tests/trainers/faults/test_{name}" for name in ("guardian", "pulse", "stopping")),
    *(f"tests/trainers/measure/test_{name}" for name in ("bench", "calibrate", "verify")),
    *(f"tests/trainers/driver/test_{name}" for name in (
        "apart_training", "bad_input", "fine_tuning", "lora", "mixture", "python", "recipes", "routes", "s3", "safe_defaults",
        "secrets", "train",
    )),
    *(f"tests/trainers/{name}" for name in (
        "inference/test_folded", "sinks/test_prometheus", "telemetry/test_records", "worker/test_online",
    )),
    "tests/tuners/test_entry_killed", "tests/tuners/test_study", "tests/lab",
)  # fmt: skip


# Several tests share a machine, so an example may take long. Counts of examples are in proportion to a profile's.
settings.register_profile("gate", deadline=None, max_examples=15)
settings.register_profile("all", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, not the gate's alone")
    parser.addoption("--share", metavar="I/N", help="run one of N shares of all tests, from 0/N; keep its outcome")
    parser.addoption("--seconds", action="store_true", help="keep the seconds of each file, by which shares are made")
    parser.addoption("--day", default=f"{date.today()}", help="whose cases the gate takes (default: today)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of tiny models would only wait for each other
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell starts what runs in the background so, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    share = config.getoption("--share")
    settings.load_profile("all" if share or config.getoption("--all") else "gate")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(share, config.getoption("--seconds")))


def pytest_report_header(config: pytest.Config) -> str:
    if share := config.getoption("--share"):
        return f"share {share} of all tests"
    return "all tests" if config.getoption("--all") else f"the gate's tests of {config.getoption('--day')}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a unit in one process, and all tests with Ray. The order is that of `pytest_collection_modifyitems`."""
    from xdist.scheduler import LoadScopeScheduling

    units = Units(_WITH_RAY)

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if units.has_ray(nodeid) else str(units.unit(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests that run. Those with Ray begin, then the longest units, so that all processes end together."""
    units, names = Units(_WITH_RAY), {item.nodeid for item in items}
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()) and not units.has_ray(item.nodeid):
            raise pytest.UsageError(f"{item.nodeid} uses Ray, so its file must be in _WITH_RAY")
        if any(not mark.args for mark in item.iter_markers("nightly")):
            raise pytest.UsageError(f"{item.nodeid} does not say why it is left out of the gate")
    if given := config.getoption("--share"):
        names = units.share(names, *map(int, given.split("/")))
    elif not config.getoption("--all"):
        named = tuple(argument for argument in config.args if "::" in argument)
        names = in_gate(items, date.fromisoformat(config.getoption("--day")), named)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]
    items.sort(
        key=lambda item: (not units.has_ray(item.nodeid), -units.seconds(units.unit(item.nodeid)[0]), units.unit(item.nodeid))
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by their reasons."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        told = " · ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{len(skipped)} skipped. {told}. CONTRIBUTING.md says how each of them runs.")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """A function: `ranks(world)` returns a pool of `world` processes, which the session shares."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray cluster of two CPUs on this machine. All tests share it, because starting Ray is slow."""
    from trainers.cluster.joining import start_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        patch.setenv("RAY_worker_niceness", "0")  # otherwise workers wait for all else that runs on the machine
        start_ray(num_cpus=2, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
