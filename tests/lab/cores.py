"""Parts of a core: groups of processes that get only a share of one core's time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

_PERIOD = 10_000  # microseconds; short, so that a process that has used its share does not pause for long
_ROOTS = {Path("/sys/fs/cgroup"): "cpu.max", Path("/sys/fs/cgroup/cpu"): "cpu.cfs_quota_us"}  # cgroup v2, and v1

_numbers = count()


@contextmanager
def part_of_core(share: float) -> Iterator[Path]:
    """Make a control group whose processes together get `share` of a core, and yield its folder (`Host.popen`).

    At the end of the context, its processes must have ended.

    Raises:
        OSError: this machine cannot make control groups.
    """
    root, file = _root()
    folder = root / f"foldray-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        quota = round(share * _PERIOD)
        if file == "cpu.max":
            (folder / file).write_text(f"{quota} {_PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / file).write_text(str(quota))
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def _root() -> tuple[Path, str]:
    """Return the folder of the machine's control groups for processors, and the file of a group's quota."""
    for root, file in _ROOTS.items():
        trial = root / f"foldray-{os.getpid()}-trial"
        with suppress(OSError):
            trial.mkdir()
            try:
                if (trial / file).exists():
                    return root, file
            finally:
                trial.rmdir()
    raise OSError("this machine has no control groups for processors")
