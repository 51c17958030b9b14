"""All-to-alls over a link of the lab use both directions at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.hosts import LAB, hosts
from tests.pool import repository

pytestmark = pytest.mark.nightly(LAB)

_RANK = """
import statistics, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from foldray.comm import Groups
from foldray.fold import Fold
rank, rows = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:5000", rank=rank, world_size=2, timeout=timedelta(seconds=300))
over = Groups.create(Fold(2, ep=2), rank).tokens
took = {both: [] for both in (False, True)}
for turn in range(14):
    both = turn % 2 == 1
    mine, theirs = rows * (both or rank == 1), rows * (both or rank == 0)  # what a rank sends to the other one
    sends, receives = [rows, rows], [rows, rows]
    sends[1 - rank], receives[1 - rank] = mine, theirs
    dist.barrier()
    begin = time.perf_counter()
    came = over.all_to_all(torch.full((sum(sends), 256), float(rank)), receives, sends)
    took[both].append(time.perf_counter() - begin)
    first = receives[0]
    assert len(came) == sum(receives) and came[:first].eq(0).all() and came[first:].eq(1).all()
print(statistics.median(took[True]) / statistics.median(took[False]), flush=True)
"""


def test_an_all_to_all_sends_while_it_receives() -> None:
    """If one direction came after the other, the all-to-all would take twice as long as with rows for one rank only."""
    with hosts(2, rate="100mbit") as (near, far):
        other = far.popen([sys.executable, "-c", _RANK, 1, near.address, 1000], cwd=repository(), stdout=subprocess.PIPE)
        done = near.run([sys.executable, "-c", _RANK, 0, near.address, 1000], timeout=600, cwd=repository())
        other.communicate(timeout=600)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5
