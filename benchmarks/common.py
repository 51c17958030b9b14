"""Code that several benchmarks of this folder use. Importing it lets a script import the folders of the repository."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.lab.hosts import Host

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# By default, glibc returns large free blocks to the kernel, so every step gets new pages, with a page fault for each 4 KiB.
# With these settings it keeps them, which makes every variant faster. The trainer uses the same settings for its workers.
# glibc reads them only when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


def check_lab() -> None:
    """End the script if this machine cannot have hosts."""
    from tests.lab.hosts import why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")


def on_hosts(
    lab: Sequence[Host], script: Path, options: Sequence[str], env: Mapping[str, str] = MALLOC, parts: Sequence[Path] = ()
) -> Any:
    """Run a script on every host, each on a core of its own, and return the JSON document that the first one writes.

    Args:
        options: what the script gets behind `--worker=NUMBER`, `--store=HOST:PORT` of the first host, and `--result=FILE`.
        env: changes to the environment.
        parts: the control group of every process (`tests/lab/cores.py`); none if empty.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = [f"--store={lab[0].address}:29400", f"--result={result}", *options]
        workers = [
            host.popen(
                [sys.executable, script, f"--worker={i}", *options],
                env=env,
                cpu=cores[i % len(cores)],
                part=parts[i] if parts else None,
            )
            for i, host in enumerate(lab)
        ]
        try:
            codes = [worker.wait(timeout=3600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"the hosts ended with {codes}")
        return json.loads(result.read_text())
