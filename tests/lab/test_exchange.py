"""All-to-alls over a link of the lab use both directions at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.hosts import hosts, why_not
from tests.pool import repository

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

_RANK = """
import statistics, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from foldray.comm import Groups
from foldray.fold import Fold
rank, rows = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:5000", rank=rank, world_size=2, timeout=timedelta(seconds=30))
over = Groups.create(Fold(2, ep=2), rank).tokens
took = []
for _ in range(7):
    dist.barrier()
    begin = time.perf_counter()
    came = over.all_to_all(torch.full((2 * rows, 256), float(rank)), [rows, rows], [rows, rows])
    took.append(time.perf_counter() - begin)
    assert came[:rows].eq(0).all() and came[rows:].eq(1).all()
print(statistics.median(took), flush=True)
"""


def test_an_all_to_all_sends_while_it_receives() -> None:
    """If one direction came after the other, the all-to-all would take twice as long."""
    rows, rate = 1000, 100e6
    with hosts(2, rate=f"{rate:.0f}bit") as (near, far):
        other = far.popen([sys.executable, "-c", _RANK, 1, near.address, rows], cwd=repository(), stdout=subprocess.PIPE)
        done = near.run([sys.executable, "-c", _RANK, 0, near.address, rows], timeout=60, cwd=repository())
        other.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5 * rows * 256 * 4 * 8 / rate
