"""Code that several benchmarks of this folder use."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.lab.hosts import Host

# By default, glibc returns large free blocks to the kernel, so every step gets new pages, with a page fault for each 4 KiB.
# With these settings it keeps them, which makes every variant faster. The trainer uses the same settings for its workers.
# glibc reads them only when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


@contextmanager
def on_hosts(
    lab: Sequence[Host], command: Sequence[object], env: Mapping[str, str] = MALLOC, parts: Sequence[Path] = ()
) -> Iterator[list[subprocess.Popen]]:
    """Start a command on every host, each on a core of its own, and wait for all of them at the end of the context.

    Args:
        lab: the hosts.
        command: program, script and arguments; `--worker=NUMBER` is added behind the script.
        env: changes to the environment.
        parts: the control group of every process (`tests/lab/cores.py`); none if empty.

    Raises:
        SystemExit: a process failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    workers = [
        host.popen(
            [*command[:2], f"--worker={i}", *command[2:]], env=env, cpu=cores[i % len(cores)], part=parts[i] if parts else None
        )
        for i, host in enumerate(lab)
    ]
    try:
        yield workers
        codes = [worker.wait(timeout=3600) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(codes):
        raise SystemExit(f"the hosts ended with {codes}")
