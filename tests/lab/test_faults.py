"""Some of the faults of `faults.py` and `host_faults.py`, as `benchmarks/faults.py` tries them all."""

from __future__ import annotations

import pytest

from tests.lab.faults import FAULTS
from tests.lab.host_faults import HOST_FAULTS, on_hosts
from tests.lab.hosts import LAB
from tests.lab.hurt import Moment, here, hurt, undisturbed

pytestmark = [pytest.mark.nightly(LAB), pytest.mark.timeout(900)]

_HERE: list[tuple[str, Moment]] = [
    ("a worker is killed", "step"),
    ("a worker stands still", "start"),
    ("a worker stands still", "step"),
    ("Ray Train's controller is killed", "saving"),
    ("the driver is killed", "saving"),
    ("the checkpoint is truncated", "step"),
    ("the disk of checkpoints is full", "saving"),
    ("a gradient is no number once", "step"),
    ("an error of the user's code", "start"),
]
_ON_HOSTS: list[tuple[str, Moment]] = [("a host is killed", "saving"), ("a host's link is cut", "step")]


@pytest.fixture(scope="module")
def loss() -> float:
    return undisturbed(here)


@pytest.mark.parametrize(("name", "moment"), _HERE, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_is_told_and_costs_no_more_than_it_must(loss: float, name: str, moment: Moment) -> None:
    assert not hurt(FAULTS[name], moment, loss, here).wrong


@pytest.mark.parametrize(("name", "moment"), _ON_HOSTS, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_of_a_host(name: str, moment: Moment) -> None:
    assert not hurt(HOST_FAULTS[name], moment, None, on_hosts).wrong
